"""A short text, read by a model as plain generation reads it and as verification and drafting do, for its trial."""

from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from .. import devices
from .branches import extend_with_branches
from .cache_name import CACHE, cache_argument
from .cached_model import CachedModel
from .passes import cached_model
from .ragged import RaggedCache
from .recurrent import RecurrentModel
from .recurrent_draft import RecurrentBranches, RecurrentDraft
from .row_store import RowStore
from .support import attention_layout, empty_cache, is_flash_attention, result_of

TOKENS = (7, 11, 13, 17, 19, 23, 29, 31)  # of the text; tokens after these are the same in another order
PROMPT = 6  # how many tokens of the text are the prompt
FIRST = 2  # how many tokens of the prompt a recurrent draft reads first
# Columns between the text and the end of the cache, unless the config names a larger window of up to FARTHEST columns:
# a model that counts its window from the end of the cache does not see the text then.
FAR, FARTHEST = 640, 4096


class Texts(NamedTuple):
    tokens: torch.LongTensor  # (rows, length): a prompt and the tokens to verify
    columns: list[int]  # the first column of each row that is written after the prompt
    width: int  # columns before the end of the cache
    compared: int  # rows whose logits are compared; other rows only stand beside them
    drafted: int  # tokens of each row after the prompt


def texts_for(model: PreTrainedModel, drafted: int, rows: int | None) -> Texts:
    """Returns texts with `drafted` tokens to verify, if positions allow: of `rows`, or of one beside a longer one."""
    config = model.config.get_text_config(decoder=True)
    named = [value for key, value in vars(config).items() if "window" in key and type(value) is int]
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None:
        drafted = min(drafted, max(2, positions - PROMPT - 1))
    windows = [window + drafted + 1 for window in named if window <= FARTHEST and (rows is None or rows <= 2)]
    far = PROMPT + max([FAR, *windows])  # more rows would need much memory
    far = far if positions is None else max(PROMPT, min(far, positions - drafted - 1))
    text = [TOKENS[(i + i // len(TOKENS)) % len(TOKENS)] % config.vocab_size for i in range(PROMPT + drafted)]
    text = torch.tensor(text, device=devices.of_model(model))
    tokens = torch.stack([text.roll(-row) for row in range(rows or 2)])
    return Texts(tokens, [PROMPT] * rows if rows else [PROMPT, far], far, rows or 1, drafted)


def read(
    model: PreTrainedModel, view: PreTrainedModel, texts: Texts, drafts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """
    Returns logits `(compared, tokens, vocab_size)` of the texts alone; of the last tokens of the prompts beside other
    rows and of the tokens after them among others, by passes of the view; and whether these multiplied in low
    precision.
    """
    is_recurrent = attention_layout(model).recurrent
    if drafts:
        alone = logits_alone(model, texts, FIRST if is_recurrent else PROMPT)
    else:
        alone = logits_of_plain_generation(model, texts)
    among_others = logits_beside_others
    if is_recurrent or is_flash_attention(model):
        among_others = logits_of_branches if is_recurrent and drafts else logits_after_rejection
    with LowPrecision() as low_precision:
        beside, masked = (logits[: texts.compared] for logits in among_others(model, view, texts))
    return alone, beside, masked, low_precision.is_used


class LowPrecision(TorchDispatchMode):
    """Sees whether matrices are multiplied in a precision below float32."""

    def __init__(self):
        super().__init__()
        self.is_used = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))  # weights and logits may be float32: autocast casts both ways
        name = function.overloadpacket.__name__
        if "mm" in name or "linear" in name or "matmul" in name:
            low = (torch.float16, torch.bfloat16)
            self.is_used |= any(isinstance(one, torch.Tensor) and one.dtype in low for one in tree_leaves(outputs))
        return outputs


def logits_of_plain_generation(model: PreTrainedModel, texts: Texts) -> torch.Tensor:
    """Returns logits of all tokens, read one by one after the prompts as the model's own methods prepare them."""
    tokens, cache = texts.tokens[: texts.compared], empty_cache(model)
    model_kwargs = {"attention_mask": torch.ones_like(tokens[:, :PROMPT]), "use_cache": True, CACHE: cache}
    model_kwargs["position_ids"] = model._prepare_position_ids_for_generation(tokens[:, :PROMPT], model_kwargs)
    outputs = model._prefill(tokens[:, :PROMPT], GenerationConfig(), model_kwargs)
    logits = [outputs.logits]
    if logits[0].shape[1] < PROMPT:  # some models prepare inputs for the last logits alone
        logits = [logits_alone(model, texts._replace(tokens=tokens[:, :PROMPT]))]
    for stop in range(PROMPT + 1, tokens.shape[1] + 1):
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
        inputs = model.prepare_inputs_for_generation(tokens[:, :stop], next_sequence_length=1, **model_kwargs)
        outputs = model(**inputs, return_dict=True)
        logits.append(outputs.logits)
    return _checked(logits, cache, tokens)


def logits_alone(model: PreTrainedModel, texts: Texts, prompt: int = PROMPT) -> torch.Tensor:
    """Returns logits of all tokens, read with our own inputs, one by one after `prompt` tokens."""
    tokens, cache = texts.tokens[: texts.compared], empty_cache(model)
    logits, start = [], 0
    for count in (prompt, *[1] * (tokens.shape[1] - prompt)):
        stop = start + count
        outputs = model(
            input_ids=tokens[:, start:stop],
            position_ids=torch.arange(start, stop, device=tokens.device).expand(len(tokens), -1),
            attention_mask=torch.ones_like(tokens[:, :stop]),
            use_cache=True,
            return_dict=True,
            **{cache_argument(model): cache},
        )
        logits.append(result_of(outputs))
        start = stop
    return _checked(logits, cache, tokens)


def logits_beside_others(
    model: PreTrainedModel, view: PreTrainedModel, texts: Texts
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the logits of the prompts beside other rows, and those of the tokens after the prompts, which are verified
    after a hidden column in a cache that is much longer.
    """
    tokens = texts.tokens
    decoder = CachedModel(model, RaggedCache(), column_limit=tokens.shape[1], view=view)
    beside = decoder.extend(tokens[:, :PROMPT], [0] * len(tokens))
    forks, branch = torch.tensor(texts.columns, device=tokens.device)[:, None], tokens[:, None, PROMPT:]
    masked = extend_with_branches(decoder, tokens[:, :1], texts.columns, forks, branch, texts.width + 1)
    return beside, masked[:, 0]


def logits_after_rejection(
    model: PreTrainedModel, view: PreTrainedModel, texts: Texts
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    [`logits_beside_others`] for recurrent layers, and for flash attention with one row: other tokens are verified first
    and rejected, then the tokens after the prompt, and all of these but the first again.
    """
    rows = 1 if is_flash_attention(model) else len(texts.tokens)
    tokens, columns, cache = texts.tokens[:rows], texts.columns[:rows], RaggedCache(empty_cache(model))
    inputs = {"input_ids": tokens[:, :PROMPT], cache_argument(model): cache}
    beside = view(**inputs, use_cache=True, return_dict=True).logits
    decoder = cached_model(model, cache, column_limit=tokens.shape[1], view=view)
    if isinstance(decoder, RecurrentModel):
        decoder.states = [{column: states[PROMPT]} for column, states in zip(columns, decoder.states)]
    for new in (tokens[:, : texts.drafted], tokens[:, PROMPT:]):
        verified = decoder.extend(new, columns)
    again = decoder.extend(tokens[:, PROMPT + 1 :], [column + 1 for column in columns])
    return beside, torch.cat([verified[:, :1], again], dim=1)


def logits_of_branches(
    model: PreTrainedModel, view: PreTrainedModel, texts: Texts
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    [`logits_beside_others`] for a draft with recurrent layers, which feeds a few tokens together, then others after
    their states. The tokens after the prompt are a branch beside another branch.
    """
    tokens, device = texts.tokens, texts.tokens.device
    decoder = RecurrentDraft(model, RowStore(tokens), column_limit=tokens.shape[1], view=view)
    decoder.feed([FIRST, FIRST], 0, wanted=1)
    beside = decoder.feed([PROMPT - 1, PROMPT - 1], 1, wanted=2)
    forks = torch.full((2, 2), PROMPT, device=device)
    branches = RecurrentBranches(decoder, forks, max(PROMPT, texts.width), texts.drafted)
    grown = tokens.flip(0)[:, PROMPT:]  # the other row's tokens are branch 0, and its own are branch 1
    masked = [branches.grow(grown[:, depth].expand(2, 2))[:, 1] for depth in range(texts.drafted)]
    return beside, torch.stack(masked, dim=1)


def _checked(logits: list[torch.Tensor], cache: DynamicCache, tokens: torch.LongTensor) -> torch.Tensor:
    if cache.get_seq_length() != tokens.shape[1]:
        raise RuntimeError("it keeps no keys and values in its cache")
    if any(len(one) != len(tokens) for one in logits):
        raise RuntimeError("it returns logits of other rows than those of its inputs")
    return torch.cat(logits, dim=1)
