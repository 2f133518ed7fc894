"""EAGLE-3 heads (Li et al., NeurIPS 2025), with a model's config and `draft_vocab_size`, or of speculators."""

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils import cached_file

from ...cache.cache_name import CACHE
from ...cache.hidden_states import check_layers, decoder_parts
from ..vocabulary import MOST_PADDING
from .base import Head

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # settings, `False` by default
NOT_LOADED = ("t2d", "verifier_", "rotary_emb")  # what the rest tells, or only training needs


class Eagle3Head(Head):
    """A head whose layer, of the kind that the config is of, also reads the token's embedding; see `NORMS`."""

    title = "an EAGLE-3 head"

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        decoder, size = MODEL_MAPPING[type(config)](config), config.hidden_size
        self.embed_tokens, self.norm, self.rotary_emb = decoder.embed_tokens, decoder.norm, decoder.rotary_emb
        self.layers = decoder.layers
        attention, kind = self.layers[0].self_attn, type(self.norm)
        for name in ("q_proj", "k_proj", "v_proj"):
            before = getattr(attention, name)
            setattr(attention, name, nn.Linear(2 * size, before.out_features, bias=before.bias is not None))
        self.layers[0].hidden_norm = kind(size, eps=config.rms_norm_eps)
        has = {name: getattr(config, name, False) for name in NORMS}
        self.normed_residual, self.returns_normed = has["norm_before_residual"], has["norm_output"]
        width, layers = config.target_width, len(config.target_layers)
        self.input_norm = kind(width, eps=config.rms_norm_eps) if has["norm_before_fc"] else nn.Identity()
        norms = [kind(width // layers, eps=config.rms_norm_eps) for _ in range(layers)]
        self.fc_norm = nn.ModuleList(norms if has["fc_norm"] else [nn.Identity()])
        self.fc = nn.Linear(config.target_width, size, bias=False)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        # For each token of the head, the number that is added to it to give the target's token.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.post_init()

    @classmethod
    def is_format(cls, path, values):
        kind = values.get("speculators_model_type")
        if kind not in (None, "eagle3"):
            raise ValueError(f"{path!r} is a speculator of the type {kind!r}; the type 'eagle3' is supported.")
        return kind is not None or "draft_vocab_size" in values

    @classmethod
    def structure(cls, path, values, target):
        return cls(head_config(values, target))

    @classmethod
    def load(cls, path, values, target, dtype=None):
        config, embedding = head_config(values, target), target.get_input_embeddings().weight
        dtype, state = dtype or target.dtype, _read_weights(path)
        tokens = len(state.setdefault("embed_tokens.weight", embedding.detach()))
        if abs(tokens - config.vocab_size) <= MOST_PADDING:
            config.vocab_size = tokens
        with torch.device("meta"):
            head = cls(config)
        state.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        expected, found = ({name: tuple(one.shape) for name, one in of.items()} for of in (head.state_dict(), state))
        if differ := sorted(expected.items() ^ found.items()):
            name = differ[0][0]
            raise ValueError(
                f"The head {path!r} does not fit {type(target).__name__}: `{name}` has the shape {found.get(name)}, "
                f"and {expected.get(name)} is expected; load the target that it was trained for."
            )
        own = torch.arange(config.draft_vocab_size) + state["d2t"].cpu()
        if int(own.min()) < 0 or int(own.max()) >= config.vocab_size:
            raise ValueError(
                f"The head {path!r} proposes tokens that are not in its vocabulary of {config.vocab_size}."
            )
        dtypes = {"d2t": torch.long}
        state = {name: tensor.to(embedding.device, dtypes.get(name, dtype)) for name, tensor in state.items()}
        head.load_state_dict(state, assign=True)
        head.rotary_emb = type(head.rotary_emb)(config).to(embedding.device)  # its buffers are in no file
        head.config._name_or_path, head.config.dtype = path, dtype
        return head.eval().requires_grad_(False)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        of_layers = self.input_norm(features.to(self.fc.weight)).chunk(len(self.fc_norm), dim=-1)
        return self.fc(torch.cat([norm(of_layer) for norm, of_layer in zip(self.fc_norm, of_layers)], dim=-1))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        own = self.lm_head(states if self.returns_normed else self.norm(states))
        if self.config.draft_vocab_size == self.config.vocab_size:
            return own
        of_all = own.new_full((*own.shape[:-1], self.config.vocab_size), -torch.inf)
        of_all[..., torch.arange(len(self.d2t), device=own.device) + self.d2t] = own
        return of_all

    def read(self, inputs, position_ids, attention_mask, cache, logits_to_keep):
        embeddings, states = inputs.chunk(2, dim=-1)
        layer = self.layers[0]
        normed = layer.hidden_norm(states)
        residual = normed if self.normed_residual else states
        output, _ = layer.self_attn(
            hidden_states=torch.cat([layer.input_layernorm(embeddings), normed], dim=-1),
            position_embeddings=self.rotary_emb(embeddings, position_ids),
            attention_mask=self.mask(attention_mask, embeddings, cache),
            position_ids=position_ids,
            **{CACHE: cache},
        )
        states = residual + output
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        return self.norm(states) if self.returns_normed else states


def head_config(values: dict, target: PreTrainedModel) -> PreTrainedConfig:
    """Returns the config of an [`Eagle3Head`], or raises `ValueError` if it was made for another target."""
    text = target.config.get_text_config(decoder=True)
    values = {**values.get("transformer_layer_config", {}), **values}
    nested = values.get("transformer_layer_config", values)
    if (count := nested.get("num_hidden_layers", 1)) != 1:
        raise ValueError(f"The head has {count} layers; EAGLE-3 heads of one layer are supported.")
    name, count = "eagle_aux_hidden_state_layer_ids", len(decoder_parts(target)[0])
    # SpecForge and SGLang, which nest them, count layers from 0, and mean their outputs.
    layers = [layer + 1 for layer in (values.get("eagle_config") or {}).get(name) or ()]
    layers = list(values.get(name) or layers or (2, count // 2, count - 3))
    check_layers(target, layers)
    own = {name: bool(values.get(name, False)) for name in NORMS}
    own |= {"target_layers": layers, "target_width": len(layers) * text.hidden_size}
    own["draft_vocab_size"] = values["draft_vocab_size"]
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


def _read_weights(path: str) -> dict[str, torch.Tensor]:
    """Returns the weights under the names that [`Eagle3Head`] has."""
    files = (cached_file(path, name, _raise_exceptions_for_missing_entries=False) for name in WEIGHTS)
    file = next((one for one in files if one is not None), None)
    if file is None:
        raise ValueError(f"The head {path!r} has neither {WEIGHTS[0]} nor {WEIGHTS[1]}.")
    is_safe = file.endswith(".safetensors")
    state = load_file(file) if is_safe else torch.load(file, weights_only=True, map_location="cpu")
    names = {name: name.removeprefix("model.").replace("midlayer.", "layers.0.") for name in state}
    return {names[name]: tensor for name, tensor in state.items() if not names[name].startswith(NOT_LOADED)}
