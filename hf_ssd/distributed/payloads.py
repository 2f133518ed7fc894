"""What is in the messages between target and draft: numbers and JSON, never pickles. Packing and unpacking only."""

import itertools
import json

import torch

from ..config import LONGEST_LOOKAHEAD
from ..drafting.vocabulary import Translation
from ..rounds import FINISHED, MODES, SOURCES, Outcome, Plan, RoundRecord, Speculation
from .messages import ProtocolError
from .session import check_plan


def text_to_payload(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.uint8)


def payload_to_text(payload: torch.Tensor) -> str:
    """What is no UTF-8 is shown as such: the text is for people."""
    return _bytes(payload).decode("utf-8", errors="replace")


def json_to_payload(value) -> torch.Tensor:
    return text_to_payload(json.dumps(value))


def payload_to_json(payload: torch.Tensor):
    try:
        return json.loads(_bytes(payload).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message of {len(payload)} bytes is not JSON: {error}") from error


def prompts_to_payload(prompts: list[torch.LongTensor]) -> torch.Tensor:
    """Packs the prompt of each row: their number, their lengths, their tokens."""
    lengths = torch.tensor([len(prompts), *map(len, prompts)])
    return torch.cat([lengths, *(prompt.cpu().long() for prompt in prompts)])


def payload_to_prompts(payload: torch.Tensor) -> list[torch.LongTensor]:
    _check_integers(payload, 1)
    count = int(payload[0])
    lengths = payload[1 : 1 + max(0, count)].tolist()
    if count < 1 or len(lengths) != count or min(lengths) < 1 or 1 + count + sum(lengths) != len(payload):
        raise ProtocolError(f"a message of {len(payload)} integers does not hold the {count} prompts it announces")
    return list(check_tokens(payload[1 + count :]).split(lengths))


def payload_to_translation(payload: torch.Tensor, draft_size: int) -> Translation:
    """Returns the translation into a vocabulary of so many tokens."""
    _check_integers(payload, 1)
    try:
        return Translation.from_tensor(payload, draft_size)
    except (ValueError, RuntimeError) as error:
        raise ProtocolError(f"a message is no translation: {error}") from error


def outcome_to_payload(outcome: Outcome, plan: Plan) -> torch.Tensor:
    """
    Packs the plan, and accepted count and bonus token of each row. If there were later rounds: how many tokens each row
    gained in them, and these tokens.
    """
    c = torch.tensor([plan.saguaro_c], dtype=torch.float64).view(torch.int64)
    head = [MODES.index(plan.mode), plan.lookahead, plan.after_miss, plan.budget, SOURCES.index(plan.fallback)]
    head.append(plan.feeds_first)
    later = [] if outcome.later is None else [*map(len, outcome.later), *itertools.chain(*outcome.later)]
    return torch.tensor([*head, *c.tolist(), *outcome.accepted, *outcome.bonus, *later])


def payload_to_outcome(payload: torch.Tensor, rows: int) -> tuple[Outcome, Plan]:
    _check_integers(payload, _PLAN + 2 * rows)
    mode, lookahead, after_miss, budget, source, feeds_first = payload[: _PLAN - 1].tolist()
    c = float(payload[_PLAN - 1 : _PLAN].clone().view(torch.float64))
    if not 0 <= mode < len(MODES):
        raise ProtocolError(f"{mode} is no mode")
    plan = check_plan(Plan(MODES[mode], lookahead, after_miss, budget, _source(source), c, bool(feeds_first)))
    accepted, bonus, rest = payload[_PLAN:].split([rows, rows, len(payload) - _PLAN - 2 * rows])
    if bool(((accepted < FINISHED) | (accepted > LONGEST_LOOKAHEAD)).any()):
        raise ProtocolError("an outcome cannot have accepted more tokens than a speculation has")
    check_tokens(bonus)
    if not len(rest):
        return Outcome(accepted.tolist(), bonus.tolist()), plan
    lengths, tokens = rest[:rows], check_tokens(rest[rows:])
    fits = len(lengths) == rows and bool(((lengths >= 0) & ((lengths == 0) | (accepted != FINISHED))).all())
    lengths = lengths.tolist()
    if not fits or sum(lengths) != len(tokens):
        raise ProtocolError(f"{len(rest)} integers are not the tokens that {rows} rows gained in later rounds")
    return Outcome(accepted.tolist(), bonus.tolist(), [part.tolist() for part in tokens.split(lengths)]), plan


def speculation_to_payload(speculation: Speculation) -> torch.Tensor:
    """Packs tokens and the draft's part of the record; probabilities travel by themselves."""
    record, tokens = speculation.record, speculation.tokens
    times = [getattr(record, name) for name in _TIMES]
    head = [MODES.index(record.mode), *(getattr(record, name) for name in _COUNTS)]
    head += [int(1e9 * seconds) for seconds in (*times, *(speculation.costs or (-1e-9, 0, 0)))]
    sources, unknown = [SOURCES.index(source) for source in record.sources], [-1] * len(tokens)
    by_row = [*sources, *(record.ranks or unknown), *(record.ngram_matches or unknown), *map(len, tokens)]
    return torch.tensor([*head, *by_row, *itertools.chain(*tokens)])


def payload_to_speculation(payload: torch.Tensor, rows: int) -> Speculation:
    _check_integers(payload, _HEAD + 4 * rows)
    mode, *numbers = payload[:_HEAD].tolist()
    sources, ranks, matches, known = payload[_HEAD : _HEAD + 4 * rows].view(4, rows).tolist()
    counts, times = numbers[: len(_COUNTS)], [number / 1e9 for number in numbers[len(_COUNTS) :]]
    possible = 0 <= mode < len(MODES) and min(counts) >= 0 and counts[0] <= LONGEST_LOOKAHEAD
    tokens = check_tokens(payload[_HEAD + 4 * rows :])
    if not possible or not all(0 <= n <= LONGEST_LOOKAHEAD for n in known) or sum(known) != len(tokens):
        raise ProtocolError(f"a speculation cannot have mode {mode}, counts {counts} and {known} tokens")
    record = RoundRecord(
        MODES[mode], sources=[_source(source) for source in sources], ranks=ranks, ngram_matches=matches
    )
    for name, value in zip((*_COUNTS, *_TIMES), (*counts, *times)):
        setattr(record, name, value)
    costs = tuple(times[-3:]) if numbers[-3] >= 0 else None
    return Speculation([part.tolist() for part in tokens.split(known)], None, record, costs)


_PLAN = 7  # integers
_COUNTS = ("lookahead", "budget", "grown", "passes", "steps")
_TIMES = ("choose_seconds", "grow_seconds", "answer_seconds", "prepared_at", "answered_at")
_HEAD = 1 + len(_COUNTS) + len(_TIMES) + 3


def _bytes(payload: torch.Tensor) -> bytes:
    if payload.dtype != torch.uint8:
        raise ProtocolError(f"{len(payload)} numbers of type {payload.dtype} are not a text")
    return payload.numpy().tobytes()


def _check_integers(payload: torch.Tensor, at_least: int) -> None:
    if payload.dtype != torch.int64 or len(payload) < at_least:
        raise ProtocolError(f"expected {at_least} integers or more, found {len(payload)} of type {payload.dtype}")


def check_tokens(tokens: torch.LongTensor, vocab_size: int | None = None) -> torch.LongTensor:
    """
    Returns the tokens.

    Raises:
        [`~hf_ssd.distributed.messages.ProtocolError`]: one is negative, or not in a vocabulary of that size.
    """
    if len(tokens) and (tokens.min() < 0 or (vocab_size is not None and tokens.max() >= vocab_size)):
        of = "" if vocab_size is None else f" of the vocabulary of {vocab_size}"
        raise ProtocolError(f"{int(tokens.min())} to {int(tokens.max())} are not tokens{of}")
    return tokens


def _source(number: int) -> str:
    if not 0 <= number < len(SOURCES):
        raise ProtocolError(f"{number} is no source of speculations")
    return SOURCES[number]


def largest_support(probabilities: torch.FloatTensor) -> torch.LongTensor:
    """Returns, on the device, how many tokens have any chance in the broadest of distributions `(..., vocab_size)`."""
    return (probabilities != 0).sum(-1).max()  # what is not a number counts, and arrives as it is


def probabilities_to_payload(probabilities: torch.FloatTensor, support: int | None = None) -> torch.Tensor:
    """
    Packs distributions `(..., vocab_size)` exactly. If a warper truncated them, so that at most a quarter of the
    vocabulary has any chance, only those tokens travel: as pairs of value and token, the value's bits as an integer.

    Args:
        probabilities (`torch.FloatTensor` of shape `(..., vocab_size)`): What tokens were drawn from.
        support (`int`, *optional*): Their [`largest_support`], or the size of the vocabulary to send all of it. Asked
            of the device by default.
    """
    support = int(largest_support(probabilities)) if support is None else support
    if _all_travel(support, probabilities.shape[-1]):
        return probabilities.float().flatten()
    values, tokens = probabilities.float().topk(support, dim=-1)
    return torch.stack([values.view(torch.int32), tokens.int()]).flatten()


def probabilities_to_come(shape: tuple[int, ...], support: int) -> torch.Tensor:
    """Returns something of the type and length of what [`probabilities_to_payload`] will pack, to announce it."""
    count, vocab_size = torch.Size(shape[:-1]).numel(), shape[-1]
    if _all_travel(support, vocab_size):
        return torch.empty(count * vocab_size, dtype=torch.float32, device="meta")
    return torch.empty(2 * count * support, dtype=torch.int32, device="meta")


def _all_travel(support: int, vocab_size: int) -> bool:
    return support * 4 > vocab_size


def payload_to_probabilities(payload: torch.Tensor, shape: tuple[int, ...]) -> torch.FloatTensor:
    """Returns the distributions of shape `shape`, the last of which is the size of the vocabulary."""
    if payload.dtype == torch.float32:
        if payload.numel() != torch.Size(shape).numel():
            raise ProtocolError(f"{payload.numel()} probabilities do not fit the shape {tuple(shape)}")
        return payload.view(shape)
    rows = torch.Size(shape[:-1]).numel()
    if payload.dtype != torch.int32 or not rows or payload.numel() % (2 * rows):
        raise ProtocolError(
            f"{payload.numel()} numbers of type {payload.dtype} are not probabilities of {tuple(shape)}"
        )
    values, tokens = payload.view(2, *shape[:-1], -1)
    if payload.device.type == "cpu":
        check_tokens(tokens.flatten(), shape[-1])
    else:  # where a look would have to wait for the GPU, and a token too large would be the end of it
        tokens = tokens.clamp(0, shape[-1] - 1)
    zeros = torch.zeros(shape, dtype=torch.float32, device=payload.device)
    return zeros.scatter_(-1, tokens.long(), values.contiguous().view(torch.float32))
