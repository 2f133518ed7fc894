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


def needs_history(processors: LogitsProcessorList) -> bool:
    """Whether any processor looks at the tokens before a position, and not only at how many they are."""
    return any(type(processor) not in (*STATELESS, *ENOUGH) for processor in processors)


def process_positions(
    processors: LogitsProcessorList, scores: torch.Tensor, input_ids: torch.LongTensor, lengths: list[int]
) -> torch.Tensor:
    """
    Processes the scores of consecutive positions of each row.

    Args:
        processors (`LogitsProcessorList`): As transformers prepared them.
        scores (`torch.FloatTensor` of shape `(batch_size, positions, vocab_size)`): Raw scores.
        input_ids (`torch.LongTensor` of shape `(batch_size, at least max(lengths) + positions - 1)`): The tokens of
            each row, the proposed ones included.
        lengths (`list[int]`): Tokens before the first position, for each row. Position `j` of row `r` follows
            `input_ids[r, : lengths[r] + j]`.

    Returns:
        `torch.FloatTensor` of the shape of `scores`.
    """
    batch_size, positions, vocab_size = scores.shape
    if not processors:
        return scores
    ends = torch.tensor(lengths)[:, None] + torch.arange(positions)  # where a look at them waits for no GPU
    histories = input_ids[:, None, : max(lengths) + positions - 1].expand(-1, positions, -1)
    for processor in processors:
        together = _process_together(processor, scores.reshape(-1, vocab_size), histories, ends)
        if together is not None:
            scores = together.view(batch_size, positions, vocab_size)
            continue
        if type(processor) is PrefixConstrainedLogitsProcessor:
            scores = _process_allowed_prefixes(processor, scores, input_ids, lengths)
            continue
        processed = scores.clone()
        for length in range(min(lengths), max(lengths) + positions):
            rows = [r for r in range(batch_size) if 0 <= length - lengths[r] < positions]
            if not rows:
                continue
            # A row that has no position of this length stays in the call, so that row numbers mean the same as ever.
            place = [min(max(length - n, 0), positions - 1) for n in lengths]
            result = processor(input_ids[:, :length], scores[range(batch_size), place].clone())
            processed[rows, [place[r] for r in rows]] = result[rows]
        scores = processed
    return scores


def _process_allowed_prefixes(
    processor: PrefixConstrainedLogitsProcessor, scores: torch.Tensor, input_ids: torch.LongTensor, lengths: list[int]
) -> torch.Tensor:
    """
    Asks the user's function for no prefix that it rules out itself: one that looks prefixes up knows none of them. What
    follows a proposed token that is ruled out is never looked at, so it stays as it is. See [`process_positions`].
    """
    allowed, positions, processed = processor._prefix_allowed_tokens_fn, scores.shape[1], scores.clone()
    for row, length in enumerate(lengths):
        of_row = PrefixConstrainedLogitsProcessor(lambda _, prefix, row=row: allowed(row, prefix), num_beams=1)
        for place in range(positions):
            history = input_ids[row : row + 1, : length + place]
            if place and processed[row, place - 1, history[0, -1]] == -math.inf:
                break
            processed[row, place] = of_row(history, scores[row : row + 1, place])[0]
    return processed


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
        lengths (`torch.LongTensor` of shape `(sequences,)`): How many of them count.

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
            rows = (lengths == length).nonzero().squeeze(1)
            processed[rows] = processor(histories[rows, :length], scores[rows])
        scores = processed
    return scores


def _process_together(
    processor: LogitsProcessor, scores: torch.Tensor, histories: torch.LongTensor | None, lengths: torch.LongTensor
) -> torch.Tensor | None:
    """
    Processes all positions in one call or two, if what differs between their histories allows it.

    Args:
        processor (`LogitsProcessor`): As transformers prepared it.
        scores (`torch.FloatTensor` of shape `(positions, vocab_size)`): Raw scores.
        histories (`torch.LongTensor` of shape `(..., columns)`, *optional*): The tokens before each position.
        lengths (`torch.LongTensor` of shape `(...)`): How many of them count.

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
        return torch.where((lengths.flatten()[:, None] < enough).to(scores.device), too_short, scores)
    if kind is RepetitionPenaltyLogitsProcessor and not isinstance(processor.prompt_ignore_length, int):
        columns, padding = torch.arange(histories.shape[-1], device=histories.device), processor.prompt_ignore_length
        if padding is not None:
            padding = padding.to(columns.device).view(-1, *[1] * (histories.dim() - 1))
            histories = histories.masked_fill(columns < padding, scores.shape[-1])  # which is no token
        # It makes no difference how often a token occurs, or where; so the last one can be repeated.
        last = lengths.to(histories.device)[..., None] - 1
        repeated = torch.where(columns <= last, histories, histories.gather(-1, last))
        return RepetitionPenaltyLogitsProcessor(processor.penalty)(repeated.flatten(0, -2), scores)
    return None


@functools.lru_cache(maxsize=8)
def _ruled_out(processor: LogitsProcessor, vocab_size: int, device: torch.device) -> torch.LongTensor:
    """Returns the tokens that a processor of [`ENOUGH`] forbids where there are too few before, of shape `(n,)`."""
    too_few = torch.zeros(1, ENOUGH[type(processor)](processor) - 1, dtype=torch.long, device=device)
    scores = torch.zeros(1, vocab_size, dtype=torch.float32, device=device)
    return processor(too_few, scores)[0].isneginf().nonzero()[:, 0]
