"""Two ends of a channel prove to each other that they know a secret, before anything else is said.

gloo's connections ask nobody who they are: whoever connects to a listening port first, and names the right number, is
taken for the peer. The address that a process itself connects to comes from a store that only the two can write, so a
stranger can take the peer's place at a port that listens, but cannot stand in the middle: of each pair of connected
processes one connects to the other's true address, and never to the stranger. Each side therefore sends a fresh nonce
over the direction in which it sends, and then the HMAC of both nonces, which the other can only have from the direction
in which it receives. A proof that fits says that the process which knows the secret is at the far end of both.

Without a secret (under torchrun, see [`~hf_ssd.distributed.supervisor`]) the same is said with an empty one, and proves
nothing.
"""

import hmac
import secrets
import time

import torch

from .messages import LARGEST_PAYLOAD, Kind, Message, ProtocolError

PROOF_TIMEOUT = 20.0  # seconds for the other side to prove itself, once both are connected
NONCE_LENGTH = 32  # bytes, as an HMAC-SHA256 has
SENDERS = ("target to draft", "draft to target")  # by rank


def prove(channel) -> None:
    """
    Args:
        channel ([`Channel`]): One end, just connected. The other end does the same.

    Raises:
        [`~hf_ssd.distributed.messages.ProtocolError`]: the other side does not know the secret, or does not say so in
            time, or has gone.
    """
    deadline, own = time.monotonic() + PROOF_TIMEOUT, secrets.token_bytes(NONCE_LENGTH)
    channel.largest = 0  # until it is known who is there, nothing is made room for
    try:
        _send(channel, 0, own)
        theirs = _receive(channel, 0, deadline)
        _send(channel, 1, _digest(channel.secret, channel.rank, own, theirs))
        answer = _receive(channel, 1, deadline)
    except (TimeoutError, ConnectionError) as error:
        raise ProtocolError(f"what has connected did not prove that it is the other side: {error}") from error
    if not hmac.compare_digest(answer, _digest(channel.secret, 1 - channel.rank, theirs, own)):
        raise ProtocolError("what has connected does not know the secret of this worker and its target")
    channel.largest = LARGEST_PAYLOAD


def link_trial(secret: bytes) -> torch.FloatTensor:
    """Returns the numbers that a draft sends first over a link between two GPUs, which only it and its target know."""
    return torch.tensor(list(hmac.digest(secret, b"hf_ssd link", "sha256")), dtype=torch.float32)


def _digest(secret: bytes, sender: int, own: bytes, theirs: bytes) -> bytes:
    return hmac.digest(secret, b"hf_ssd " + SENDERS[sender].encode() + own + theirs, "sha256")


def _send(channel, step: int, value: bytes) -> None:
    channel.send(Message(Kind.PROOF, 0, step, torch.tensor(list(value))))


def _receive(channel, step: int, deadline: float) -> bytes:
    message = channel.receive(max(0.0, deadline - time.monotonic()))
    values = message.payload.tolist()
    if (message.kind, message.session, message.round, len(values)) != (Kind.PROOF, 0, step, NONCE_LENGTH):
        raise ProtocolError(f"expected a proof, received {message.kind.name} with {len(values)} elements")
    if not all(value in range(256) for value in values):
        raise ProtocolError("a proof is not made of bytes")
    return bytes(values)
