"""The messages between target and draft. They hold numbers and JSON, never pickles, and are checked here, once.

A message is a frame of 128 integers: a header of 12, and up to 116 integers of payload. A larger payload, or a payload
of another type, follows in its own transfer. The header tells its type and length, and whether it follows after the
frame or over the link between two GPUs. A message may announce the next message, of which only the payload follows: the
receiver gets ready for it at once, and the sender need not have it yet.

A new message needs a [`Kind`], a `write_...` and a `read_...` function. A new field of a plan, a record or a call only
needs a line in its table here.
"""

import itertools
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from ..config import LONGEST_LOOKAHEAD
from ..drafting.vocabulary import Translation
from ..rounds import FINISHED, MODES, SOURCES, Outcome, Plan, RoundRecord, Speculation

MAGIC = 0x6866_5F73_7364  # "hf_ssd"
VERSION = 14
HEADER_LENGTH = 12
FRAME_LENGTH = 128
PAYLOAD_TYPES = (torch.int64, torch.int32, torch.float32, torch.uint8, torch.bfloat16, torch.float16)
BEHIND, INLINE, OVER_LINK = range(3)  # place of a payload
LARGEST_PAYLOAD = 2**26  # elements; a header that asks for more is invalid, unless the receiver expects more


class Kind(IntEnum):
    READY = 1  # draft -> target: the worker has loaded its model (JSON)
    START = 2  # target -> draft: settings of one generate() call (JSON); PROMPTS follows
    PROMPTS = 3  # target -> draft: length of each row, then all tokens
    OUTCOME = 4  # target -> draft: the plan, the outcome of the last speculation, and the tokens of each row since
    SPECULATION = 5  # draft -> target: tokens, and the draft's part of the record; target -> draft: the tokens that are
    # verified, if the draft does not decide them alone
    PROBABILITIES = 6  # draft -> target, after SPECULATION: the distributions of its tokens, when sampling
    END = 7  # target -> draft: the call is over; draft -> target, if there is a link: no payload is under way
    STOP = 8  # target -> draft: the worker is no longer needed
    ERROR = 9  # draft -> target: an exception with its traceback (text)
    VALUES = 10  # rank 0 of the target -> its other ranks: values besides outcomes and speculations
    LINK = 11  # target -> draft: open a link between the two GPUs; both then say whether it works (JSON)
    PROOF = 12  # both ways, before other messages: a nonce, then a proof that the sender knows the shared secret
    VOCABULARY = 13  # target -> draft: the translation of the target's tokens, for the calls that follow
    FEATURES = 14  # target -> draft, after OUTCOME: hidden states of the target, for a draft that reads them


class ProtocolError(RuntimeError):
    """A message that violates the protocol: truncated, foreign, stale or of another version."""


# ---------------------------------------------------------------- frames


@dataclass
class Message:
    """
    Args:
        kind (`Kind`): Kind of the message.
        session (`int`): Number of the generate() call that the message belongs to; 0 for none.
        round (`int`): Number of the verification round, from 0.
        payload (`list[int]` or `torch.Tensor`): Integers, or a one-dimensional tensor of a type in `PAYLOAD_TYPES`.
        over_link (`bool`, *optional*): Whether the payload goes from GPU to GPU.
        announces (`Message`, *optional*): The next message, of the same session and round. Its payload is sent by
            [`~hf_ssd.distributed.channel.Channel.send_announced`]. Until then only its type and length count, so it may
            be on the device "meta".
    """

    kind: Kind
    session: int = 0
    round: int = 0
    payload: list[int] | torch.Tensor = field(default_factory=list)
    over_link: bool = False
    announces: "Message | None" = None


def pack(message: Message) -> list[torch.Tensor]:
    """Returns the frame, followed by the payload if the frame does not hold it."""
    payload, dtype, place, inline, behind = message.payload, torch.int64, INLINE, [], []
    if isinstance(payload, torch.Tensor):
        dtype = payload.dtype
    if message.over_link:
        place, behind = OVER_LINK, [payload]
    elif dtype == torch.int64 and len(payload) <= FRAME_LENGTH - HEADER_LENGTH:
        inline = payload if isinstance(payload, list) else payload.tolist()
    else:
        place, behind = BEHIND, [torch.as_tensor(payload, device="cpu")]
    header = [MAGIC, VERSION, message.kind, message.session, message.round]
    header += [PAYLOAD_TYPES.index(dtype), len(payload), place]
    if message.announces is None:
        header += [0] * 4
    else:
        announced = message.announces.payload
        if not len(announced):
            raise ProtocolError("a message without a payload cannot be announced: nothing of it would arrive")
        header += [message.announces.kind, PAYLOAD_TYPES.index(announced.dtype), len(announced)]
        header += [OVER_LINK if message.announces.over_link else BEHIND]
    frame = torch.tensor([*header, *inline, *[0] * (FRAME_LENGTH - HEADER_LENGTH - len(inline))])
    return [frame, *(one.contiguous() for one in behind if len(one))]


