"""transformers' logits processors applied to many positions of many rows at once.

A processor sees the tokens before a position. Plain generation has one position per row and all rows of one length;
here each row has several positions, and rows differ in length. Warpers that look at nothing but the scores
(`STATELESS`) take all positions in one call, and so do the processors of which it is known what about the tokens makes
a difference to them. The others are called once per length, with the batch they would see in plain generation.
"""

import functools
import math

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation import logits_process

from .devices import from_host

STATELESS = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
        "InfNanRemoveLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    )
    if hasattr(logits_process, name)
)

ENOUGH = {
    logits_process.MinLengthLogitsProcessor: lambda processor: processor.min_length,
    logits_process.MinNewTokensLengthLogitsProcessor: lambda processor: (
        processor.prompt_length_to_skip + processor.min_new_tokens
    ),
}
"""The number of tokens from which on these processors do nothing. Which tokens they are makes no difference."""

BY_ROW = tuple(
    getattr(logits_process, name)
    for name in (
        "RepetitionPenaltyLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensAtBeginLogitsProcessor",
        "WatermarkLogitsProcessor",
    )
    if hasattr(logits_process, name)
)
"""Those that look at the tokens before a position too, whatever they are, but at each row alone, and keep no state."""


def has_constraint(processors: LogitsProcessorList) -> bool:
    """Whether there is a `prefix_allowed_tokens_fn`, which may know no prefixes but those that it allows itself."""
    return any(type(processor) is PrefixConstrainedLogitsProcessor for processor in processors)


def are_by_row(processors: LogitsProcessorList) -> bool:
    """Whether all are known to look at each row alone, and to keep no state from one call to the next."""
    known = (*STATELESS, *ENOUGH, *BY_ROW, PrefixConstrainedLogitsProcessor)
    return all(type(processor) in known for processor in processors)


def needs_history(processors: LogitsProcessorList) -> bool:
    """Whether any processor looks at the tokens before a position, and not only at how many they are."""
    return any(type(processor) not in (*STATELESS, *ENOUGH) for processor in processors)


def process_positions(
    processors: LogitsProcessorList,
    scores: torch.Tensor,
    input_ids: torch.LongTensor,
    lengths: list[int],
    rows: list[int],
) -> torch.Tensor:
    """
    Processes the scores of consecutive positions of some rows.

    Args:
        processors (`LogitsProcessorList`): As transformers prepared them. If not all of them are [`are_by_row`], there
            must be one position, at the same length in all of the rows.
        scores (`torch.FloatTensor` of shape `(len(rows), positions, vocab_size)`): Raw scores.
        input_ids (`torch.LongTensor` of shape `(batch_size, at least max(lengths) + positions - 1)`): The tokens of
            each row, the proposed ones included.
        lengths (`list[int]`): Tokens before the first position, for each row of the batch. Position `j` of row `r`
            follows `input_ids[r, : lengths[r] + j]`.
        rows (`list[int]`): The rows.

    Returns:
        `torch.FloatTensor` of the shape of `scores`.
    """
    count, positions, vocab_size = scores.shape
    if not processors:
        return scores
    starts = [lengths[row] for row in rows]
    ends = torch.tensor(starts)[:, None] + torch.arange(positions)  # where a look at them waits for no GPU
    of_rows = input_ids if count == len(input_ids) else input_ids[from_host(rows, input_ids.device)]
    histories = of_rows[:, None, : max(starts) + positions - 1].expand(-1, positions, -1)
    for processor in processors:
        together = _process_together(processor, scores.reshape(-1, vocab_size), histories, ends, rows)
        if together is not None:
            scores = together.view(count, positions, vocab_size)
            continue
        processed = scores.clone()
        if type(processor) is PrefixConstrainedLogitsProcessor:  # what it allows one row is another's business
            for i, row in enumerate(rows):
                allowed = functools.partial(_of_row, processor._prefix_allowed_tokens_fn, row)
                of_row = PrefixConstrainedLogitsProcessor(allowed, num_beams=1)
                for j in range(positions):
                    processed[i, j] = of_row(input_ids[row : row + 1, : starts[i] + j], scores[i : i + 1, j])[0]
            scores = processed
            continue
        for length in ends.unique().tolist():
            places = [i for i, start in enumerate(starts) if 0 <= length - start < positions]
            steps = from_host([length - starts[i] for i in places], scores.device)
            batch_rows = from_host([rows[i] for i in places], scores.device)
            places = from_host(places, scores.device)
            # All rows of the batch are in the call, so that row numbers mean the same as ever.
            of_all = scores.new_zeros(len(input_ids), vocab_size)
            of_all[batch_rows] = scores[places, steps]
            processed[places, steps] = processor(input_ids[:, :length], of_all)[batch_rows]
        scores = processed
    return scores


