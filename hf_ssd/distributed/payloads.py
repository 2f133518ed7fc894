"""The payloads that are no fields: texts, hidden states and distributions."""

import json

import torch

from .wire import ProtocolError


def write_text(text: str) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else empty


def read_text(payload, errors: str = "replace") -> str:
    """Returns the text. Invalid UTF-8 is replaced by default, because the text is for people."""
    if len(payload) and getattr(payload, "dtype", torch.int64) != torch.uint8:
        raise ProtocolError(f"{len(payload)} numbers of type {getattr(payload, 'dtype', torch.int64)} are not a text")
    return (payload.numpy().tobytes() if len(payload) else b"").decode(errors=errors)


def write_json(value) -> torch.Tensor:
    return write_text(json.dumps(value))


def read_json(payload):
    try:
        return json.loads(read_text(payload, "strict"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message of {len(payload)} bytes is not JSON: {error}") from error


def read_features(payload, tokens: int, width: int) -> torch.Tensor:
    """Returns the hidden states `(tokens, width)` of the target at its new tokens."""
    kind = getattr(payload, "dtype", torch.int64)
    if not kind.is_floating_point or len(payload) != tokens * width:
        raise ProtocolError(f"{len(payload)} numbers of type {kind} are not the {width} features of {tokens} tokens")
    if payload.device.type == "cpu" and not bool(payload.isfinite().all()):
        raise ProtocolError("not all of the features are finite numbers")
    return payload.view(tokens, width)


# ---------------------------------------------------------------- distributions


def largest_support(probabilities: torch.FloatTensor) -> torch.LongTensor:
    """Returns, on the device, the most tokens that have any chance in one of the distributions `(..., vocab_size)`."""
    return (probabilities != 0).sum(-1).max()  # NaN counts too, so that it is sent as it is


def write_probabilities(probabilities: torch.FloatTensor, support: int | None = None) -> torch.Tensor:
    """
    Packs distributions `(..., vocab_size)` exactly. If a warper truncated them, so that at most a quarter of the
    vocabulary has any chance, only those tokens are sent: as pairs of value and token, the value's bits as an integer.
    `support` is their [`largest_support`] or more; by default it is computed, which waits for the device.
    """
    support = int(largest_support(probabilities)) if support is None else support
    if _all_travel(support, probabilities.shape[-1]):
        return probabilities.float().flatten()
    values, tokens = probabilities.float().topk(support, dim=-1)
    return torch.stack([values.view(torch.int32), tokens.int()]).flatten()


def probabilities_to_come(shape: tuple[int, ...], support: int) -> torch.Tensor:
    """Returns a tensor on "meta" of the type and length that [`write_probabilities`] will return, to announce it."""
    *shape, vocab_size = shape
    if _all_travel(support, vocab_size):
        return torch.empty(*shape, vocab_size, dtype=torch.float32, device="meta").flatten()
    return torch.empty(2, *shape, support, dtype=torch.int32, device="meta").flatten()


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
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < shape[-1]:
        raise ProtocolError(f"there are probabilities of tokens that are not in the vocabulary of {shape[-1]}")
    zeros = torch.zeros(shape, dtype=torch.float32)
    return zeros.scatter_(-1, tokens.long(), values.contiguous().view(torch.float32))
