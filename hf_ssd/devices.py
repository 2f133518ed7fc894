"""Functions for every kind of accelerator: identity, memory, and copies that do not block the host."""

import contextlib
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

PROCESSES = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
# By the name in /proc/self/cgroup: the folder, and the files with the limit, the bytes in use, and those of files.
FILES_OF_GROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}

logger = logging.get_logger(__name__)


def of_model(model: PreTrainedModel) -> torch.device:
    """Returns the device that computes a model's embeddings, also if accelerate keeps the weights elsewhere."""
    if model.device.type != "meta":
        return model.device
    place = model.get_input_embeddings()._hf_hook.execution_device
    if isinstance(place, int):
        return torch.device(torch.accelerator.current_accelerator().type, place)
    return torch.device(place)


def identity(device: torch.device) -> str | None:
    """Returns a name of an accelerator that holds in every process of the machine; `None` for the CPU."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"{device.type}:{device.index or 0}"


def from_host(values, device: torch.device) -> torch.Tensor:
    """Returns values as a tensor on a device. The host does not wait for a GPU, as it does with `.to(device)`."""
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values)
        values = values if values.numel() else values.long()  # torch takes an empty list for floats
    if values.device.type != "cpu" or device.type != "cuda":
        return values.to(device)
    # Only copies from pinned memory are asynchronous. torch keeps that memory until the copy is done.
    return values.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: torch.LongTensor) -> list[torch.LongTensor]:
    """Copies integers to the host in a single transfer, so that the host waits for the device once."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    flat = torch.cat([tensor.flatten().long() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


class HostCopy:
    """A copy of integers on the host. On CUDA it arrives while the host goes on."""

    def __init__(self, *tensors: torch.LongTensor):
        self.shapes, self.event = [tensor.shape for tensor in tensors], None
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.flat = flat.to("cpu", non_blocking=flat.device.type == "cuda")  # which is pinned memory on CUDA
        if flat.device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(flat.device))

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()

    def lists(self) -> list[list]:
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape).tolist() for part, shape in zip(parts, self.shapes)]


def free_memory(device: torch.device) -> int | None:
    """Returns the bytes that new tensors on a device may take, if it is known. A container may have less memory."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = (PROCESSES / "meminfo").read_text().splitlines()
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return min([1024 * int(kilobytes), *_free_in_groups()]) if device.type == "cpu" else None


def _free_in_groups() -> list[int]:
    """Returns the bytes that each control group of this process, version 1 or 2, has left. Files in memory can go."""
    found: list[int] = []
    try:
        lines = (PROCESSES / "self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for kinds, name in (line.split(":", 2)[1:] for line in lines):
        folder, limit, used, files = FILES_OF_GROUPS.get(kinds, (None,) * 4)
        path = GROUPS if folder is None else GROUPS / folder / name.lstrip("/")
        groups = [] if folder is None else [one for one in (path, *path.parents) if one.is_relative_to(GROUPS)]
        for group in groups:
            with contextlib.suppress(OSError, ValueError):  # no such group, or "max", which is no limit
                counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                in_use = int((group / used).read_text()) - int(counts.get(files, 0))
                found.append(int((group / limit).read_text()) - in_use)
    return found


def multiplies_in_float32(device: torch.device) -> bool:
    """Whether a device multiplies float32 matrices in float32. A user may have set less by functions of torch."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("none", "ieee")


def has_float64(device: torch.device) -> bool:
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def accelerators() -> list[torch.device]:
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator().type
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def existing(name: str | torch.device) -> torch.device:
    """Returns a device by its name, or raises `ValueError` if the machine has no such device."""
    here = [torch.device("cpu"), *accelerators()]
    try:
        device = torch.device(name)
    except RuntimeError:  # not the name of a device
        device = None
    if device is not None and any(device.type == one.type and device.index in (None, one.index or 0) for one in here):
        return device
    raise ValueError(f"This machine has no device {str(name)!r}, only {', '.join(map(str, here))}.")


def name(device: torch.device) -> str:
    """Returns the product name of an accelerator, if torch knows it."""
    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else str(device)


def spare_accelerator() -> torch.device | None:
    """Returns the last accelerator, if there is any, preferably without tensors of this process."""
    found = accelerators()
    unused = [device for device in found if not torch.accelerator.memory_allocated(device.index)]
    if found and not unused:
        warn_of_sharing(found[-1])
    return (unused or found or [None])[-1]


def warn_of_sharing(device: torch.device) -> None:
    """Warns once that target and draft slow each other down on the same device."""
    logger.warning_once(
        f"The draft shares {device} with the target. Each of its passes there takes time from a verification, so this "
        "can be slower than drafting in turn (`SSDConfig(asynchronous=False)`); give the draft a device of its own, as "
        'in hf_ssd.launch_draft(draft, device="cuda:1").'
    )
