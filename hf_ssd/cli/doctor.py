"""Examines a pair before its weights are loaded, by its configs, tokenizers and devices."""

import os

from transformers import PreTrainedModel

from ..cache.support import attention_layout
from ..config import WITHOUT_DRAFT
from ..distributed.cores import available_cores
from ..drafting.heads.loading import structure_at
from ..drafting.resolver import for_worker
from ..generation.checks import check_arguments
from ..generation.tokenizers import translation_for
from .dtypes import fastest
from .models import Model, Models
from .verdict import BUSY


def examine(models: Models, tries_dtypes: bool = False) -> dict:
    """Returns a description of each model and of the pair, or raises `ValueError` if the two do not fit."""
    target = models.target.structure()
    tried = {"fastest_dtype": fastest(target, models.target.device)} if tries_dtypes else {}
    if models.draft is None:
        if models.config.drafter in WITHOUT_DRAFT:
            check_arguments(target, None, models.config, synced_gpus=False)
        return {"target": describe(target, models.target), **tried}
    draft = structure_at(models.draft.name, target) or models.draft.structure()
    for_worker(draft)
    resolved = check_arguments(target, draft, models.config, synced_gpus=False)
    translation_for(target, resolved, **models.tokenizers)
    return {
        "target": describe(target, models.target),
        "draft": describe(draft, models.draft),
        "shares_memory": models.shares_memory,
        **tried,
    }


def load() -> float:
    """Returns the mean number of running programs for each core over the last minute, or 0 if that is not known."""
    return os.getloadavg()[0] / len(available_cores()) if hasattr(os, "getloadavg") else 0.0


def describe(model: PreTrainedModel, named: Model) -> dict:
    config, layout = model.config.get_text_config(decoder=True), attention_layout(model)
    window = layout.window and f"windows of {layout.window} tokens"
    described = {
        "name": named.name,
        "family": config.model_type,
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "attention": " and ".join(
            filter(None, [None if window and not layout.mixed else "full", window, layout.recurrent and "recurrent"])
        ),
        "vocabulary": config.vocab_size,
        "device": str(named.device),
        "dtype": str(config.dtype or "float32").removeprefix("torch.") if named.dtype == "auto" else named.dtype,
    }
    layers = getattr(config, "target_layers", None)
    if layers:
        described["target_layers"] = layers
    pard_token = getattr(config, "pard_token", None)
    return described if pard_token is None else {**described, "pard_token": pard_token}


def in_words(known: dict, load: float | None = None) -> str:
    """Returns the result of [`examine`], and the load of the machine if it is given, as lines of text."""
    lines = []
    for side in [name for name in ("target", "draft") if name in known]:
        model = known[side]
        parallel = f", parallel (mask token {model['pard_token']})" if "pard_token" in model else ""
        if "target_layers" in model:
            parallel = f", a head (reads hidden states {model['target_layers']})"
        lines.append(
            f"{side:<11} {model['name']}: {model['family']}, {model['parameters'] / 1e6:.1f}M parameters, "
            f"{model['layers']} layers, attention {model['attention']}, {model['vocabulary']} tokens, "
            f"on {model['device']} in {model['dtype']}{parallel}"
        )
    if "shares_memory" in known:
        both = "both models share one device's memory and slow each other down"
        lines.append(f"{'memory':<11} {both if known['shares_memory'] else 'each model has a device of its own'}")
    if load is not None:
        lines.append(f"{'load':<11} {load:.2f} running programs for each core{', a busy machine' * (load > BUSY)}")
    best, loaded = known.get("fastest_dtype"), known["target"]["dtype"]
    if best is not None and best != loaded:
        lines.append(f"{'dtype':<11} this processor computes {best} faster than {loaded}: --dtype {best}")
    return "\n".join(lines)
