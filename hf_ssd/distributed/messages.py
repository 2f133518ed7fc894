"""What travels between target and draft: frames, and what is behind them. See [`payloads`] for what is in them.

A message is one frame of 128 integers: a header of 11, and up to 117 integers of payload. A larger payload, or one of
another type, follows in a transfer of its own, whose type and length the header tells, and whether it follows behind
the frame or over the link between two GPUs. A message may announce the next one, of which only the payload follows, so
that it can arrive while no one looks.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import torch

MAGIC = 0x6866_5F73_7364  # "hf_ssd"
VERSION = 9
HEADER_LENGTH = 11
FRAME_LENGTH = 128
PAYLOAD_TYPES = (torch.int64, torch.int32, torch.float32, torch.uint8)
BEHIND, INLINE, OVER_LINK = range(3)  # where a payload is
ROUNDS_BETWEEN_NEWS = 16  # in which a draft is not asked
LARGEST_PAYLOAD = 2**34  # elements; a header that asks for more is not one of ours


class Kind(IntEnum):
    READY = 1  # draft -> target: the worker has loaded its model (JSON)
    START = 2  # target -> draft: settings of one generate() call (JSON); PROMPTS follows
    PROMPTS = 3  # target -> draft: length of each row, then all tokens
    OUTCOME = 4  # target -> draft: accepted count and bonus token of each row, and how long verification took; after a
    # rest, one behind the other, those of all rounds that the draft was not asked in
    SPECULATION = 5  # draft -> target: hits, tokens, and how long drafting took
    PROBABILITIES = 6  # behind SPECULATION or BACKUP: what the tokens were drawn from, when sampling
    END = 7  # target -> draft: the call is over, and the outcomes of rounds at its end that the draft was not asked in;
    # draft -> target, over a link: nothing is on its way any more
    STOP = 8  # target -> draft: the worker is no longer needed
    ERROR = 9  # draft -> target: an exception with its traceback (text)
    BACKUP_REQUEST = 10  # draft -> target: rows that the user's own fallback is to propose tokens for
    BACKUP = 11  # target -> draft: those tokens
    FOUND = 12  # one of several drafts -> target: what it has prepared for the outcome, and its plan
    COMPLETE = 13  # target -> one of several drafts: what all have prepared; draft what is missing
    COMPLETED = 14  # its answer
    FOLLOW = 15  # target -> the others: what is verified now, and which of their rows are in it
    VALUES = 16  # rank 0 of the target -> its other ranks: something besides outcomes and speculations
    LINK = 17  # target -> draft: open a link between the two GPUs; both then say whether it works (JSON)
    NEWS = 18  # target -> draft: the outcomes of some rounds that the draft was not asked in; there is no answer


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
        announces (`Message`, *optional*): The next message, of the same session and round, which is sent together with
            this one. On the receiving side its payload has yet to arrive.
    """

    kind: Kind
    session: int = 0
    round: int = 0
    payload: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    over_link: bool = False
    announces: "Message | None" = None


def pack(message: Message) -> list[torch.Tensor]:
    """Returns the frame, behind it the payload if the frame does not hold it, and that of the announced message."""
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
        announced = message.announces.payload.cpu()
        header += [message.announces.kind, PAYLOAD_TYPES.index(announced.dtype), len(announced)]
        behind.append(announced)
    frame = torch.zeros(FRAME_LENGTH, dtype=torch.int64)
    frame[: len(header)] = torch.tensor(header)
    if place == INLINE:
        frame[HEADER_LENGTH : HEADER_LENGTH + len(payload)] = payload
    return [frame, *(one.contiguous() for one in behind)]


def unpack(frame: torch.Tensor) -> tuple[Message, torch.Tensor | None]:
    """
    Reads a frame.

    Returns:
        The message, and `None` or its empty payload, which is to be received into.

    Raises:
        [`ProtocolError`]: the frame is not one of ours.
    """
    header = frame[:HEADER_LENGTH].tolist()
    magic, version, kind, session, round_, dtype, length, place, next_kind, next_dtype, next_length = header
    if magic != MAGIC:
        raise ProtocolError(f"a message began with {magic:#x} instead of {MAGIC:#x}; it does not come from hf_ssd")
    if version != VERSION:
        raise ProtocolError(f"a message has protocol version {version}, this side speaks version {VERSION}")
    room = FRAME_LENGTH - HEADER_LENGTH if place == INLINE else LARGEST_PAYLOAD
    is_known = {kind, next_kind or kind} <= set(Kind) and BEHIND <= place <= OVER_LINK
    is_known = is_known and all(0 <= one < len(PAYLOAD_TYPES) for one in (dtype, next_dtype))
    if not is_known or not 0 <= length <= room or not bool(next_kind) <= next_length <= LARGEST_PAYLOAD:
        raise ProtocolError(
            f"a message of kind {kind} announces {length} elements of type {dtype}, and announces another of kind "
            f"{next_kind} with {next_length} elements of type {next_dtype}, which cannot be"
        )
    announces = None
    if next_kind:
        announces = Message(Kind(next_kind), session, round_, torch.empty(next_length, dtype=PAYLOAD_TYPES[next_dtype]))
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
