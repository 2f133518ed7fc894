"""What travels between target and draft: numbers and JSON, never pickles. Packing and unpacking only.

A message is one frame of 128 integers: a header of 8, and up to 120 integers of payload. A larger payload, or one of
another type, follows in a transfer of its own, whose type and length the header tells.
"""

import json
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from ..speculation.fallback import Proposal
from ..speculation.planner import BACKUPS, Plan
from .session import Answer

MAGIC = 0x6866_5F73_7364  # "hf_ssd"
VERSION = 3
HEADER_LENGTH = 8
FRAME_LENGTH = 128
PAYLOAD_TYPES = (torch.int64, torch.int32, torch.float32, torch.uint8)
SOURCES = ("primary", *BACKUPS)
LARGEST_PAYLOAD = 2**34  # elements; a header that asks for more is not one of ours


class Kind(IntEnum):
    READY = 1  # draft -> target: the worker has loaded its model (JSON)
    START = 2  # target -> draft: settings of one generate() call (JSON); PROMPTS follows
    PROMPTS = 3  # target -> draft: length of each row, then all tokens
    OUTCOME = 4  # target -> draft: accepted count and bonus token of each row, and how long verification took; after a
    # rest, one behind the other, those of all rounds that the draft was not asked in
    SPECULATION = 5  # draft -> target: hits, tokens, and how long drafting took
    PROBABILITIES = 6  # behind SPECULATION or BACKUP: what the tokens were drawn from, when sampling
    END = 7  # target -> draft: the call is over
    STOP = 8  # target -> draft: the worker is no longer needed
    ERROR = 9  # draft -> target: an exception with its traceback (text)
    BACKUP_REQUEST = 10  # draft -> target: rows that the user's own fallback is to propose tokens for
    BACKUP = 11  # target -> draft: those tokens
    FOUND = 12  # one of several drafts -> target: what it has prepared for the outcome, and its plan
    COMPLETE = 13  # target -> one of several drafts: what all have prepared; draft what is missing
    COMPLETED = 14  # its answer
    FOLLOW = 15  # target -> the others: what is verified now, and which of their rows are in it
    VALUES = 16  # rank 0 of the target -> its other ranks: something besides outcomes and speculations


class ProtocolError(RuntimeError):
    """A message that is not what the protocol says: truncated, foreign, stale or of another version."""


@dataclass
class Message:
    """
    Args:
        kind (`Kind`): What it is.
        session (`int`): Number of the generate() call it belongs to; 0 for none.
        round (`int`): Number of the verification round, from 0.
        payload (`torch.Tensor`): One-dimensional, of one of `PAYLOAD_TYPES`.
    """

    kind: Kind
    session: int = 0
    round: int = 0
    payload: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


def pack(message: Message) -> list[torch.Tensor]:
    """Returns the frame, and behind it the payload if the frame does not hold it."""
    payload = message.payload
    inline = payload.dtype == torch.int64 and len(payload) <= FRAME_LENGTH - HEADER_LENGTH
    header = [MAGIC, VERSION, message.kind, message.session, message.round]
    header += [PAYLOAD_TYPES.index(payload.dtype), len(payload), int(inline)]
    frame = torch.zeros(FRAME_LENGTH, dtype=torch.int64)
    frame[:HEADER_LENGTH] = torch.tensor(header)
    if inline:
        frame[HEADER_LENGTH : HEADER_LENGTH + len(payload)] = payload
        return [frame]
    return [frame, payload.contiguous()] if len(payload) else [frame]


def unpack(frame: torch.Tensor) -> tuple[Message, torch.Tensor | None]:
    """
    Reads a frame.

    Returns:
        The message, and `None` or the empty tensor that its payload is to be received into.

    Raises:
        [`ProtocolError`]: the frame is not one of ours.
    """
    magic, version, kind, session, round_, dtype, length, inline = frame[:HEADER_LENGTH].tolist()
    if magic != MAGIC:
        raise ProtocolError(f"a message began with {magic:#x} instead of {MAGIC:#x}; it does not come from hf_ssd")
    if version != VERSION:
        raise ProtocolError(f"a message has protocol version {version}, this side speaks version {VERSION}")
    room = FRAME_LENGTH - HEADER_LENGTH if inline else LARGEST_PAYLOAD
    if kind not in set(Kind) or not 0 <= dtype < len(PAYLOAD_TYPES) or not 0 <= length <= room:
        raise ProtocolError(f"a message of kind {kind} announces {length} elements of type {dtype}, which cannot be")
    if inline:
        return Message(Kind(kind), session, round_, frame[HEADER_LENGTH : HEADER_LENGTH + length]), None
    payload = torch.empty(length, dtype=PAYLOAD_TYPES[dtype])
    return Message(Kind(kind), session, round_, payload), payload


def expect(message: Message, kind: Kind, session: int, round_: int, length: int | None = None) -> None:
    """
    Raises:
        [`ProtocolError`]: the message is of another kind, session, round or length.
    """
    found = (message.kind, message.session, message.round)
    if found != (kind, session, round_) or (length is not None and len(message.payload) != length):
        raise ProtocolError(
            f"expected {kind.name} of session {session}, round {round_}, length {length}; received "
            f"{message.kind.name} of session {message.session}, round {message.round}, length {len(message.payload)}"
        )


# ---------------------------------------------------------------- payloads


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
    return torch.cat([figures, answer.hits.cpu().long(), answer.tokens.cpu().flatten()])


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


def probabilities_to_payload(probabilities: torch.FloatTensor) -> torch.Tensor:
    """
    Packs distributions `(..., vocab_size)` exactly. If a warper truncated them, so that at most a quarter of the
    vocabulary has any chance, only those tokens travel: as pairs of value and token, the value's bits as an integer.
    """
    vocab_size = probabilities.shape[-1]
    support = int((probabilities > 0).sum(-1).max())
    if support * 4 > vocab_size:
        return probabilities.float().cpu().flatten()
    values, tokens = probabilities.float().topk(support, dim=-1)
    return torch.stack([values.cpu().view(torch.int32), tokens.cpu().int()]).flatten()


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
    return torch.zeros(shape).scatter_(-1, tokens.long(), values.contiguous().view(torch.float32))
