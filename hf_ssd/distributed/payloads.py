"""What is in the messages between target and draft: numbers and JSON, never pickles. Packing and unpacking only."""

import json
import math
from dataclasses import dataclass

import torch

from ..config import LONGEST_LOOKAHEAD
from ..speculation.fallback import Proposal
from ..speculation.planner import BACKUPS, Plan
from .messages import LARGEST_PAYLOAD, ProtocolError
from .session import Answer

SOURCES = ("primary", *BACKUPS)


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


def outcome_to_payload(
    accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float, verified: int
) -> torch.Tensor:
    """Packs accepted count and bonus token of each row, both `(batch_size,)`, a duration and the verified tokens."""
    return torch.cat([torch.tensor([_nanoseconds(seconds), verified]), accepted.cpu(), bonus.cpu()])


def payload_to_outcome(payload: torch.Tensor) -> tuple[torch.LongTensor, torch.LongTensor, float, int]:
    _check_integers(payload, 2)
    nanoseconds, verified = payload[:2].tolist()
    if len(payload) % 2 or nanoseconds < 0 or verified < 0:
        raise ProtocolError(f"{len(payload)} integers are not an outcome, or one that cannot be")
    accepted, bonus = payload[2:].view(2, -1)
    if bool(((accepted < -1) | (accepted > LONGEST_LOOKAHEAD)).any()):
        raise ProtocolError("an outcome cannot have accepted more tokens than a speculation has")
    return accepted, check_tokens(bonus), nanoseconds / 1e9, verified


def payload_to_outcomes(payload: torch.Tensor, rows: int) -> list[tuple]:
    """Returns the outcome of each round that a message tells of."""
    _check_integers(payload, 1)
    if len(payload) % (2 + 2 * rows):
        raise ProtocolError(f"{len(payload)} integers are not outcomes of {rows} rows")
    return [payload_to_outcome(one) for one in payload.split(2 + 2 * rows)]


def answer_to_payload(answer: Answer) -> torch.Tensor:
    times = (answer.draft_seconds, answer.answer_seconds, answer.prepared_at, answer.answered_at)
    figures = torch.tensor([answer.budget, answer.rest, *map(_nanoseconds, times)])
    return torch.cat([figures, answer.hits.long(), answer.tokens.cpu().flatten()])


def payload_to_answer(payload: torch.Tensor, batch_size: int) -> Answer:
    tokens = _tokens(payload, 6 + batch_size, batch_size)
    budget, rest, *times = payload[:6].tolist()
    if budget < 0 or rest < 0:
        raise ProtocolError(f"a speculation cannot have a budget of {budget} and a rest of {rest} rounds")
    draft, answer, prepared_at, answered_at = (nanoseconds / 1e9 for nanoseconds in times)
    return Answer(tokens, payload[6 : 6 + batch_size].bool(), draft, answer, budget, prepared_at, answered_at, rest)


@dataclass
class Found:
    """
    What one of several drafts has prepared for an outcome.

    Args:
        answer ([`~hf_ssd.distributed.session.Answer`]): Its tokens, as long as they are, in the rows that hit.
        plan ([`~hf_ssd.speculation.planner.Plan`]): What it had been told, or had decided, to prepare.
    """

    answer: Answer
    plan: Plan


def found_to_payload(found: Found) -> torch.Tensor:
    return torch.cat([_plan_to_integers(found.plan), answer_to_payload(found.answer)])


def payload_to_found(payload: torch.Tensor, batch_size: int) -> Found:
    return Found(payload_to_answer(payload[_PLAN:], batch_size), _integers_to_plan(payload[:_PLAN]))


def complete_to_payload(tokens: torch.LongTensor, hits: torch.BoolTensor, known: list[int]) -> torch.Tensor:
    """Packs what is prepared: the tokens, which rows hit, and how many tokens of each row there are."""
    return torch.cat([hits.long(), torch.tensor(known), tokens.flatten()])


def payload_to_complete(payload: torch.Tensor, rows: int) -> tuple[torch.LongTensor, torch.BoolTensor, list[int]]:
    tokens = _tokens(payload, 2 * rows, rows)
    known = payload[rows : 2 * rows].tolist()
    if not all(0 <= n <= tokens.shape[1] for n in known):
        raise ProtocolError(f"speculations of {known} tokens do not fit {tuple(tokens.shape)}")
    return tokens, payload[:rows].bool(), known


def completed_to_payload(answer: Answer, source: str) -> torch.Tensor:
    """Packs the answer, and where the speculations of rows that missed came from."""
    return torch.cat([torch.tensor([SOURCES.index(source)]), answer_to_payload(answer)])


def payload_to_completed(payload: torch.Tensor, batch_size: int) -> tuple[Answer, str]:
    return payload_to_answer(payload[1:], batch_size), _source(payload[:1])


