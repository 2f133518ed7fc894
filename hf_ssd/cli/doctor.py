"""Examines a pair before its weights are loaded, by its configs, tokenizers and devices."""

import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..cache.support import attention_layout
from ..config import SSDConfig
from ..distributed.cores import available_cores
from ..generation.checks import check_arguments
from ..generation.tokenizers import translation_for
from .models import Models, check_exists, first_sentence


def examine(models: Models) -> dict:
    """
    Returns a description of each model, and `shares_memory`.

    Raises:
        `ValueError`: the two models cannot work together.
    """
    target = without_weights(models.target)
    draft = None if models.draft is None else without_weights(models.draft)
    check_arguments(target, draft, SSDConfig(drafter=models.drafter), synced_gpus=False)
    both = models.tokenizers
    translation_for(target, draft, both.get("tokenizer"), both.get("assistant_tokenizer"))
    return {
        "target": describe(target, models.target, models.device),
        "draft": None if draft is None else describe(draft, models.draft, models.draft_device),
        "shares_memory": models.shares_memory,
    }


def config_of(name: str) -> PreTrainedConfig:
    check_exists(name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} is no folder or hub id of a model that loads: {first_sentence(error)}") from error


def without_weights(name: str) -> PreTrainedModel:
    """
    Builds a model on the meta device, to look at its structure.

    Raises:
        `ValueError`: there is no such model, or the model does not generate text by itself.
    """
    config = config_of(name)
    if not config.is_encoder_decoder:
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config)
        except ValueError as error:  # its message lists all models that transformers knows
            if "Unrecognized configuration class" not in str(error):
                raise
    raise ValueError(f"{name} is a {config.model_type} model; only decoder-only models that generate text can be used.")


def load() -> float:
    """Returns the mean number of running programs for each core over the last minute, or 0 if that is not known."""
    return os.getloadavg()[0] / len(available_cores()) if hasattr(os, "getloadavg") else 0.0


def describe(model: PreTrainedModel, name: str, device: torch.device) -> dict:
    config, layout = model.config.get_text_config(decoder=True), attention_layout(model)
    window = layout.window and f"windows of {layout.window} tokens"
    described = {
        "name": name,
        "family": config.model_type,
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "attention": " and ".join(
            filter(None, [None if window and not layout.mixed else "full", window, layout.recurrent and "recurrent"])
        ),
        "vocabulary": config.vocab_size,
        "device": str(device),
    }
    pard_token = getattr(config, "pard_token", None)
    return described if pard_token is None else {**described, "pard_token": pard_token}


def in_words(known: dict) -> str:
    """Returns the result of [`examine`] as lines of text."""
    lines = []
    for side in ("target", "draft") if known["draft"] else ("target",):
        model = known[side]
        parallel = f", parallel (mask token {model['pard_token']})" if "pard_token" in model else ""
        lines.append(
            f"{side:<11} {model['name']}: {model['family']}, {model['parameters'] / 1e6:.1f}M parameters, "
            f"{model['layers']} layers, attention {model['attention']}, {model['vocabulary']} tokens, "
            f"on {model['device']}{parallel}"
        )
    if not known["draft"]:
        return "\n".join([*lines, f"{'draft':<11} none: the last tokens are looked up in the text"])
    memory = "one memory for both: they slow each other down" if known["shares_memory"] else "one for each"
    return "\n".join([*lines, f"{'memory':<11} {memory}"])
