"""The messages between target and draft. They hold numbers and JSON, never pickles, and are checked here, once.

A message is a frame of 128 integers: a header of 12, and up to 116 integers of payload. A longer payload, or a tensor,
follows the frame in its own transfer. A message may announce the next message, of which only the payload follows: the
receiver gets ready for it at once, and the sender need not have it yet.

A new message needs a [`Kind`], and its payload a `write_...` and a `read_...` function, here or in
[`~hf_ssd.distributed.payloads`]. A new field of a plan, a record or a call only needs a line in its table.
"""

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from ..config import LONGEST_LOOKAHEAD
from ..rounds import MODES, SOURCES, Outcome, Plan, RoundRecord, Speculation

MAGIC, VERSION = 0x6866_5F73_7364, 20  # "hf_ssd"
HEADER_LENGTH, FRAME_LENGTH = 12, 128
PAYLOAD_TYPES = (torch.int64, torch.int32, torch.float32, torch.uint8, torch.bfloat16, torch.float16)
BEHIND, INLINE = range(2)  # place of a payload
LARGEST_PAYLOAD = 2**26  # elements; a header that asks for more is invalid, unless the receiver expects more


class Kind(IntEnum):
    READY = 1  # draft -> target: the worker has loaded its model (JSON)
    START = 2  # target -> draft: settings of one generate() call (JSON); PROMPTS follows
    PROMPTS = 3  # target -> draft: length of each row, then all tokens
    OUTCOME = 4  # target -> draft: the plan, the tokens that rows have gained, those that the target proposes next
    SPECULATION = 5  # draft -> target: tokens, and the draft's part of the record
    PROBABILITIES = 6  # draft -> target, after SPECULATION: the distributions of its tokens, when sampling
    END = 7  # target -> draft: the call is over
    STOP = 8  # target -> draft: the worker is no longer needed
    ERROR = 9  # draft -> target: an exception with its traceback (text)
    VALUES = 10  # rank 0 of the target -> its other ranks: values besides outcomes and speculations
    PROOF = 11  # both ways, before other messages: a nonce, then a proof that the sender knows the shared secret
    VOCABULARY = 12  # target -> draft: the translation of the target's tokens, for the calls that follow
    PROPOSALS = 13  # target -> draft: tokens that others propose, which are verified, or which SPECULATION completes
    FEATURES = 14  # target -> draft, after OUTCOME: hidden states of the target, for a draft that reads them


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


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


LENGTH, COUNT, FLAG, PLACE = Field(0, LONGEST_LOOKAHEAD), Field(0, LARGEST_PAYLOAD), Field(0, 1, int, bool), Field(-1)
SECONDS = Field(write=lambda seconds: int(1e9 * seconds), read=lambda number: number / 1e9)
# As integers, the bits of positive doubles are in the same order as the numbers.
SHARE = Field(0, _bits(1.0), _bits, lambda number: struct.unpack("<d", number.to_bytes(8, "little"))[0])

HEADER = {
    "kind": Field(1, len(Kind), int, Kind),
    "type": one_of(PAYLOAD_TYPES),
    "length": Field(0),
    "place": Field(0, INLINE),
}
PLAN = {
    "mode": one_of(MODES),
    "lookahead": LENGTH,
    "after_miss": LENGTH,
    "budget": COUNT,
    "fallback": one_of(SOURCES),
    "saguaro_c": SHARE,
    "ngrams": LENGTH,
}
RECORD = {
    "mode": one_of(MODES),
    "lookahead": LENGTH,
    "ngrams": LENGTH,
    **dict.fromkeys(("budget", "states", "grown", "passes", "steps"), COUNT),
    **dict.fromkeys(("choose_seconds", "grow_seconds", "answer_seconds", "prepared_at", "answered_at"), SECONDS),
}
RECORD_OF_ROWS = {
    "sources": one_of(SOURCES),
    "ranks": PLACE,
    "lengths": Field(-1, LONGEST_LOOKAHEAD),
}


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

    @property
    def place(self) -> int:
        """Place of the payload, which has a transfer of its own unless it is `INLINE`."""
        length = len(self.payload)
        is_small = not length or (isinstance(self.payload, list) and length <= FRAME_LENGTH - HEADER_LENGTH)
        return INLINE if is_small else BEHIND

    def header(self) -> list[int]:
        dtype = getattr(self.payload, "dtype", torch.int64)
        return [self.kind, PAYLOAD_TYPES.index(dtype), len(self.payload), self.place]


def pack(message: Message) -> list[torch.Tensor]:
    """Returns the frame, followed by the payload if the frame does not hold it."""
    announced, payload = message.announces, message.payload
    if announced is not None and announced.place == INLINE:
        raise ProtocolError("a message without a payload cannot be announced: nothing of it would arrive")
    next_header = [0] * len(HEADER) if announced is None else announced.header()
    kind, dtype, length, place = message.header()
    numbers = [MAGIC, VERSION, kind, message.session, message.round, dtype, length, place, *next_header]
    if place == INLINE:
        numbers += payload
    frame = torch.tensor([*numbers, *[0] * (FRAME_LENGTH - len(numbers))])
    if place == INLINE:
        return [frame]
    return [frame, torch.as_tensor(payload, device="cpu").contiguous()]


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
    header, next_header, inline = [kind, *numbers[:3]], numbers[3:7], numbers[7:]

    def read(header: list[int], inline: list[int], least: int) -> Message:
        kind, dtype, length, place = read_fields(HEADER, header, "a message").values()
        most = len(inline) if place == INLINE else largest
        if not least <= length <= most:
            raise ProtocolError(f"a message of kind {kind.name} announces {length} elements, not {least} to {most}")
        payload = inline[:length] if place == INLINE else torch.empty(length, dtype=dtype)
        return Message(kind, session, round_, payload)

    message = read(header, inline, 0)
    if any(next_header):
        message.announces = read(next_header, [], 1)
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


