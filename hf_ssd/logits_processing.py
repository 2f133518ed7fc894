"""
Applies transformers' logits processors to many positions of many rows at once.

In plain generation a processor sees a single position of each row, and all rows have the same length. A single call
suffices for processors that read only the scores, only the number of tokens, or only which tokens occurred (repetition
penalty). Others are called once for each length, with the batch that they would see in plain generation.
"""

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor, RepetitionPenaltyLogitsProcessor

from .devices import from_host


def _existing(*names: str) -> tuple[type[LogitsProcessor], ...]:
    """Returns the processor classes with these names that this version of transformers has."""
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


STATELESS = _existing(
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization",
    "InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor",
)  # fmt: skip
"""Processors that read nothing but the scores."""

MINIMUM_LENGTHS = {
    logits_process.MinLengthLogitsProcessor: lambda processor: processor.min_length,
    logits_process.MinNewTokensLengthLogitsProcessor: lambda processor: (
        processor.prompt_length_to_skip + processor.min_new_tokens
    ),
}
"""Processors that do nothing once a row has a minimum number of tokens, with a function that returns that number."""

BY_ROW = _existing(
    "RepetitionPenaltyLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor", "WatermarkLogitsProcessor",
)  # fmt: skip
"""Processors that read the tokens of each row by itself, and keep no state."""


def has_constraint(processors: LogitsProcessorList) -> bool:
    """Whether there is a `prefix_allowed_tokens_fn`. It may know only the prefixes that it allows itself."""
    return any(type(processor) is PrefixConstrainedLogitsProcessor for processor in processors)


def are_by_row(processors: LogitsProcessorList) -> bool:
    """Whether all processors are known to treat each row by itself and to keep no state from one call to the next."""
    known = (*STATELESS, *MINIMUM_LENGTHS, *BY_ROW, PrefixConstrainedLogitsProcessor)
    return all(type(processor) in known or hasattr(processor, "process_positions") for processor in processors)


def needs_history(processors: LogitsProcessorList) -> bool:
    """Whether any processor reads the tokens before a position, and not only their number."""
    return any(type(processor) not in (*STATELESS, *MINIMUM_LENGTHS) for processor in processors)


def process_positions(
    processors: LogitsProcessorList,
    scores: torch.Tensor,
    input_ids: torch.LongTensor,
    lengths: list[int],
    rows: list[int],
) -> torch.Tensor:
    """
    Processes raw logits `(len(rows), positions, vocab_size)` of consecutive positions of some rows of the batch:
    position `j` of row `r` follows `input_ids[r, : lengths[r] + j]`, in which the proposed tokens are included. Unless
    [`are_by_row`] is true of the processors, there must be a single position, at the same length in all rows.
    """
    scores = scores.to(device=input_ids.device, dtype=torch.float32)
    if all(type(processor) in STATELESS for processor in processors):
        return processors(None, scores.flatten(0, 1)).view_as(scores)
    positions, vocab_size = scores.shape[1:]
    ends = torch.tensor([lengths[row] for row in rows])[:, None] + torch.arange(positions)  # on the CPU
    histories = input_ids[from_host(rows, input_ids.device), None, : int(ends.max())].expand(-1, positions, -1)
    for processor in processors:
        if hasattr(processor, "process_positions"):
            scores = processor.process_positions(scores, input_ids, [lengths[row] for row in rows], list(rows))
            continue
        together = _process_together(processor, scores.reshape(-1, vocab_size), histories, ends, rows)
        if together is not None:
            scores = together.view_as(scores)
            continue
        processed = scores.clone()
        if type(processor) is PrefixConstrainedLogitsProcessor:  # called only for these rows and prefixes
            for (i, j), length in np.ndenumerate(ends.numpy()):
                one_row = PrefixConstrainedLogitsProcessor(
                    lambda _, prefix, of=processor, row=rows[i]: of._prefix_allowed_tokens_fn(row, prefix), num_beams=1
                )
                processed[i, j] = one_row(input_ids[rows[i], None, :length], scores[i, j, None])[0]
        else:
            for length in ends.unique().tolist():
                places, steps = (ends == length).nonzero(as_tuple=True)
                of_batch = torch.tensor(rows)[places]
                places, steps, of_batch = (from_host(index, scores.device) for index in (places, steps, of_batch))
                batch = scores.new_zeros(len(input_ids), vocab_size)  # a processor may depend on a row's index
                batch[of_batch] = scores[places, steps]
                answer = processor(input_ids[:, :length], batch)
                processed = processed.to(answer.dtype)  # a user's processor may return another type
                processed[places, steps] = answer[of_batch]
        scores = processed
    return scores


def process_branches(
    processors: LogitsProcessorList, scores: torch.Tensor, histories: torch.LongTensor | None, lengths: torch.LongTensor
) -> torch.Tensor:
    """Processes the scores `(sequences, vocab_size)` after `histories[i, : lengths[i]]`. `lengths` are on the CPU."""
    for processor in processors:
        processed = _process_together(processor, scores, histories, lengths)
        if processed is None:
            processed = scores.clone()
            for length in lengths.unique().tolist():
                rows = from_host((lengths == length).nonzero().squeeze(1), scores.device)
                processed[rows] = processor(histories[rows, :length], scores[rows])
        scores = processed
    return scores


def _process_together(
    processor: LogitsProcessor,
    scores: torch.Tensor,
    histories: torch.LongTensor | None,  # (..., columns)
    lengths: torch.LongTensor,  # (...)
    rows: list[int] | None = None,  # of the batch, to which these belong; `None` for branches
) -> torch.Tensor | None:
    """Processes scores `(positions, vocab_size)` in one call, or returns `None` if it takes one for each length."""
    kind = type(processor)
    if kind in STATELESS:
        return processor(None, scores)
    if kind in MINIMUM_LENGTHS:
        is_short = lengths.flatten()[:, None] < MINIMUM_LENGTHS[kind](processor)
        if not is_short.any():
            return scores
        no_tokens = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
        return torch.where(from_host(is_short, scores.device), processor(no_tokens, scores), scores)
    if kind is RepetitionPenaltyLogitsProcessor and not isinstance(processor.prompt_ignore_length, int):
        columns, padding = torch.arange(histories.shape[-1], device=histories.device), processor.prompt_ignore_length
        if padding is not None:  # of rows of the batch, not of branches
            padding = padding[from_host(rows, padding.device)].to(columns.device)[:, None, None]
            histories = histories.masked_fill(columns < padding, scores.shape[-1])  # not the id of a token
        # The penalty does not depend on how often or where a token occurs, so the last token can be repeated.
        last = from_host(lengths, histories.device)[..., None] - 1
        repeated = torch.where(columns <= last, histories, histories.gather(-1, last))
        return RepetitionPenaltyLogitsProcessor(processor.penalty)(repeated.flatten(0, -2), scores)
    return None
