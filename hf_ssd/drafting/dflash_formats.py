"""Loads DFlash drafts in the format of z-lab, whose code is not part of transformers."""

import os

from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from ..gguf_files import is_gguf

SETTINGS = ("block_size", "mask_token_id", "target_layer_ids")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
LAYERS = (*SIZES, "head_dim", "rms_norm_eps", "hidden_act", "rope_parameters", "max_position_embeddings", "layer_types")
WEIGHTS = {r"^fc\.": "encoder.fc.", r"^hidden_norm\.": "encoder.output_norm_enc."}  # and transformers' names
OF_TARGET = ("embed_tokens.", "lm_head.", "rotary_emb.")  # what a draft may hold as well, and does not need


def dflash_values(path: str | os.PathLike) -> dict | None:
    """Returns the config of a DFlash draft, or `None` if another kind of model, or nothing, is at `path`."""
    if is_gguf(path):
        return None
    try:
        values, _ = PreTrainedConfig.get_config_dict(os.fspath(path))
    except (OSError, ValueError):
        return None
    return values if values.get("dflash_config") is not None else None


def load_dflash(path: str | os.PathLike, target: PreTrainedModel, values: dict) -> MuseGlimmerAssistantModel:
    """
    Loads a DFlash draft with layers of Qwen3 and full attention, as the class of transformers whose layers compute the
    same, onto the target's device.

    Args:
        path (`str` or `os.PathLike`): Folder or hub id.
        target (`PreTrainedModel`): The target.
        values (`dict`): What [`dflash_values`] returned for `path`.

    Raises:
        `ValueError`: the draft has other layers or settings, or weights that do not fit its config.
    """
    path, own = os.fspath(path), values["dflash_config"]
    layers, settings = Qwen3Config(**values), {"block_size": 16, **values, **own}
    differ = {
        "architectures": values.get("architectures") != ["DFlashDraftModel"],
        "model_type": values.get("model_type") != "qwen3",
        "layer_types": {*layers.layer_types} != {"full_attention"},
        "attention_bias": layers.attention_bias,
        **{name: name not in SETTINGS for name in own},
        **{name: True for name in SETTINGS if settings.get(name) is None},
    }
    if any(differ.values()):
        raise ValueError(
            f"The DFlash draft {path!r} is not supported: its config differs in "
            f"{', '.join(name for name, differs in differ.items() if differs)} from those of drafts with Qwen3 layers "
            "and full attention; use an EAGLE-3 head or a small model of the target's family."
        )
    config = MuseGlimmerAssistantConfig(
        **{name: getattr(layers, name) for name in LAYERS}, **{name: settings[name] for name in SETTINGS}
    )
    options = {"config": config, "key_mapping": WEIGHTS, "dtype": target.dtype, "output_loading_info": True}
    place = target.get_input_embeddings().weight.device
    try:
        draft, found = MuseGlimmerAssistantModel.from_pretrained(path, **options, device_map={"": place})
        more = {name for name in found["unexpected_keys"] if not name.startswith(OF_TARGET)}
    except (OSError, RuntimeError) as error:
        raise ValueError(f"The DFlash draft {path!r} cannot be loaded: {error}") from error
    if names := sorted({*found["missing_keys"], *more}):
        raise ValueError(
            f"The DFlash draft {path!r} cannot be loaded: its weights have more or less than its config says, for "
            f"example {names[0]!r}."
        )
    return draft.eval().requires_grad_(False)
