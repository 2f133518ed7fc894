"""What there is to measure on: who gets which device, and what the figures were made with."""

import subprocess
from dataclasses import dataclass

import torch

from hf_ssd.cli import bench
from hf_ssd.devices import accelerators, name


@dataclass(frozen=True)
class Layout:
    """
    Args:
        target, draft (`torch.device`): Of the target, or of the first of its ranks, and of the draft worker.
        target_ranks (`int`): How many devices share the target.
    """

    target: torch.device
    draft: torch.device
    target_ranks: int = 1

    @property
    def is_shared(self) -> bool:
        """Whether target and draft take from each other what one device has."""
        return self.target == self.draft and self.target_ranks == 1

    @property
    def devices(self) -> int:
        """How many devices target and draft take together."""
        return 1 if self.is_shared else self.target_ranks + 1

    def __str__(self) -> str:
        if self.target_ranks > 1:
            return f"the target on {self.target_ranks} devices by tensor parallelism, the draft on one more"
        if self.is_shared:
            return f"target and draft share {self.target}, in two processes"
        return f"the target on {self.target}, the draft on {self.draft}"


def find_layout(dry_run: bool, target_ranks: int | None) -> Layout | None:
    """
    Args:
        dry_run (`bool`): All on the CPU.
        target_ranks (`int`, *optional*): How many devices share the target. By default the largest power of two that
            leaves one device for the draft.

    Returns:
        [`Layout`], or `None` if there is nothing to measure on.
    """
    if dry_run:
        return Layout(torch.device("cpu"), torch.device("cpu"), target_ranks or 1)
    devices = accelerators()
    if not devices:
        return None
    if len(devices) == 1:
        return Layout(devices[0], devices[0])
    fitting = 1 << ((len(devices) - 1).bit_length() - 1)
    ranks = min(target_ranks or fitting, len(devices) - 1)
    return Layout(devices[0], devices[ranks], ranks)


def about(layout: Layout, dry_run: bool) -> dict:
    """What the figures were made with. Equal for two runs whose figures may stand in one report."""
    return {
        "dry run": dry_run,
        "layout": str(layout),
        "target and draft share a device": layout.is_shared,
        "devices": [f"{device}: {name(device)}" for device in accelerators()],
        "driver": _driver(),
        "cuda": torch.version.cuda,
        **bench.about()["versions"],
    }


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.splitlines()
        return lines[0].strip() if lines else None
    except (OSError, subprocess.TimeoutExpired):
        return None