def _of_row(allowed, row: int, _, prefix: torch.LongTensor) -> list[int]:
    """What a `prefix_allowed_tokens_fn` allows one row of the batch."""
    return allowed(row, prefix)


def process_branches(
    processors: LogitsProcessorList, scores: torch.Tensor, histories: torch.LongTensor | None, lengths: torch.LongTensor
) -> torch.Tensor:
    """
    Processes the scores of independent sequences of different lengths.

    Args:
        processors (`LogitsProcessorList`): As transformers prepared them.
        scores (`torch.FloatTensor` of shape `(sequences, vocab_size)`): Raw scores.
        histories (`torch.LongTensor` of shape `(sequences, at least max(lengths))`, *optional*): The tokens before each
            position. Not used if [`needs_history`] says so.
        lengths (`torch.LongTensor` of shape `(sequences,)`): How many of them count; best on the CPU,
            where a look at them waits for no GPU.

    Returns:
        `torch.FloatTensor` of the shape of `scores`.
    """
    for processor in processors:
        together = _process_together(processor, scores, histories, lengths)
        if together is not None:
            scores = together
            continue
        processed = scores.clone()
        for length in lengths.unique().tolist():
            rows = from_host((lengths == length).nonzero().squeeze(1), scores.device)
            processed[rows] = processor(histories[rows, :length], scores[rows])
        scores = processed
    return scores


def _process_together(
    processor: LogitsProcessor,
    scores: torch.Tensor,
    histories: torch.LongTensor | None,
    lengths: torch.LongTensor,
    rows: list[int] | None = None,
) -> torch.Tensor | None:
    """
    Processes all positions in one call or two, if what differs between their histories allows it.

    Args:
        processor (`LogitsProcessor`): As transformers prepared it.
        scores (`torch.FloatTensor` of shape `(positions, vocab_size)`): Raw scores.
        histories (`torch.LongTensor` of shape `(..., columns)`, *optional*): The tokens before each position.
        lengths (`torch.LongTensor` of shape `(...)`): How many of them count.
        rows (`list[int]`, *optional*): Which rows of the batch these are; all by default.

    Returns:
        `torch.FloatTensor` of the shape of `scores`, or `None` if the processor must be called for each length.
    """
    kind = type(processor)
    if kind in STATELESS:
        return processor(None, scores)
    if kind in ENOUGH:
        enough, (shortest, longest) = ENOUGH[kind](processor), lengths.aminmax()
        if shortest >= enough:
            return scores
        too_short = scores.index_fill(-1, _ruled_out(processor, scores.shape[-1], scores.device), -math.inf)
        if longest < enough:
            return too_short
        return torch.where(from_host(lengths.flatten()[:, None] < enough, scores.device), too_short, scores)
    if kind is RepetitionPenaltyLogitsProcessor and not isinstance(processor.prompt_ignore_length, int):
        columns, padding = torch.arange(histories.shape[-1], device=histories.device), processor.prompt_ignore_length
        if padding is not None:
            padding = padding if rows is None else padding[from_host(rows, padding.device)]
            padding = padding.to(columns.device).view(-1, *[1] * (histories.dim() - 1))
            histories = histories.masked_fill(columns < padding, scores.shape[-1])  # which is no token
        # It makes no difference how often a token occurs, or where; so the last one can be repeated.
        last = from_host(lengths, histories.device)[..., None] - 1
        repeated = torch.where(columns <= last, histories, histories.gather(-1, last))
        return RepetitionPenaltyLogitsProcessor(processor.penalty)(repeated.flatten(0, -2), scores)
    return None


@functools.lru_cache(maxsize=8)
def _ruled_out(processor: LogitsProcessor, vocab_size: int, device: torch.device) -> torch.LongTensor:
    """Returns the tokens that a processor of [`ENOUGH`] forbids where there are too few before, of shape `(n,)`."""
    too_few = torch.zeros(1, ENOUGH[type(processor)](processor) - 1, dtype=torch.long, device=device)
    scores = torch.zeros(1, vocab_size, dtype=torch.float32, device=device)
    return processor(too_few, scores)[0].isneginf().nonzero()[:, 0]
