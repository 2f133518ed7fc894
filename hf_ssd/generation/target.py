"""Forward passes outside the rounds: the prefill, a row verified alone, columns that the cache lacks at the end."""

import torch
from transformers import DynamicCache, PreTrainedModel

from .. import devices
from ..cache.cache_name import CACHE
from ..cache.cached_model import CachedModel, view_for_passes
from ..cache.compiled import uncompiled
from ..cache.hidden_states import HiddenStates
from ..cache.recurrent import RecurrentModel, cached_model, ragged_copy
from ..devices import from_host
from .sequences import Sequences


def prefill(
    model,
    input_ids,
    generation_config,
    model_kwargs,
    max_length: int | None,
    cuda_graphs: bool | str = False,
    view: PreTrainedModel | None = None,
    hidden_states: HiddenStates | None = None,
) -> tuple[CachedModel, torch.Tensor]:
    """
    Runs transformers' own prefill into a ragged cache. Returns the target with its cache, and the `features` of the
    tokens that were fed, and the logits `(batch_size, 1, vocab_size)` that follow the prompts. No output is longer than
    `max_length`, the prompt included.
    """
    theirs: DynamicCache = model_kwargs[CACHE]
    cache = ragged_copy(theirs)
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None and position_ids.ndim > 2:  # in text, all kinds of positions are the same
        position_ids = position_ids[0]
    mask = model_kwargs.get("attention_mask")
    view = view_for_passes(model) if view is None else view
    with uncompiled(model):
        outputs = view._prefill(input_ids, generation_config, {**model_kwargs, CACHE: cache})
    columns = cache.get_seq_length()
    last = [columns - 1] * len(input_ids) if position_ids is None else position_ids[:, -1].tolist()
    decoder = cached_model(
        model,
        cache,
        valid=None if mask is None else mask.bool().to(devices.of_model(model)),
        first_positions=[position - (columns - 1) for position in last],
        token_type_ids=model_kwargs.get("token_type_ids"),
        column_limit=None if max_length is None else columns - input_ids.shape[1] + max_length,
        cuda_graphs=cuda_graphs,
        hidden_states=hidden_states,
        view=view,
    )
    decoder.features = None if hidden_states is None else hidden_states.take()
    return decoder, outputs.logits[:, -1:]


def verify_alone(
    decoder: CachedModel,
    sequences: Sequences,
    columns_before_ids: int,
    rows: list[int],
    place: int,
    lengths: list[int],
) -> torch.Tensor:
    """
    Feeds a token of each of these rows again, without the drafted tokens after it, and clears the columns there. A
    drafted token whose keys or values are NaN also corrupts earlier positions: its column is masked, but 0 * NaN is
    NaN. The other rows keep their drafted tokens, also if a compiled pass feeds several tokens.

    `lengths` are those of the rows with the token to feed, all of whose tokens are verified; the pass of the round fed
    `place` drafted tokens before it. Returns raw logits `(batch_size, 1, vocab_size)`.
    """
    starts = [length - 1 + columns_before_ids for length in lengths]
    decoder.cache.clear_behind(rows, starts)
    device, count = sequences.ids.device, decoder.fewest_tokens
    columns = from_host(lengths, device)[:, None] - 1 + torch.arange(count, device=device)
    tokens = sequences.ids.gather(1, columns)  # the token, and the drafted tokens after it
    tokens[rows] = tokens[rows, :1]
    features = decoder.features
    logits = decoder.extend(tokens.to(decoder.device), starts)[:, :1]
    if features is not None:
        features[rows, place] = decoder.features[rows, 0]
        decoder.features = features
    return logits


def feed_what_is_missing(
    decoder: CachedModel, sequences: Sequences, output: torch.LongTensor, columns_before_ids: int
) -> None:
    """Feeds the last token of rows that ended before others, and the padding after it, as plain generation does."""
    last = output.shape[1] - 1  # the last token is not fed, because no token follows it
    fed = [min(sequences.kept(row), length - 1, last) for row, length in enumerate(sequences.lengths)]
    if isinstance(decoder, RecurrentModel):
        decoder.finish(output, fed, columns_before_ids)
        return
    if min(fed) == last:
        return
    decoder.cache.take_back()
    decoder.leave_out([count == last for count in fed])
    start = min(fed)
    decoder.extend(
        output[:, start:last].to(decoder.device),
        [start + columns_before_ids] * len(fed),
        logits_to_keep=torch.zeros(1, dtype=torch.long, device=decoder.device),  # the logits are not needed
    )


def prompts_without_padding(input_ids: torch.LongTensor, attention_mask) -> list[torch.LongTensor]:
    """Returns the tokens of each row that its attention mask keeps; the last token is always kept."""
    if attention_mask is None:
        return list(input_ids)
    mask = attention_mask[:, -input_ids.shape[1] :].bool().clone()  # `bool()` of booleans is the user's own tensor
    mask[:, -1] = True
    return [row[kept] for row, kept in zip(input_ids, mask)]