def unpack(frame: torch.Tensor, largest: int = LARGEST_PAYLOAD) -> tuple[Message, torch.Tensor | None]:
    """
    Reads a frame, and allocates the payload that follows it.

    Args:
        frame (`torch.LongTensor` of shape `(FRAME_LENGTH,)`): The received frame.
        largest (`int`, *optional*): Elements that a payload may have. A frame that announces more is refused.

    Returns:
        The message, and its empty payload to receive into, or `None` if no payload follows.

    Raises:
        [`ProtocolError`]: the frame is not a valid frame of this protocol.
    """
    numbers = frame.tolist()
    magic, version, kind, session, round_, dtype, length, place, *following = numbers[:HEADER_LENGTH]
    next_kind, next_dtype, next_length, next_place = following
    if magic != MAGIC:
        raise ProtocolError(f"a message began with {magic:#x} instead of {MAGIC:#x}; it does not come from hf_ssd")
    if version != VERSION:
        raise ProtocolError(f"a message has protocol version {version}, this side speaks version {VERSION}")
    room = FRAME_LENGTH - HEADER_LENGTH if place == INLINE else largest
    is_known = {kind, next_kind or kind} <= _KINDS and BEHIND <= place <= OVER_LINK
    is_known = is_known and next_place in (BEHIND, OVER_LINK)
    is_known = is_known and 0 <= min(dtype, next_dtype) <= max(dtype, next_dtype) < len(PAYLOAD_TYPES)
    if not is_known or not 0 <= length <= room or not bool(next_kind) <= next_length <= largest:
        raise ProtocolError(
            f"a message of kind {kind} announces {length} elements of type {dtype}, and announces another of kind "
            f"{next_kind} with {next_length} elements of type {next_dtype}, which cannot be"
        )
    announces = None
    if next_kind:
        empty = torch.empty(next_length, dtype=PAYLOAD_TYPES[next_dtype])
        announces = Message(Kind(next_kind), session, round_, empty, next_place == OVER_LINK)
    if place == INLINE:
        inline = numbers[HEADER_LENGTH : HEADER_LENGTH + length]
        return Message(Kind(kind), session, round_, inline, announces=announces), None
    payload = torch.empty(length, dtype=PAYLOAD_TYPES[dtype])
    return Message(Kind(kind), session, round_, payload, place == OVER_LINK, announces), payload


_KINDS = set(map(int, Kind))


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


# ---------------------------------------------------------------- fields


@dataclass(frozen=True)
class Field:
    """
    The encoding of a value as an integer.

    Args:
        first, last (`int`): The range of valid integers.
        write, read (`Callable`): Convert the value to the integer, and back.
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

PLAN = {
    "mode": one_of(MODES),
    "lookahead": LENGTH,
    "after_miss": LENGTH,
    "budget": COUNT,
    "fallback": one_of(SOURCES),
    "saguaro_c": SHARE,
    "feeds_first": FLAG,
}
RECORD = {
    "mode": one_of(MODES),
    "lookahead": LENGTH,
    **dict.fromkeys(("budget", "grown", "passes", "steps"), COUNT),
    **dict.fromkeys(("choose_seconds", "grow_seconds", "answer_seconds", "prepared_at", "answered_at"), SECONDS),
}
RECORD_OF_ROWS = {"sources": one_of(SOURCES), "ranks": PLACE, "ngram_matches": PLACE}


def write_fields(fields: dict[str, Field], thing) -> list[int]:
    """Returns these attributes of an object as integers."""
    return [kind.write(getattr(thing, name)) for name, kind in fields.items()]


def read_fields(fields: dict[str, Field], numbers: list[int], of_what: str) -> dict:
    """
    Returns the values of the fields by their names.

    Raises:
        [`ProtocolError`]: a number is missing, superfluous, of the wrong type or out of range.
    """
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


# ---------------------------------------------------------------- the messages of a round


def write_outcome(outcome: Outcome, plan: Plan) -> list[int]:
    """
    Returns the plan, and the accepted count and bonus token of each row. If there were later rounds: how many tokens
    each row gained in them, and these tokens.
    """
    later = [] if outcome.later is None else [*map(len, outcome.later), *itertools.chain(*outcome.later)]
    return [*write_fields(PLAN, plan), *outcome.accepted, *outcome.bonus, *later]


def read_outcome(payload, rows: int) -> tuple[Outcome, Plan]:
    numbers, start = integers(payload, len(PLAN) + 2 * rows), len(PLAN)
    plan = read_plan(numbers[:start])
    accepted, bonus, rest = numbers[start:][:rows], numbers[start + rows :][:rows], numbers[start + 2 * rows :]
    if min(accepted) < FINISHED or max(accepted) > LONGEST_LOOKAHEAD:
        raise ProtocolError("an outcome cannot have accepted more tokens than a speculation has")
    check_tokens(bonus)
    if not rest:
        return Outcome(accepted, bonus), plan
    lengths, tokens = rest[:rows], check_tokens(rest[rows:])
    fits = len(lengths) == rows and all(n >= 0 and (not n or k != FINISHED) for n, k in zip(lengths, accepted))
    if not fits or sum(lengths) != len(tokens):
        raise ProtocolError(f"{len(rest)} integers are not the tokens that {rows} rows gained in later rounds")
    return Outcome(accepted, bonus, _parts(tokens, lengths)), plan


def write_speculation(speculation: Speculation) -> list[int]:
    """Returns the draft's part of the record, its profile, and the tokens. Probabilities are sent separately."""
    record, tokens = speculation.record, speculation.tokens
    costs = [-1] * 3 if speculation.costs is None else map(SECONDS.write, speculation.costs)
    by_row = ((of_row.write, getattr(record, name) or [-1] * len(tokens)) for name, of_row in RECORD_OF_ROWS.items())
    of_rows = itertools.chain.from_iterable(map(write, values) for write, values in by_row)
    return [*write_fields(RECORD, record), *costs, *of_rows, *map(len, tokens), *itertools.chain(*tokens)]


