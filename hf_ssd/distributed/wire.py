"""The messages between target and draft. They hold numbers and JSON, never pickles, and are checked here, once.

A message is a frame of 1024 bytes: a header of 9 integers, and JSON, which follows the frame in its own transfer if it
is longer. A message may announce a tensor, which is the next message: the receiver gets ready for it at once, and the
sender need not have it yet.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch

from ..config import LONGEST_LOOKAHEAD, MOST_NODES
from ..rounds import MODES, SOURCES, Outcome, Plan, RoundRecord, Speculation

MAGIC, VERSION = 0x6866_5F73_7364, 30  # "hf_ssd"
HEADER = struct.Struct("9q")  # magic, version, kind, session, round, bytes of JSON; the announced kind, type, length
FRAME_LENGTH = 1024  # bytes
TENSOR_TYPES = (torch.int32, torch.float32, torch.bfloat16, torch.float16)
LARGEST_PAYLOAD = 2**26  # bytes or elements; a header with more is invalid, unless the receiver expects more


class Kind(IntEnum):
    START = 1  # target -> draft: settings and prompts of one generate() call
    OUTCOME = 2  # target -> draft: the plan, the tokens that rows have gained, those that the target proposes next
    FEATURES = 3  # target -> draft, after OUTCOME: hidden states of the target, for a draft that reads them
    SPECULATION = 4  # both ways: tokens and sources; from the draft its part of the record, to it what others propose
    PROBABILITIES = 5  # draft -> target, after SPECULATION: the distributions of its tokens, when sampling
    END = 6  # target -> draft: the call is over
    ERROR = 7  # draft -> target: an exception with its traceback
    VALUES = 8  # rank 0 of the target -> its other ranks
    PROOF = 9  # both ways, before other messages: a nonce, then a proof that the sender knows the shared secret
    JOIN = 10  # target -> draft, before OUTCOME: the next tokens of a row that joins, and with the last its settings


class ProtocolError(RuntimeError):
    """A message that violates the protocol: truncated, foreign, stale or of another version."""


# ---------------------------------------------------------------- fields


@dataclass(frozen=True)
class Field:
    """The encoding of a value as an integer in a range: `write` converts the value to it, and `read` back."""

    first: int = -(2**63)
    last: int = 2**63 - 1
    write: Callable = int
    read: Callable = int


def one_of(values: tuple) -> Field:
    return Field(0, len(values) - 1, values.index, values.__getitem__)


LENGTH, COUNT = Field(0, LONGEST_LOOKAHEAD), Field(0, LARGEST_PAYLOAD)
SECONDS = Field(write=lambda seconds: int(1e9 * seconds), read=lambda number: number / 1e9)

KIND = Field(1, len(Kind), int, Kind)
MESSAGE = {"kind": KIND, "session": Field(), "round": Field(), "length": Field(0)}
ANNOUNCED = {"kind": KIND, "type": one_of(TENSOR_TYPES), "length": Field(1)}
PLAN = {
    "mode": one_of(MODES),
    "lookahead": LENGTH,
    "after_miss": LENGTH,
    "budget": COUNT,
    "fallback": one_of(SOURCES),
    "nodes": Field(0, MOST_NODES),
}
RECORD = {
    "lookahead": LENGTH,
    **dict.fromkeys(("budget", "states", "grown", "passes", "steps"), COUNT),
    **dict.fromkeys(("choose_seconds", "grow_seconds", "answer_seconds", "prepared_at", "answered_at"), SECONDS),
}


def write_fields(fields: dict[str, Field], thing) -> list[int]:
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
    """A message of a session, the number of a generate() call (0: of none), and of a verification round."""

    kind: Kind
    session: int = 0
    round: int = 0
    payload: object = None  # whatever JSON can hold, or the one-dimensional tensor of a message that was announced
    # The next message, of the same session and round. Until its payload is sent by `Channel.send_announced`, only the
    # type and length of it count, so it may be on the device "meta".
    announces: "Message | None" = None


def pack(message: Message) -> list[torch.Tensor]:
    """Returns the frame, followed by the JSON if the frame does not hold it."""
    # Tensors, and what users pass of numpy's, travel as lists.
    text = json.dumps(message.payload, default=lambda array: array.tolist()).encode()
    next_, header = message.announces, [MAGIC, VERSION, message.kind, message.session, message.round, len(text)]
    header += [next_.kind, TENSOR_TYPES.index(next_.payload.dtype), len(next_.payload)] if next_ else [0, 0, 0]
    is_inline = HEADER.size + len(text) <= FRAME_LENGTH
    frame = (HEADER.pack(*header) + (text if is_inline else b"")).ljust(FRAME_LENGTH, b"\0")
    return [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in ([frame] if is_inline else [frame, text])]


def unpack(frame: torch.Tensor, largest: int = LARGEST_PAYLOAD) -> Message:
    """Returns the message of a frame, with new tensors for JSON and for an announced payload that are to follow."""
    data = frame.numpy().tobytes()
    magic, version, *header = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"a message began with {magic:#x} instead of {MAGIC:#x}; it does not come from hf_ssd")
    if version != VERSION:
        raise ProtocolError(f"a message has protocol version {version}, this side speaks version {VERSION}")
    *of_message, length = read_fields(MESSAGE, header[:4], "a message").values()
    message, announced = Message(*of_message), {"length": 0}
    if any(header[4:]):
        announced = read_fields(ANNOUNCED, header[4:], "an announced message")
    is_inline = HEADER.size + length <= FRAME_LENGTH
    if max(0 if is_inline else length, announced["length"]) > largest:
        raise ProtocolError(f"a message of kind {message.kind.name} announces more than {largest} elements")
    if is_inline:
        message.payload = read_json(data[HEADER.size : HEADER.size + length])
    else:
        message.payload = torch.empty(length, dtype=torch.uint8)
    if announced["length"]:
        tensor = torch.empty(announced["length"], dtype=announced["type"])
        message.announces = Message(announced["kind"], message.session, message.round, tensor)
    return message


def read_json(data: bytes):
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message of {len(data)} bytes is not JSON: {error}") from error


def expect(message: Message, kind: Kind, session: int, round_: int) -> None:
    """Raises [`ProtocolError`] if the message is of another kind, session or round."""
    if (message.kind, message.session, message.round) != (kind, session, round_):
        raise ProtocolError(
            f"expected {kind.name} of session {session}, round {round_}; received {message.kind.name} of session "
            f"{message.session}, round {message.round}"
        )


# ---------------------------------------------------------------- the messages of a round


def read_numbers(numbers, most: int, first: int = 0, last: int = 2**63 - 1) -> list[int]:
    """Returns a list of at most `most` integers in this range, or raises [`ProtocolError`]."""
    if type(numbers) is not list or len(numbers) > most:
        raise ProtocolError(f"{numbers!r:.100} is not a list of at most {most}")
    if not all(type(number) is int and first <= number <= last for number in numbers):
        raise ProtocolError(f"{numbers!r:.100} are not numbers from {first} to {last}")
    return numbers


def read_list(values, length: int, of_what: str) -> list:
    if type(values) is not list or len(values) != length:
        raise ProtocolError(f"{values!r:.100} cannot be {of_what}")
    return values


def read_tokens(values, rows: int, longest: int, vocab_size: int = 2**63) -> list[list[int]]:
    return [read_numbers(row, longest, 0, vocab_size - 1) for row in read_list(values, rows, "the tokens of all rows")]


def write_outcome(outcome: Outcome, plan: Plan) -> list:
    return [write_fields(PLAN, plan), outcome.proposed, outcome.tokens]


def read_outcome(values, rows: int) -> tuple[Outcome, Plan]:
    plan, proposed, tokens = read_list(values, 3, "an outcome")
    proposed = None if proposed is None else read_tokens(proposed, rows, LONGEST_LOOKAHEAD)
    return Outcome(read_tokens(tokens, rows, LARGEST_PAYLOAD), proposed), read_plan(plan)


def read_join(values, rows: int, vocab_size: int) -> list:
    """Returns the row, how many of its tokens came before, its next tokens, settings with the last tokens, and seed."""
    row, start, tokens, _, seed = read_list(values, 5, "a row that joins")
    read_numbers(tokens, LARGEST_PAYLOAD, 0, vocab_size - 1)
    read_numbers([row], 1, 0, rows - 1)
    read_numbers([start, seed], 2, 0, 2**31 - 1)
    return values


def write_speculation(speculation: Speculation) -> list:
    record, tokens = speculation.record, speculation.tokens
    sources = [SOURCES.index(source) for source in record.sources]
    siblings = [[number for pair in of_row for number in pair] for of_row in speculation.siblings or ()]
    return [write_fields(RECORD, record), sources, record.ranks or [-1] * len(tokens), tokens, siblings]


def read_speculation(values, rows: int, vocab_size: int = 2**63) -> Speculation:
    numbers, sources, ranks, tokens, siblings = read_list(values, 5, "a speculation")
    record = RoundRecord(**read_fields(RECORD, numbers, "a speculation"))
    sources = read_numbers(read_list(sources, rows, "the sources of a speculation"), rows, 0, len(SOURCES) - 1)
    record.sources = [SOURCES[source] for source in sources]
    record.ranks = read_numbers(read_list(ranks, rows, "the ranks of a speculation"), rows, -1)
    speculation = Speculation(read_tokens(tokens, rows, LONGEST_LOOKAHEAD, vocab_size), None, record)
    if siblings:
        speculation.siblings = [
            read_siblings(of_row, len(trunk), vocab_size)
            for of_row, trunk in zip(read_list(siblings, rows, "the siblings of all rows"), speculation.tokens)
        ]
    return speculation


def read_siblings(numbers, depth: int, vocab_size: int) -> list[tuple[int, int]]:
    """Returns the depth, below that of the row's tokens, and the token of each sibling of a row."""
    depths, tokens = read_numbers(numbers, 2 * MOST_NODES)[::2], numbers[1::2]
    if len(numbers) % 2 or any(number >= depth for number in depths):
        raise ProtocolError(f"{numbers!r:.100} are no siblings of {depth} tokens")
    return list(zip(depths, read_numbers(tokens, MOST_NODES, 0, vocab_size - 1)))


