"""What travels between target and draft: frames, and what is behind them. See [`payloads`] for what is in them.

A message is one frame of 128 integers: a header of 12, and up to 116 integers of payload. A larger payload, or one of
another type, follows in a transfer of its own, whose type and length the header tells, and whether it follows behind
the frame or over the link between two GPUs. A message may announce the next one, of which only the payload follows: the
receiver gets ready for it at once, and the sender need not have it yet.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import torch

MAGIC = 0x6866_5F73_7364  # "hf_ssd"
VERSION = 12
HEADER_LENGTH = 12
FRAME_LENGTH = 128
PAYLOAD_TYPES = (torch.int64, torch.int32, torch.float32, torch.uint8)
BEHIND, INLINE, OVER_LINK = range(3)  # where a payload is
LARGEST_PAYLOAD = 2**26  # elements; a header that asks for more is not one of ours, unless more is expected


class Kind(IntEnum):
    READY = 1  # draft -> target: the worker has loaded its model (JSON)
    START = 2  # target -> draft: settings of one generate() call (JSON); PROMPTS follows
    PROMPTS = 3  # target -> draft: length of each row, then all tokens
    OUTCOME = 4  # target -> draft: the plan, the outcome of the last speculation, and the tokens of each row since
    SPECULATION = 5  # draft -> target: tokens, and the draft's part of the record; target -> draft: what is verified,
    # where the draft does not decide that alone
    PROBABILITIES = 6  # behind SPECULATION: what the tokens were drawn from, when sampling
    END = 7  # target -> draft: the call is over; draft -> target, over a link: nothing is on its way any more
    STOP = 8  # target -> draft: the worker is no longer needed
    ERROR = 9  # draft -> target: an exception with its traceback (text)
    VALUES = 10  # rank 0 of the target -> its other ranks: something besides outcomes and speculations
    LINK = 11  # target -> draft: open a link between the two GPUs; both then say whether it works (JSON)
    VOCABULARY = 13  # target -> draft: what each of the target's tokens is in the draft's, for the calls that follow
    PROOF = 12  # both ways, first of all: a nonce, and then what shows that the sender knows the secret of the two


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
        over_link (`bool`, *optional*): Whether the payload goes from GPU to GPU.
        announces (`Message`, *optional*): The next message, of the same session and round. Its payload follows by
            [`~hf_ssd.distributed.channel.Channel.send_announced`]; until then it tells type and length only, so it may
            be on the device "meta".
    """

    kind: Kind
    session: int = 0
    round: int = 0
    payload: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    over_link: bool = False
    announces: "Message | None" = None


def pack(message: Message) -> list[torch.Tensor]:
    """Returns the frame, and behind it the payload if the frame does not hold it."""
    payload = message.payload
    if message.over_link:
        place = OVER_LINK
    else:
        fits = payload.dtype == torch.int64 and len(payload) <= FRAME_LENGTH - HEADER_LENGTH
        place, payload = INLINE if fits else BEHIND, payload.cpu()
    header = [MAGIC, VERSION, message.kind, message.session, message.round]
    header += [PAYLOAD_TYPES.index(payload.dtype), len(payload), place]
    behind = [payload] if place != INLINE and len(payload) else []
    if message.announces is not None:
        if not len(message.announces.payload):
            raise ProtocolError("a message without a payload cannot be announced: nothing of it would arrive")
        announced = message.announces.payload
        header += [message.announces.kind, PAYLOAD_TYPES.index(announced.dtype), len(announced)]
        header += [OVER_LINK if message.announces.over_link else BEHIND]
    frame = torch.zeros(FRAME_LENGTH, dtype=torch.int64)
    frame[: len(header)] = torch.tensor(header)
    if place == INLINE:
        frame[HEADER_LENGTH : HEADER_LENGTH + len(payload)] = payload
    return [frame, *(one.contiguous() for one in behind)]


def unpack(frame: torch.Tensor, largest: int = LARGEST_PAYLOAD) -> tuple[Message, torch.Tensor | None]:
    """
    Reads a frame, and makes room for what is to follow.

    Args:
        frame (`torch.LongTensor` of shape `(FRAME_LENGTH,)`): What came.
        largest (`int`, *optional*): Elements that may follow. A frame that announces more is refused.

    Returns:
        The message, and `None` or its empty payload, which is to be received into.

    Raises:
        [`ProtocolError`]: the frame is not one of ours.
    """
    header = frame[:HEADER_LENGTH].tolist()
    magic, version, kind, session, round_, dtype, length, place, *following = header
    next_kind, next_dtype, next_length, next_place = following
    if magic != MAGIC:
        raise ProtocolError(f"a message began with {magic:#x} instead of {MAGIC:#x}; it does not come from hf_ssd")
    if version != VERSION:
        raise ProtocolError(f"a message has protocol version {version}, this side speaks version {VERSION}")
    room = FRAME_LENGTH - HEADER_LENGTH if place == INLINE else largest
    is_known = {kind, next_kind or kind} <= set(Kind) and BEHIND <= place <= OVER_LINK
    is_known = is_known and next_place in (BEHIND, OVER_LINK)
    is_known = is_known and all(0 <= one < len(PAYLOAD_TYPES) for one in (dtype, next_dtype))
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
        inline = frame[HEADER_LENGTH : HEADER_LENGTH + length]
        return Message(Kind(kind), session, round_, inline, announces=announces), None
    payload = torch.empty(length, dtype=PAYLOAD_TYPES[dtype])
    return Message(Kind(kind), session, round_, payload, place == OVER_LINK, announces), payload


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