def follow_to_payload(
    tokens: torch.LongTensor, hits: torch.BoolTensor, owned: list[int], source: str, plan: Plan
) -> torch.Tensor:
    """Packs what is verified now: tokens, hits, where rows that missed came from; which rows are the receiver's."""
    mine = torch.zeros(len(hits), dtype=torch.long)
    mine[owned] = 1
    head = torch.tensor([SOURCES.index(source)])
    return torch.cat([head, _plan_to_integers(plan), hits.long(), mine, tokens.flatten()])


def payload_to_follow(payload: torch.Tensor, rows: int):
    """Returns tokens, hits, the rows that are the receiver's, the source of the others, and the plan."""
    tokens = _tokens(payload, 1 + _PLAN + 2 * rows, rows)
    hits, mine = payload[1 + _PLAN : 1 + _PLAN + 2 * rows].view(2, rows)
    return (
        tokens,
        hits.bool(),
        mine.nonzero().flatten(),
        _source(payload[:1]),
        _integers_to_plan(payload[1 : 1 + _PLAN]),
    )


def _bytes(payload: torch.Tensor) -> bytes:
    if payload.dtype != torch.uint8:
        raise ProtocolError(f"{len(payload)} numbers of type {payload.dtype} are not a text")
    return payload.numpy().tobytes()


def _check_integers(payload: torch.Tensor, at_least: int) -> None:
    if payload.dtype != torch.int64 or len(payload) < at_least:
        raise ProtocolError(f"expected {at_least} integers or more, found {len(payload)} of type {payload.dtype}")


def _tokens(payload: torch.Tensor, head: int, rows: int) -> torch.LongTensor:
    """Returns the tokens `(rows, lookahead)` behind a head of so many integers."""
    lookahead, rest = divmod(len(payload) - head, rows)
    if payload.dtype != torch.int64 or rest or not 0 <= lookahead <= LONGEST_LOOKAHEAD:
        raise ProtocolError(f"a speculation of {len(payload)} integers does not fit {rows} rows")
    return check_tokens(payload[head:]).view(rows, -1)


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


def _source(payload: torch.Tensor) -> str:
    _check_integers(payload, 1)
    number = int(payload[0])
    if not 0 <= number < len(SOURCES):
        raise ProtocolError(f"{number} is no source of speculations")
    return SOURCES[number]


def _plan_to_integers(plan: Plan) -> torch.Tensor:
    numbers = torch.tensor([plan.saguaro_c, plan.acceptance_rate, plan.power_law_exponent], dtype=torch.float64)
    fallback = SOURCES.index(plan.fallback)
    head = torch.tensor([plan.lookahead, plan.budget, fallback, plan.drafts])
    return torch.cat([head, numbers.view(torch.int64)])


def _integers_to_plan(payload: torch.Tensor) -> Plan:
    _check_integers(payload, _PLAN)
    lookahead, budget, _, drafts = payload[:4].tolist()
    c, a, r = payload[4:].clone().view(torch.float64).tolist()
    sizes = 0 <= lookahead <= LONGEST_LOOKAHEAD and 0 <= budget <= LARGEST_PAYLOAD and 1 <= drafts <= LARGEST_PAYLOAD
    if not (sizes and 0 <= c <= 1 and 0 < a < 1 and 0 < r < math.inf):
        raise ProtocolError(f"{payload.tolist()} is not a plan")
    return Plan(lookahead, budget, _source(payload[2:3]), c, a, r, drafts)


_PLAN = 7  # integers


def backup_request_to_payload(rows: list[int], lookahead: int) -> torch.Tensor:
    return torch.tensor([lookahead, *rows])


def payload_to_backup_request(payload: torch.Tensor, batch_size: int) -> tuple[list[int], int]:
    _check_integers(payload, 2)
    lookahead, *rows = payload[: 2 + batch_size].tolist()
    is_sound = 1 <= lookahead <= LONGEST_LOOKAHEAD and len(rows) <= batch_size and len(set(rows)) == len(rows)
    if not is_sound or min(rows) < 0 or max(rows) >= batch_size:
        raise ProtocolError(f"{len(payload)} integers do not ask for proposals for some of {batch_size} rows")
    return rows, lookahead


def proposal_to_payload(proposal: Proposal) -> torch.Tensor:
    """Packs counts and tokens, and whether probabilities follow."""
    follow = torch.tensor([int(proposal.probabilities is not None), *proposal.counts])
    return torch.cat([follow, proposal.tokens.cpu().flatten()])


def payload_to_proposal(payload: torch.Tensor, rows: int) -> tuple[Proposal, bool]:
    """Returns the proposal, and whether its probabilities follow."""
    tokens, counts = _tokens(payload, 1 + rows, rows), payload[1 : 1 + rows].tolist()
    if not all(0 <= n <= tokens.shape[1] for n in counts):
        raise ProtocolError(f"a proposal of {counts} tokens does not fit {tuple(tokens.shape)}")
    return Proposal(tokens, counts), bool(payload[0])


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


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