# ---------------------------------------------------------------- tensors


def tensor_of(payload) -> torch.Tensor:
    if not isinstance(payload, torch.Tensor):
        raise ProtocolError(f"{payload!r:.100} is not a tensor")
    return payload


def read_features(payload, tokens: int, width: int) -> torch.Tensor:
    """Returns the hidden states `(tokens, width)` of the target at its new tokens."""
    kind = tensor_of(payload).dtype
    if not kind.is_floating_point or len(payload) != tokens * width:
        raise ProtocolError(f"{len(payload)} numbers of type {kind} are not the {width} features of {tokens} tokens")
    if payload.device.type == "cpu" and not bool(payload.isfinite().all()):
        raise ProtocolError("not all of the features are finite numbers")
    return payload.view(tokens, width)


def write_probabilities(probabilities: torch.FloatTensor, support: int) -> torch.Tensor:
    """Packs distributions `(..., vocab_size)` exactly. At most `support` tokens have any chance in each of them."""
    # They may be on the device "meta", for what is announced.
    if 4 * support > probabilities.shape[-1]:
        return probabilities.float().flatten()
    # A warper truncated them: pairs of value and token are sent, the value's bits as an integer.
    values, tokens = probabilities.float().topk(support, dim=-1)
    return torch.stack([values.view(torch.int32), tokens.int()]).flatten()


def read_probabilities(payload, shape: tuple[int, ...]) -> torch.FloatTensor:
    """Returns the distributions in this shape, whose last dimension is the size of the vocabulary."""
    kind, rows = tensor_of(payload).dtype, torch.Size(shape[:-1]).numel()
    if kind == torch.float32 and payload.numel() == rows * shape[-1]:
        return payload.view(shape)
    if kind != torch.int32 or not rows or len(payload) % (2 * rows):
        raise ProtocolError(f"{len(payload)} numbers of type {kind} are not probabilities of shape {tuple(shape)}")
    values, tokens = payload.view(2, *shape[:-1], -1)
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < shape[-1]:
        raise ProtocolError(f"there are probabilities of tokens that are not in the vocabulary of {shape[-1]}")
    zeros = torch.zeros(shape, dtype=torch.float32)
    return zeros.scatter_(-1, tokens.long(), values.contiguous().view(torch.float32))
