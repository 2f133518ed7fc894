"""The messages between target and draft. They hold numbers and JSON, never pickles, and are checked here, once.

A message is a frame of 128 integers: a header of 10, and up to 118 integers of payload. A longer payload, or a tensor,
follows the frame in its own transfer. A message may announce the next message, of which only the payload follows: the
receiver gets ready for it at once, and the sender need not have it yet.

A new message needs a [`Kind`], and its payload a `write_...` and a `read_...` function, here or in
[`~hf_ssd.distributed.payloads`]. A new field of a plan, a record or a call only needs a line in its table.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from ..config import LONGEST_LOOKAHEAD
from ..rounds import MODES, SOURCES, Outcome, Plan, RoundRecord, Speculation

MAGIC, VERSION = 0x6866_5F73_7364, 24  # "hf_ssd"
HEADER_LENGTH, FRAME_LENGTH = 10, 128
PAYLOAD_TYPES = (torch.int64, torch.int32, torch.float32, torch.uint8, torch.bfloat16, torch.float16)
LARGEST_PAYLOAD = 2**26  # elements; a header that asks for more is invalid, unless the receiver expects more


class Kind(IntEnum):
    READY = 1  # draft -> target: the worker has loaded its model (JSON)
    START = 2  # target -> draft: settings and prompts of one generate() call (JSON)
    OUTCOME = 3  # target -> draft: the plan, the tokens that rows have gained, those that the target proposes next
    FEATURES = 4  # target -> draft, after OUTCOME: hidden states of the target, for a draft that reads them
    SPECULATION = 5  # both ways: tokens and sources; from the draft its part of the record, to it what others propose
    PROBABILITIES = 6  # draft -> target, after SPECULATION: the distributions of its tokens, when sampling
    END = 7  # target -> draft: the call is over
    STOP = 8  # target -> draft: the worker is no longer needed
    ERROR = 9  # draft -> target: an exception with its traceback (text)
    VALUES = 10  # rank 0 of the target -> its other ranks (JSON)
    PROOF = 11  # both ways, before other messages: a nonce, then a proof that the sender knows the shared secret


class ProtocolError(RuntimeError):
    """A message that violates the protocol: truncated, foreign, stale or of another version."""


# ---------------------------------------------------------------- fields


@dataclass(frozen=True)
class Field:
    """
    The encoding of a value as an integer in a range: `write` converts the value to it, and `read` converts it back.
    """

    first: int = -(2**63)
    last: int = 2**63 - 1
    write: Callable = int
    read: Callable = int


def one_of(values: tuple) -> Field:
    return Field(0, len(values) - 1, values.index, values.__getitem__)


LENGTH, COUNT, PLACE = Field(0, LONGEST_LOOKAHEAD), Field(0, LARGEST_PAYLOAD), Field(-1)
SECONDS = Field(write=lambda seconds: int(1e9 * seconds), read=lambda number: number / 1e9)

HEADER = {
    "kind": Field(1, len(Kind), int, Kind),
    "type": one_of(PAYLOAD_TYPES),
    "length": Field(0),
}
PLAN = {
    "mode": one_of(MODES),
    "lookahead": LENGTH,
    "after_miss": LENGTH,
    "budget": COUNT,
    "fallback": one_of(SOURCES),
}
RECORD = {
    "lookahead": LENGTH,
    **dict.fromkeys(("budget", "states", "grown", "passes", "steps"), COUNT),
    **dict.fromkeys(("choose_seconds", "grow_seconds", "answer_seconds", "prepared_at", "answered_at"), SECONDS),
}
RECORD_OF_ROWS = {"sources": one_of(SOURCES), "ranks": PLACE}


def write_fields(fields: dict[str, Field], thing) -> list[int]:
    """Returns these attributes of an object as integers."""
    return [kind.write(getattr(thing, name)) for name, kind in fields.items()]


def read_fields(fields: dict[str, Field], numbers: list[int], of_what: str) -> dict:
    """Returns the values of the fields by their names, or raises [`ProtocolError`] for invalid numbers."""
    if type(numbers) is not list or len(numbers) != len(fields):
        raise ProtocolError(f"{of_what} has not the {len(fields)} numbers that it is made of")
    values = {}
    for (name, kind), number in zip(fields.items(), numbers):
        if type(number) is not int or not kind.first <= number <= kind.last:
            raise ProtocolError(f"{number!r:.100} cannot be the {name} of {of_what}")
        values[name] = kind.read(number)
    return values


def read_plan(numbers: list[int]) -> Plan:
    plan = Plan(**read_fields(PLAN, numbers, "a plan"))
    if plan.after_miss > plan.lookahead:
        raise ProtocolError(f"{plan} is not a plan")
    return plan


# ---------------------------------------------------------------- frames


@dataclass
class Message:
    """
    A message of a session, the number of a generate() call (0: of none), and of a verification round. The payload is
    integers, or a one-dimensional tensor of a type in `PAYLOAD_TYPES`.

    `announces` is the next message, of the same session and round, whose payload is sent by
    [`~hf_ssd.distributed.transport.Channel.send_announced`]. Until then only its type and length count, so it may be on
    the device "meta".
    """

    kind: Kind
    session: int = 0
    round: int = 0
    payload: list[int] | torch.Tensor = field(default_factory=list)
    announces: "Message | None" = None


def is_inline(dtype: torch.dtype, length: int) -> bool:
    """Whether a payload that was not announced is in the frame. Otherwise it has a transfer of its own."""
    return not length or (dtype == torch.int64 and length <= FRAME_LENGTH - HEADER_LENGTH)


def pack(message: Message) -> list[torch.Tensor]:
    """Returns the frame, followed by the payload if the frame does not hold it."""
    announced, payload = message.announces, message.payload
    numbers = [MAGIC, VERSION, message.kind, message.session, message.round]
    dtype = getattr(payload, "dtype", torch.int64)
    numbers += [PAYLOAD_TYPES.index(dtype), len(payload)]
    if announced is None:
        numbers += [0, 0, 0]
    elif len(announced.payload):
        numbers += [announced.kind, PAYLOAD_TYPES.index(announced.payload.dtype), len(announced.payload)]
    else:
        raise ProtocolError("a message without a payload cannot be announced: nothing of it would arrive")
    behind = [] if is_inline(dtype, len(payload)) else [torch.as_tensor(payload, device="cpu").contiguous()]
    if not behind:
        numbers += integers(payload) if len(payload) else []
    return [torch.tensor([*numbers, *[0] * (FRAME_LENGTH - len(numbers))]), *behind]


def unpack(frame: torch.Tensor, largest: int = LARGEST_PAYLOAD) -> Message:
    """
    Returns the message of a frame. A payload that follows is a new tensor, to be received into; more than `largest`
    elements are refused.
    """
    magic, version, kind, session, round_, *numbers = frame.tolist()
    if magic != MAGIC:
        raise ProtocolError(f"a message began with {magic:#x} instead of {MAGIC:#x}; it does not come from hf_ssd")
    if version != VERSION:
        raise ProtocolError(f"a message has protocol version {version}, this side speaks version {VERSION}")

    def read(header: list[int], least: int) -> Message:
        kind, dtype, length = read_fields(HEADER, header, "a message").values()
        in_frame = not least and is_inline(dtype, length)
        if length < least or (length > largest and not in_frame):
            raise ProtocolError(f"a message of kind {kind.name} announces {length} elements, not {least} to {largest}")
        payload = numbers[5 : 5 + length] if in_frame else torch.empty(length, dtype=dtype)
        return Message(kind, session, round_, payload)

    message = read([kind, *numbers[:2]], least=0)
    if any(numbers[2:5]):
        message.announces = read(numbers[2:5], least=1)
    return message


def expect(message: Message, kind: Kind, session: int, round_: int) -> None:
    """Raises [`ProtocolError`] if the message is of another kind, session or round."""
    if (message.kind, message.session, message.round) != (kind, session, round_):
        raise ProtocolError(
            f"expected {kind.name} of session {session}, round {round_}; received {message.kind.name} of session "
            f"{message.session}, round {message.round}, length {len(message.payload)}"
        )


# ---------------------------------------------------------------- the messages of a round


def write_rows(tokens: list[list[int]]) -> list[int]:
    """Returns how many tokens each row has, and the tokens."""
    return [*map(len, tokens), *itertools.chain(*tokens)]


def read_rows(numbers: list[int], rows: int, longest: tuple[int, ...], vocab_size: int = 2**63) -> list:
    """Returns successive lists of the tokens of each row. In each list a row has at most as many as `longest` says."""
    left, found = iter(numbers), []
    for most in longest:
        lengths = list(itertools.islice(left, rows))
        is_possible = len(lengths) == rows and 0 <= min(lengths) and max(lengths) <= most
        tokens = [list(itertools.islice(left, length)) for length in lengths if is_possible]
        if not is_possible or list(map(len, tokens)) != lengths:
            raise ProtocolError(f"{len(numbers)} integers cannot hold {lengths} tokens of each row")
        check_tokens([*itertools.chain(*tokens)], vocab_size)
        found.append(tokens)
    if next(left, None) is not None:
        raise ProtocolError(f"{len(numbers)} integers cannot hold {lengths} tokens of each row: they are more")
    return found


def write_outcome(outcome: Outcome, plan: Plan) -> list[int]:
    """Returns the plan, the tokens that the target proposes for each row, and those that each row has gained."""
    proposed = outcome.proposed or [[]] * len(outcome.tokens)
    return [*write_fields(PLAN, plan), *write_rows(proposed), *write_rows(outcome.tokens)]


def read_outcome(payload, rows: int) -> tuple[Outcome, Plan]:
    numbers = integers(payload)
    proposed, tokens = read_rows(numbers[len(PLAN) :], rows, (LONGEST_LOOKAHEAD, LARGEST_PAYLOAD))
    return Outcome(tokens, proposed if any(proposed) else None), read_plan(numbers[: len(PLAN)])


def write_speculation(speculation: Speculation) -> list[int]:
    """Returns the draft's part of the record, and the tokens. Probabilities are sent separately."""
    record, tokens = speculation.record, speculation.tokens
    numbers = write_fields(RECORD, record)
    for name, of_row in RECORD_OF_ROWS.items():
        numbers += map(of_row.write, getattr(record, name) or [-1] * len(tokens))
    return numbers + write_rows(tokens)