def read_speculation(payload, rows: int, vocab_size: int = 2**63) -> Speculation:
    start = len(RECORD) + 3
    numbers = integers(payload, start + (len(RECORD_OF_ROWS) + 1) * rows)
    record = RoundRecord(**read_fields(RECORD, numbers[: len(RECORD)], "a speculation"))
    costs = [SECONDS.read(number) for number in numbers[len(RECORD) : start]]
    for name, of_row in RECORD_OF_ROWS.items():
        values, start = numbers[start : start + rows], start + rows
        if min(values) < of_row.first or max(values) > of_row.last:
            raise ProtocolError(f"{values} cannot be the {name} of a speculation")
        setattr(record, name, list(map(of_row.read, values)))
    lengths, tokens = numbers[start : start + rows], check_tokens(numbers[start + rows :], vocab_size)
    if min(lengths) < 0 or max(lengths) > LONGEST_LOOKAHEAD or sum(lengths) != len(tokens):
        raise ProtocolError(f"a speculation of {len(tokens)} tokens cannot have {lengths} of each row")
    return Speculation(_parts(tokens, lengths), None, record, None if costs[0] < 0 else tuple(costs))


def check_tokens(tokens: list[int], vocab_size: int = 2**63) -> list[int]:
    """
    Returns the tokens.

    Raises:
        [`ProtocolError`]: a token is negative, or not in a vocabulary of `vocab_size` tokens.
    """
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        raise ProtocolError(f"{min(tokens)} to {max(tokens)} are not tokens of a vocabulary of {vocab_size}")
    return tokens


def integers(payload, at_least: int) -> list[int]:
    """Returns the integers of a payload, which must have at least `at_least` elements."""
    is_tensor = isinstance(payload, torch.Tensor)
    if (is_tensor and payload.dtype != torch.int64) or len(payload) < at_least:
        kind = payload.dtype if is_tensor else torch.int64
        raise ProtocolError(f"expected {at_least} integers or more, found {len(payload)} of type {kind}")
    return payload.tolist() if is_tensor else payload


def _parts(values: list, lengths: list[int]) -> list[list]:
    left = iter(values)
    return [list(itertools.islice(left, length)) for length in lengths]


def read_features(payload, tokens: int, width: int) -> torch.Tensor:
    """
    Returns the hidden states `(tokens, width)` of the target at its new tokens.

    Raises:
        [`ProtocolError`]: there are more or fewer numbers, they are of another type, or not all are finite.
    """
    kind = getattr(payload, "dtype", torch.int64)
    if not kind.is_floating_point or len(payload) != tokens * width:
        raise ProtocolError(f"{len(payload)} numbers of type {kind} are not the {width} features of {tokens} tokens")
    if payload.device.type == "cpu" and not bool(payload.isfinite().all()):
        raise ProtocolError("not all of the features are finite numbers")
    return payload.view(tokens, width)


# ---------------------------------------------------------------- the other messages


def write_text(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.uint8)


def read_text(payload) -> str:
    """Returns the text. Invalid UTF-8 is replaced, because the text is for people."""
    return _bytes(payload).decode("utf-8", errors="replace")


