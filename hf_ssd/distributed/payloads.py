"""What is in the messages between target and draft: numbers and JSON, never pickles. Packing and unpacking only."""

import json
from dataclasses import dataclass

import torch

from ..speculation.fallback import Proposal
from ..speculation.planner import BACKUPS, Plan
from .messages import ProtocolError
from .session import Answer

SOURCES = ("primary", *BACKUPS)


def text_to_payload(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.uint8)


def payload_to_text(payload: torch.Tensor) -> str:
    return bytes(payload.tolist()).decode("utf-8")


def json_to_payload(value) -> torch.Tensor:
    return text_to_payload(json.dumps(value))


def payload_to_json(payload: torch.Tensor):
    return json.loads(payload_to_text(payload))


def prompts_to_payload(prompts: list[torch.LongTensor]) -> torch.Tensor:
    """Packs the prompt of each row: their number, their lengths, their tokens."""
    lengths = torch.tensor([len(prompts), *map(len, prompts)])
    return torch.cat([lengths, *(prompt.cpu().long() for prompt in prompts)])


def payload_to_prompts(payload: torch.Tensor) -> list[torch.LongTensor]:
    count = int(payload[0]) if len(payload) else 0
    lengths = payload[1 : 1 + count].tolist()
    if count < 1 or len(lengths) != count or min(lengths) < 1 or 1 + count + sum(lengths) != len(payload):
        raise ProtocolError(f"a message of {len(payload)} integers does not hold the {count} prompts it announces")
    return list(payload[1 + count :].split(lengths))


def outcome_to_payload(
    accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float, verified: int
) -> torch.Tensor:
    """Packs accepted count and bonus token of each row, both `(batch_size,)`, a duration and the verified tokens."""
    return torch.cat([torch.tensor([_nanoseconds(seconds), verified]), accepted.cpu(), bonus.cpu()])


def payload_to_outcome(payload: torch.Tensor) -> tuple[torch.LongTensor, torch.LongTensor, float, int]:
    accepted, bonus = payload[2:].view(2, -1)
    return accepted, bonus, int(payload[0]) / 1e9, int(payload[1])


def payload_to_outcomes(payload: torch.Tensor, rows: int) -> list[tuple]:
    """Returns the outcome of each round that a message tells of."""
    if not len(payload) or len(payload) % (2 + 2 * rows):
        raise ProtocolError(f"{len(payload)} integers are not outcomes of {rows} rows")
    return [payload_to_outcome(one) for one in payload.split(2 + 2 * rows)]


def answer_to_payload(answer: Answer) -> torch.Tensor:
    times = (answer.draft_seconds, answer.answer_seconds, answer.prepared_at, answer.answered_at)
    figures = torch.tensor([answer.budget, answer.rest, *map(_nanoseconds, times)])
    return torch.cat([figures, answer.hits.long(), answer.tokens.cpu().flatten()])


def payload_to_answer(payload: torch.Tensor, batch_size: int) -> Answer:
    budget, rest, *times = payload[:6].tolist()
    hits, tokens = payload[6 : 6 + batch_size].bool(), payload[6 + batch_size :]
    if len(hits) != batch_size or len(tokens) % batch_size:
        raise ProtocolError(f"a speculation of {len(payload)} integers does not fit {batch_size} rows")
    draft, answer, prepared_at, answered_at = (nanoseconds / 1e9 for nanoseconds in times)
    return Answer(tokens.view(batch_size, -1), hits, draft, answer, budget, prepared_at, answered_at, rest)


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
    _check_rows(payload, 2 * rows, rows)
    known = payload[rows : 2 * rows].tolist()
    tokens = payload[2 * rows :].view(rows, -1)
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
    _check_rows(payload, 1 + _PLAN + 2 * rows, rows)
    hits, mine = payload[1 + _PLAN : 1 + _PLAN + 2 * rows].view(2, rows)
    tokens = payload[1 + _PLAN + 2 * rows :].view(rows, -1)
    return (
        tokens,
        hits.bool(),
        mine.nonzero().flatten(),
        _source(payload[:1]),
        _integers_to_plan(payload[1 : 1 + _PLAN]),
    )


def _check_rows(payload: torch.Tensor, head: int, rows: int) -> None:
    if len(payload) < head or (len(payload) - head) % rows:
        raise ProtocolError(f"a speculation of {len(payload)} integers does not fit {rows} rows")


def _source(payload: torch.Tensor) -> str:
    number = int(payload[0]) if len(payload) else -1
    if not 0 <= number < len(SOURCES):
        raise ProtocolError(f"{number} is no source of speculations")
    return SOURCES[number]


def _plan_to_integers(plan: Plan) -> torch.Tensor:
    numbers = torch.tensor([plan.saguaro_c, plan.acceptance_rate, plan.power_law_exponent], dtype=torch.float64)
    fallback = SOURCES.index(plan.fallback)
    head = torch.tensor([plan.lookahead, plan.budget, fallback, plan.drafts])
    return torch.cat([head, numbers.view(torch.int64)])


def _integers_to_plan(payload: torch.Tensor) -> Plan:
    if len(payload) != _PLAN:
        raise ProtocolError(f"{len(payload)} integers are not a plan")
    lookahead, budget, _, drafts = payload[:4].tolist()
    numbers = payload[4:].contiguous().view(torch.float64).tolist()
    return Plan(lookahead, budget, _source(payload[2:3]), *numbers, drafts)


_PLAN = 7  # integers


def backup_request_to_payload(rows: list[int], lookahead: int) -> torch.Tensor:
    return torch.tensor([lookahead, *rows])


def payload_to_backup_request(payload: torch.Tensor, batch_size: int) -> tuple[list[int], int]:
    lookahead, *rows = payload.tolist() or [0]
    if lookahead < 1 or not rows or min(rows) < 0 or max(rows) >= batch_size:
        raise ProtocolError(f"{payload.tolist()} does not ask for proposals for some of {batch_size} rows")
    return rows, lookahead


def proposal_to_payload(proposal: Proposal) -> torch.Tensor:
    """Packs counts and tokens, and whether probabilities follow."""
    follow = torch.tensor([int(proposal.probabilities is not None), *proposal.counts])
    return torch.cat([follow, proposal.tokens.cpu().flatten()])


def payload_to_proposal(payload: torch.Tensor, rows: int) -> tuple[Proposal, bool]:
    """Returns the proposal, and whether its probabilities follow."""
    counts, tokens = payload[1 : 1 + rows].tolist(), payload[1 + rows :]
    if len(counts) != rows or len(tokens) % rows or not all(0 <= n <= len(tokens) // rows for n in counts):
        raise ProtocolError(f"a proposal of {len(payload)} integers does not fit {rows} rows")
    return Proposal(tokens.view(rows, -1), counts), bool(payload[0])


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def largest_support(probabilities: torch.FloatTensor) -> torch.LongTensor:
    """Returns, on the device, how many tokens have any chance in the broadest of distributions `(..., vocab_size)`."""
    return (probabilities > 0).sum(-1).max()


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
    if payload.dtype != torch.int32 or payload.numel() % (2 * rows):
        raise ProtocolError(
            f"{payload.numel()} numbers of type {payload.dtype} are not probabilities of {tuple(shape)}"
        )
    values, tokens = payload.view(2, *shape[:-1], -1)
    zeros = torch.zeros(shape, dtype=torch.float32, device=payload.device)
    return zeros.scatter_(-1, tokens.long(), values.contiguous().view(torch.float32))
