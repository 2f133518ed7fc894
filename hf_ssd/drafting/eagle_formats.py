"""Reads and writes EAGLE-3 heads in the formats in which they are published."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from ..cache.hidden_states import check_layers, decoder_parts
from ..gguf_files import is_gguf
from .eagle_head import Eagle3Head
from .vocabulary import MOST_PADDING

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
NOT_LOADED = ("t2d", "verifier_", "rotary_emb")  # what the rest tells, or only training needs


def head_values(path: str | os.PathLike) -> dict | None:
    """
    Returns the config of an EAGLE-3 head, or `None` if another kind of model, or nothing, is at `path`. There are two
    formats: the config of a model with `draft_vocab_size` (SafeAILab, AngelSlim and others), and that of the package
    speculators, which nests the config of the layer.

    Raises:
        `ValueError`: another kind of draft of the package speculators is at `path`.
    """
    if is_gguf(path):
        return None
    try:
        values, _ = PreTrainedConfig.get_config_dict(os.fspath(path))
    except (OSError, ValueError):
        return None
    kind = values.get("speculators_model_type")
    if kind is None:
        return values if "draft_vocab_size" in values else None
    if kind != "eagle3":
        raise ValueError(f"{os.fspath(path)!r} is a speculator of the type {kind!r}; the type 'eagle3' is supported.")
    return {**values["transformer_layer_config"], **values}


def head_config(values: dict, target: PreTrainedModel) -> PreTrainedConfig:
    """
    Returns the config of an [`Eagle3Head`] for a target.

    Raises:
        `ValueError`: the head was made for another target, or has several layers.
    """
    text = target.config.get_text_config(decoder=True)
    nested = values.get("transformer_layer_config", values)
    if nested.get("num_hidden_layers", 1) != 1:
        raise ValueError(
            f"The head has {nested['num_hidden_layers']} layers; EAGLE-3 heads of one layer are supported."
        )
    own = {"draft_vocab_size": values["draft_vocab_size"]}
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        own[name] = bool(values.get(name, False))
    layers = _layers(values, len(decoder_parts(target)[0]))
    check_layers(target, layers)
    own |= {"target_layers": layers, "target_width": len(layers) * text.hidden_size}
    hidden = values.get("target_hidden_size") or nested["hidden_size"]
    if hidden != text.hidden_size:
        raise ValueError(
            f"The head reads hidden states of {hidden} numbers, and those of {type(target).__name__} have "
            f"{text.hidden_size}; it was made for another target."
        )
    skipped = {"architectures", "auto_map", "transformer_layer_config", "speculators_config", "model_type"}
    layer = {key: value for key, value in nested.items() if key not in skipped}
    config = AutoConfig.for_model(nested["model_type"], **{**layer, **own})
    config.tie_word_embeddings = False
    return config


def _layers(values: dict, count: int) -> list[int]:
    """Returns the indices of the hidden states that a head reads, of a target with `count` layers."""
    name, nested = "eagle_aux_hidden_state_layer_ids", values.get("eagle_config") or {}
    if values.get(name):
        return list(values[name])
    if nested.get(name):  # SpecForge and SGLang count layers from 0, and mean their outputs
        return [layer + 1 for layer in nested[name]]
    return [2, count // 2, count - 3]


def load_head(
    path: str | os.PathLike, target: PreTrainedModel, dtype: torch.dtype | None = None, values: dict | None = None
) -> Eagle3Head:
    """
    Loads an EAGLE-3 head for its target, onto the target's device. A head without embeddings uses the target's.

    Args:
        path (`str` or `os.PathLike`): Folder or hub id.
        target (`PreTrainedModel`): The target.
        dtype (`torch.dtype`, *optional*): Type of the head, by default the target's.
        values (`dict`, *optional*): What [`head_values`] returned for `path`.

    Raises:
        `ValueError`: there is no EAGLE-3 head at `path`, or it was made for another target.
    """
    path, values = os.fspath(path), values or head_values(path)
    if values is None:
        raise ValueError(f"{path!r} is no EAGLE-3 head: its config has neither `draft_vocab_size` nor eagle3 as type.")
    config, embedding = head_config(values, target), target.get_input_embeddings().weight
    dtype = dtype or target.dtype
    state = _read_weights(path)
    if "embed_tokens.weight" not in state:
        state["embed_tokens.weight"] = embedding.detach()
    if abs(len(state["embed_tokens.weight"]) - config.vocab_size) <= MOST_PADDING:
        config.vocab_size = len(state["embed_tokens.weight"])
    with torch.device("meta"):
        head = Eagle3Head(config)
    state.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    differ = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differ:
        name = differ[0]
        raise ValueError(
            f"The head {path!r} does not fit {type(target).__name__}: `{name}` has the shape {found.get(name)}, and "
            f"{expected.get(name)} is expected; load the target that it was trained for."
        )
    own = torch.arange(config.draft_vocab_size) + state["d2t"].cpu()
    if int(own.min()) < 0 or int(own.max()) >= config.vocab_size:
        raise ValueError(f"The head {path!r} proposes tokens that are not in its vocabulary of {config.vocab_size}.")
    state = {
        name: tensor.to(embedding.device, torch.long if name == "d2t" else dtype) for name, tensor in state.items()
    }
    head.load_state_dict(state, assign=True)
    head.rotary_emb = type(head.rotary_emb)(config).to(embedding.device)  # its buffers are in no file
    head.config._name_or_path, head.config.dtype = path, dtype
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    return head.eval()


def _read_weights(path: str) -> dict[str, torch.Tensor]:
    """Returns the weights under the names that [`Eagle3Head`] has."""
    files = (cached_file(path, name, _raise_exceptions_for_missing_entries=False) for name in WEIGHTS)
    file = next((one for one in files if one is not None), None)
    if file is None:
        raise ValueError(f"The head {path!r} has neither {WEIGHTS[0]} nor {WEIGHTS[1]}.")
    state = (
        load_file(file) if file.endswith(".safetensors") else torch.load(file, weights_only=True, map_location="cpu")
    )
    names = {name: name.removeprefix("model.").replace("midlayer.", "layers.0.") for name in state}
    return {names[name]: tensor for name, tensor in state.items() if not names[name].startswith(NOT_LOADED)}


def save_head(head: Eagle3Head, folder: str | os.PathLike) -> None:
    """Writes a head in the format of SafeAILab, without embeddings: they are the target's."""
    folder, config = Path(folder), head.config.to_dict()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("target_width", "_name_or_path", "transformers_version"):
        config.pop(name, None)
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    config["eagle_aux_hidden_state_layer_ids"] = config.pop("target_layers")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
    state = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.state_dict().items()}
    state.pop("embed_tokens.weight")
    own = torch.arange(len(head.d2t)) + head.d2t.cpu()
    state["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, own, True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / WEIGHTS[0])
