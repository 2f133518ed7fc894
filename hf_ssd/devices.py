"""What the library asks of a device, whatever kind of accelerator it is."""

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)


def of_model(model: PreTrainedModel) -> torch.device:
    """Returns where a model computes what its embeddings give, also if its weights are kept elsewhere meanwhile."""
    if model.device.type != "meta":
        return model.device
    place = model.get_input_embeddings()._hf_hook.execution_device
    if isinstance(place, int):
        return torch.device(torch.accelerator.current_accelerator().type, place)
    return torch.device(place)


def identity(device: torch.device) -> str | None:
    """
    Returns what tells one accelerator from all others of the machine, also in a process that sees them under other
    numbers; `None` for the CPU.
    """
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"{device.type}:{device.index or 0}"


def synchronize(device: torch.device) -> None:
    """
    Waits until what was queued is computed. On CUDA only in the current stream: what a link sends in another one may
    wait for the target.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


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


def to_host(*tensors: torch.LongTensor) -> list[torch.LongTensor]:
    """Brings integers to the host in one transfer, so that it waits for the device once."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    flat = torch.cat([tensor.flatten().long() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in double precision."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def accelerators() -> list[torch.device]:
    """Returns the GPUs, or what else the machine has of that kind."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator().type
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def name(device: torch.device) -> str:
    """Returns what the maker calls an accelerator, if torch knows."""
    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else str(device)


def spare_accelerator() -> torch.device | None:
    """
    Returns the last accelerator on which this process holds no tensors; `None` where there is only the CPU. If it holds
    some on each, there is a warning, and it is the last one.
    """
    all_of_them = accelerators()
    unused = [device for device in all_of_them if not torch.accelerator.memory_allocated(device.index)]
    if all_of_them and not unused:
        warn_of_sharing(all_of_them[-1])
    return (unused or all_of_them or [None])[-1]


def warn_of_sharing(device: torch.device) -> None:
    """Says once what it costs that target and draft are on one device."""
    logger.warning_once(
        f"The draft shares {device} with the target. Each of its passes there takes time from a verification, so this "
        "can be slower than drafting in turn (`SSDConfig(asynchronous=False)`); give the draft a device of its own, as "
        'in hf_ssd.launch_draft(draft, device="cuda:1").'
    )