def read_speculation(payload, rows: int, vocab_size: int = 2**63) -> Speculation:
    numbers = integers(payload)
    record = RoundRecord(**read_fields(RECORD, numbers[: len(RECORD)], "a speculation"))
    numbers = numbers[len(RECORD) :]
    for name, of_row in RECORD_OF_ROWS.items():
        values, numbers = numbers[:rows], numbers[rows:]
        if len(values) < rows or min(values) < of_row.first or max(values) > of_row.last:
            raise ProtocolError(f"{values} cannot be the {name} of a speculation")
        setattr(record, name, list(map(of_row.read, values)))
    return Speculation(*read_rows(numbers, rows, (LONGEST_LOOKAHEAD,), vocab_size), None, record)


def check_tokens(tokens: list[int], vocab_size: int) -> None:
    """Raises [`ProtocolError`] if any of the tokens is not in a vocabulary of `vocab_size` tokens."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        raise ProtocolError(f"{min(tokens)} to {max(tokens)} are not tokens of a vocabulary of {vocab_size}")


def integers(payload) -> list[int]:
    """Returns the integers of a payload."""
    kind = getattr(payload, "dtype", torch.int64)
    if kind != torch.int64:
        raise ProtocolError(f"expected integers, found {len(payload)} elements of type {kind}")
    return payload if isinstance(payload, list) else payload.tolist()