def read_rows(numbers: list[int], rows: int, longest: int = LARGEST_PAYLOAD, vocab_size: int = 2**63, last=True):
    """Returns the tokens of each row; if they are not the `last` numbers, also the numbers that follow them."""
    lengths, end = numbers[:rows], rows + sum(numbers[:rows])
    fits = len(lengths) == rows and 0 <= min(lengths) and max(lengths) <= longest and end <= len(numbers)
    if not fits or (last and end < len(numbers)):
        raise ProtocolError(f"{len(numbers)} integers cannot hold {lengths} tokens of each row")
    left = iter(check_tokens(numbers[rows:end], vocab_size))
    tokens = [list(itertools.islice(left, length)) for length in lengths]
    return tokens if last else (tokens, numbers[end:])


def write_outcome(outcome: Outcome, plan: Plan) -> list[int]:
    """Returns the plan, the tokens that the target proposes for each row, and those that each row has gained."""
    tokens = outcome.tokens
    proposed = write_rows(outcome.proposed) if outcome.proposed else [0] * len(tokens)
    return [*write_fields(PLAN, plan), *proposed, *map(len, tokens), *itertools.chain(*tokens)]


def read_outcome(payload, rows: int) -> tuple[Outcome, Plan]:
    plan, numbers = _parts(integers(payload, len(PLAN)), [len(PLAN)])
    proposed, numbers = read_rows(numbers, rows, LONGEST_LOOKAHEAD, last=False)
    return Outcome(read_rows(numbers, rows), proposed if any(proposed) else None), read_plan(plan)


def write_proposals(tokens: list[list[int]], sources: list[str], width: int | None) -> list[int]:
    """
    Returns the tokens that are verified and their sources. If the draft is asked for the tokens that are missing:
    `width`, how many each row is to have, 0 for as many as the draft's plan says.
    """
    return [-1 if width is None else width, *map(RECORD_OF_ROWS["sources"].write, sources), *write_rows(tokens)]


def read_proposals(payload, rows: int) -> tuple[list[list[int]], list[str], int | None]:
    (width,), sources, numbers = _parts(integers(payload, 1 + rows), [1, rows])
    of_row = RECORD_OF_ROWS["sources"]
    if not -1 <= width <= LONGEST_LOOKAHEAD or min(sources) < of_row.first or max(sources) > of_row.last:
        raise ProtocolError(f"proposals cannot have {width} tokens from the sources {sources}")
    tokens = read_rows(numbers, rows, LONGEST_LOOKAHEAD)
    return tokens, list(map(of_row.read, sources)), None if width < 0 else width


def write_speculation(speculation: Speculation) -> list[int]:
    """Returns the draft's part of the record, and the tokens. Probabilities are sent separately."""
    record, tokens = speculation.record, speculation.tokens
    numbers = write_fields(RECORD, record)
    for name, of_row in RECORD_OF_ROWS.items():
        numbers += map(of_row.write, getattr(record, name) or [-1] * len(tokens))
    return numbers + write_rows(tokens)


def read_speculation(payload, rows: int, vocab_size: int = 2**63) -> Speculation:
    parts = [len(RECORD), *[rows] * len(RECORD_OF_ROWS)]
    record, *of_rows, numbers = _parts(integers(payload, sum(parts)), parts)
    record = RoundRecord(**read_fields(RECORD, record, "a speculation"))
    for (name, of_row), values in zip(RECORD_OF_ROWS.items(), of_rows):
        if min(values) < of_row.first or max(values) > of_row.last:
            raise ProtocolError(f"{values} cannot be the {name} of a speculation")
        setattr(record, name, list(map(of_row.read, values)))
    return Speculation(read_rows(numbers, rows, LONGEST_LOOKAHEAD, vocab_size), None, record)


def check_tokens(tokens: list[int], vocab_size: int = 2**63) -> list[int]:
    """Returns the tokens, or raises [`ProtocolError`] if any of them is not in a vocabulary of `vocab_size` tokens."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        raise ProtocolError(f"{min(tokens)} to {max(tokens)} are not tokens of a vocabulary of {vocab_size}")
    return tokens


def integers(payload, at_least: int) -> list[int]:
    """Returns the integers of a payload, which must have at least `at_least` elements."""
    kind = getattr(payload, "dtype", torch.int64)
    if kind != torch.int64 or len(payload) < at_least:
        raise ProtocolError(f"expected {at_least} integers or more, found {len(payload)} of type {kind}")
    return payload if isinstance(payload, list) else payload.tolist()


def _parts(values: list[int], lengths: list[int]) -> list[list[int]]:
    """Returns successive parts of these lengths, and the rest."""
    left = iter(values)
    return [*(list(itertools.islice(left, length)) for length in lengths), list(left)]
