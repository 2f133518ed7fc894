"""Numbers of the host on the model's device."""

import torch


def from_host(values, device: torch.device) -> torch.Tensor:
    """
    Copies values to a device. `torch.tensor(values, device=...)`, `.to(device)` and an index that is a list or a tensor
    of the host wait until a GPU has done all that it was given before; this does not. What is computed from the copy
    comes after it all the same.

    Args:
        values (`torch.Tensor` or nested `list`): Usually on the host. What is on the device already is returned as it
            is.
        device (`torch.device`): Where they are needed.

    Returns:
        `torch.Tensor`.
    """
    is_there = isinstance(values, torch.Tensor) and values.device.type != "cpu"
    if is_there or device.type != "cuda":
        return torch.as_tensor(values, device=device)
    # Only from pinned memory does a copy go on by itself. torch keeps that memory until the copy is done.
    return torch.as_tensor(values).pin_memory().to(device, non_blocking=True)
