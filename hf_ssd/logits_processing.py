"""transformers' logits processors applied to many positions of many rows at once.

A processor sees the tokens before a position. Plain generation has one position per row and all rows of one length;
here each row has several positions, and rows differ in length. Warpers that look at nothing but the scores
(`STATELESS`) take all positions in one call. The others are called once per length, with the batch they would see in
plain generation.
"""

import torch
from transformers import LogitsProcessorList
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
    )
    if hasattr(logits_process, name)
)


def needs_history(processors: LogitsProcessorList) -> bool:
    """Whether any processor looks at the tokens before a position."""
    return any(type(processor) not in STATELESS for processor in processors)


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
    for processor in processors:
        if type(processor) in STATELESS:
            scores = processor(None, scores.reshape(-1, vocab_size)).view(batch_size, positions, vocab_size)
            continue
        if min(lengths) == max(lengths):
            steps = [processor(input_ids[:, : lengths[0] + j], scores[:, j].clone()) for j in range(positions)]
            scores = torch.stack(steps, dim=1)
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


def process_branches(
    processors: LogitsProcessorList, scores: torch.Tensor, histories: torch.LongTensor, lengths: torch.LongTensor
) -> torch.Tensor:
    """
    Processes the scores of independent sequences of different lengths.

    Args:
        processors (`LogitsProcessorList`): As transformers prepared them.
        scores (`torch.FloatTensor` of shape `(sequences, vocab_size)`): Raw scores.
        histories (`torch.LongTensor` of shape `(sequences, at least max(lengths))`): The tokens before each position.
        lengths (`torch.LongTensor` of shape `(sequences,)`): How many of them count.

    Returns:
        `torch.FloatTensor` of the shape of `scores`.
    """
    for processor in processors:
        if type(processor) in STATELESS:
            scores = processor(None, scores)
            continue
        processed = scores.clone()
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero().squeeze(1)
            processed[rows] = processor(histories[rows, :length], scores[rows])
        scores = processed
    return scores
