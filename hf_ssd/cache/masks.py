"""Which columns a new token (a *query*) sees: boolean `(batch_size, queries, columns)`, until `additive` is called."""

import torch

ALIGNMENT = 8  # elements; CUDA kernels copy a mask in every layer unless its rows begin at multiples of this


def visible_up_to(last_columns: torch.LongTensor, width: int, valid: torch.BoolTensor | None = None):
    """Lets each query see all of `width` columns up to its last column `(batch_size, queries)`, but no padding."""
    allowed = torch.arange(width, device=last_columns.device) <= last_columns[:, :, None]
    if valid is not None:  # of the first columns, (batch_size, columns)
        known = min(valid.shape[1], width)
        allowed[:, :, :known] &= valid[:, None, :known]
        # A query that is padding sees itself: a softmax over no columns would give NaN.
        allowed.scatter_(2, last_columns[:, :, None], True)
    return allowed


def within_window(allowed: torch.BoolTensor, query_positions, key_positions, window: int) -> torch.BoolTensor:
    """Keeps only the columns less than `window` positions back, as sliding-window layers do."""
    return allowed & (query_positions[:, :, None] - key_positions < window)


def within_chunk(allowed: torch.BoolTensor, query_positions, key_positions, size: int) -> torch.BoolTensor:
    """Keeps only the columns of the query's own chunk of `size` positions, as layers with chunked attention do."""
    return allowed & (query_positions[:, :, None] // size == key_positions // size)


def chains(count: int, length: int, device: torch.device) -> torch.BoolTensor:
    """Lets each token of several chains, laid end to end, see itself and the tokens before it in its chain."""
    place = torch.arange(count * length, device=device)
    chain = place.div(length, rounding_mode="floor")
    return (chain[:, None] == chain) & (place[:, None] >= place)


def additive(allowed: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the mask of shape `(batch_size, 1, queries, columns)` that is added to attention scores."""
    mask = aligned(allowed.shape, dtype, allowed.device).fill_(torch.finfo(dtype).min)
    return mask.masked_fill_(allowed, 0).unsqueeze(1)


def for_groups(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeats a mask of shape `(batch_size, 1, queries, columns)` for queries into which `groups` heads are folded."""
    rows, _, queries, width = mask.shape
    repeated = aligned((rows, groups, queries, width), mask.dtype, mask.device).copy_(mask)
    return repeated.view(rows, 1, groups * queries, width)


def aligned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns an uninitialized tensor whose rows begin at multiples of `ALIGNMENT` elements."""
    width = shape[-1]
    return torch.empty(*shape[:-1], -(-width // ALIGNMENT) * ALIGNMENT, dtype=dtype, device=device)[..., :width]
