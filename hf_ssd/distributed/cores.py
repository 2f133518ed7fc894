"""How target and draft share the CPU cores of one machine."""

import contextlib
import itertools
import os
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch


@dataclass(frozen=True)
class CoreShare:
    """The cores of each side while target and drafts work beside each other."""

    target: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]  # of each worker
    half: "CoreShare | None" = field(default=None, compare=False)  # the same for calls in which the draft has half

    @property
    def all(self) -> tuple[int, ...]:
        """The cores of both sides, which a draft has while the target waits for it."""
        return tuple(sorted({*self.target, *(core for share in self.drafts for core in share)}))


def available_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def divide_cores(draft_threads: int | None = None, drafts: int = 1) -> CoreShare:
    """Gives each worker a quarter of the cores, at least 1, or `draft_threads` cores, and the target the rest."""
    cores, half = available_cores(), None
    if draft_threads is None:
        draft_threads = max(1, len(cores) // 4)
        if drafts == 1 and len(cores) >= 4:  # calls may give a single worker half of them
            half = divide_cores(len(cores) // 2)
    if not 1 <= draft_threads <= len(cores):
        raise ValueError(f"`num_threads` is {draft_threads}, but must be between 1 and the {len(cores)} cores here.")
    rest = cores[: max(0, len(cores) - drafts * draft_threads)] or cores[: len(cores) - draft_threads] or cores
    free = [core for core in cores if core not in rest] or list(cores)
    in_turn = itertools.cycle(free)
    return CoreShare(rest, tuple(tuple(itertools.islice(in_turn, draft_threads)) for _ in range(drafts)), half)


def pin(cores: tuple[int, ...]) -> None:
    """Restricts the calling thread, and the threads that it starts from now on, to these cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def use_cores(cores: tuple[int, ...] | None):
    """Runs the block with a torch thread for each core and the calling thread pinned to them. Blocks may overlap."""
    if cores is None:
        yield
        return
    before = available_cores()
    with _blocks.lock:
        if not _blocks.open:
            _blocks.before, _blocks.pinned = (torch.get_num_threads(), before, _threads()), set()
        _blocks.open.append(cores)
        _blocks.pinned.add(frozenset(cores))
        torch.set_num_threads(len(cores))
    pin(cores)
    try:
        yield
    finally:
        pin(before)
        with _blocks.lock:
            _blocks.open.remove(cores)
            num_threads, everywhere, threads = _blocks.before
            torch.set_num_threads(len(_blocks.open[-1]) if _blocks.open else num_threads)
            # After the last block, those that were started in blocks, such as torch's own, may use all cores again.
            for thread in set() if _blocks.open else _threads() - threads:
                with contextlib.suppress(OSError):  # the thread has ended
                    if os.sched_getaffinity(thread) in _blocks.pinned:
                        os.sched_setaffinity(thread, everywhere)


Cores = list[int] | tuple[int, ...] | None


class TargetCores:
    """The cores of a call's target: its share while a draft works beside it, otherwise all that the thread may use."""

    def __init__(self, share: tuple[int, ...] | None):
        self.share, self.block, self.is_divided = share, contextlib.ExitStack(), False

    def divide(self, is_divided: bool) -> None:
        if self.share is not None and is_divided != self.is_divided:
            self.close()
            self.is_divided = is_divided
            self.block.enter_context(use_cores(self.share if is_divided else None))

    def close(self) -> None:
        self.is_divided = False
        self.block.close()


class DraftCores:
    """The cores of a draft worker: its share beside the target, and those of both while the target waits for it."""

    # With at most so many `threads` of torch on all cores. `half` is its share in calls in which it has half of them.
    def __init__(self, share: Cores = None, everything: Cores = None, threads: int = 1, half: Cores = None):
        self.usual, self.half, self.everything, self.threads = share, half or share, everything, threads
        self.share, self.is_divided = None, False
        self.serve([])

    def serve(self, calls: list[tuple[bool, bool]]) -> None:
        """Serves these calls: of each, whether it leaves half to the draft, and whether its target works beside it."""
        # Their targets know nothing of each other, so all must leave it half, and only a single one leaves it all.
        share = self.half if calls and all(half for half, _ in calls) else self.usual
        is_divided = len(calls) != 1 or calls[0][1]
        if share is None or (share, is_divided) == (self.share, self.is_divided):
            return
        self.share, self.is_divided = share, is_divided
        cores = share if is_divided else self.everything
        pin(cores)
        for thread in _threads():
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(thread, cores)
        torch.set_num_threads(len(cores) if is_divided else max(len(share), min(self.threads, len(cores))))

    @property
    def are_taken_in_turn(self) -> bool:
        """Whether the target computes on these cores while the draft waits for it."""
        return self.share is not None and not self.is_divided


def _threads() -> set[int]:
    """Returns the ids of this process's threads, or an empty set where there is no `/proc`."""
    return set(map(int, os.listdir("/proc/self/task"))) if os.path.isdir("/proc/self/task") else set()


_blocks = SimpleNamespace(lock=threading.Lock(), open=[])  # the cores of the blocks of `use_cores` that have not ended