def write_json(value) -> torch.Tensor:
    return write_text(json.dumps(value))


def read_json(payload):
    try:
        return json.loads(_bytes(payload).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message of {len(payload)} bytes is not JSON: {error}") from error


def _bytes(payload) -> bytes:
    if not len(payload):
        return b""
    if getattr(payload, "dtype", torch.int64) != torch.uint8:
        raise ProtocolError(f"{len(payload)} numbers of type {getattr(payload, 'dtype', torch.int64)} are not a text")
    return payload.numpy().tobytes()


def write_prompts(prompts: list[torch.LongTensor]) -> torch.Tensor:
    """Returns the number of prompts, their lengths, and their tokens."""
    lengths = torch.tensor([len(prompts), *map(len, prompts)])
    return torch.cat([lengths, *(prompt.cpu().long() for prompt in prompts)])


def read_prompts(payload) -> list[torch.LongTensor]:
    count, *rest = integers(payload, 1)
    lengths, tokens = rest[: max(0, count)], rest[max(0, count) :]
    if count < 1 or len(lengths) != count or min(lengths) < 1 or sum(lengths) != len(tokens):
        raise ProtocolError(f"a message of {len(payload)} integers does not hold the {count} prompts it announces")
    return list(torch.tensor(check_tokens(tokens)).split(lengths))


def read_translation(payload, draft_size: int) -> Translation:
    """Returns the translation into a vocabulary of `draft_size` tokens."""
    try:
        return Translation.from_tensor(torch.tensor(integers(payload, 1)), draft_size)
    except (ValueError, RuntimeError) as error:
        raise ProtocolError(f"a message is no translation: {error}") from error


# ---------------------------------------------------------------- distributions


def largest_support(probabilities: torch.FloatTensor) -> torch.LongTensor:
    """Returns, on the device, the most tokens that have any chance in one of the distributions `(..., vocab_size)`."""
    return (probabilities != 0).sum(-1).max()  # NaN counts too, so that it is sent as it is


def write_probabilities(probabilities: torch.FloatTensor, support: int | None = None) -> torch.Tensor:
    """
    Packs distributions `(..., vocab_size)` exactly. If a warper truncated them, so that at most a quarter of the
    vocabulary has any chance, only those tokens are sent: as pairs of value and token, the value's bits as an integer.

    Args:
        probabilities (`torch.FloatTensor` of shape `(..., vocab_size)`): The distributions.
        support (`int`, *optional*): Their [`largest_support`] or more, or the size of the vocabulary to send all of it.
            By default [`largest_support`] is computed, which waits for the device.
    """
    support = int(largest_support(probabilities)) if support is None else support
    if _all_travel(support, probabilities.shape[-1]):
        return probabilities.float().flatten()
    values, tokens = probabilities.float().topk(support, dim=-1)
    return torch.stack([values.view(torch.int32), tokens.int()]).flatten()


def probabilities_to_come(shape: tuple[int, ...], support: int) -> torch.Tensor:
    """Returns a tensor on "meta" of the type and length that [`write_probabilities`] will return, to announce it."""
    count, vocab_size = torch.Size(shape[:-1]).numel(), shape[-1]
    if _all_travel(support, vocab_size):
        return torch.empty(count * vocab_size, dtype=torch.float32, device="meta")
    return torch.empty(2 * count * support, dtype=torch.int32, device="meta")


def _all_travel(support: int, vocab_size: int) -> bool:
    return support * 4 > vocab_size


def read_probabilities(payload, shape: tuple[int, ...]) -> torch.FloatTensor:
    """Returns the distributions in this shape, whose last dimension is the size of the vocabulary."""
    kind, rows = getattr(payload, "dtype", torch.int64), torch.Size(shape[:-1]).numel()
    if kind == torch.float32 and payload.numel() == rows * shape[-1]:
        return payload.view(shape)
    if kind != torch.int32 or not rows or len(payload) % (2 * rows):
        raise ProtocolError(f"{len(payload)} numbers of type {kind} are not probabilities of shape {tuple(shape)}")
    values, tokens = payload.view(2, *shape[:-1], -1)
    if payload.device.type != "cpu":  # a check would wait for the GPU, and a token too large would fail on it
        tokens = tokens.clamp(0, shape[-1] - 1)
    elif tokens.numel() and not 0 <= tokens.min() <= tokens.max() < shape[-1]:
        raise ProtocolError(f"there are probabilities of tokens that are not in the vocabulary of {shape[-1]}")
    zeros = torch.zeros(shape, dtype=torch.float32, device=payload.device)
    return zeros.scatter_(-1, tokens.long(), values.contiguous().view(torch.float32))
