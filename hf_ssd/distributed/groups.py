"""torch.distributed groups of two: the draft's process and one of the target's."""

import contextlib
import ctypes
import os
import threading
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

TARGET, DRAFT = 0, 1  # ranks
LOOPBACK = "127.0.0.1"
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
CONNECT_TIMEOUT = timedelta(seconds=60)  # for the other process to join, once it is known to be there
# An idle worker waits between calls for as long as its program runs; what bounds a wait is the caller's deadline, and
# the end of the other process, which gloo reports at once.
TRANSFER_TIMEOUT = timedelta(days=365)
CLOSE_TIMEOUT = 5.0  # seconds
LINK_CTAS = 2  # blocks of the GPU that one transfer may use; what tokens were drawn from is a few megabytes


def keep_when_forked(thing):
    """
    Returns `thing`, which is never collected in a process that is forked from this one, not even at its end. Groups and
    stores wait for threads of theirs, which a forked process does not have, and would abort it.
    """
    _kept.add(thing)
    return thing


def _keep() -> None:
    for thing in list(_kept):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_kept: weakref.WeakSet = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)


def gloo_group(store: dist.Store, name: str, rank: int, hostname: str | None = LOOPBACK) -> dist.ProcessGroup:
    """
    Args:
        store (`torch.distributed.Store`): Where the two processes find each other.
        name (`str`): Of the group, the same in both.
        rank (`int`): `TARGET` or `DRAFT`.
        hostname (`str`, *optional*, defaults to `"127.0.0.1"`): The address of this end. `None` for what gloo picks by
            the name of the machine, or by `GLOO_SOCKET_IFNAME`, so that other machines can reach it.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = CONNECT_TIMEOUT
    options._threads = 1
    with _threads_that_let_compute():
        if hostname is None:
            device = dist.ProcessGroupGloo.create_default_device()
        else:
            device = dist.ProcessGroupGloo.create_device(hostname=hostname, lazy_init=False)
        options._devices = [device]
        return keep_when_forked(dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, options))


@contextlib.contextmanager
def _threads_that_let_compute():
    """
    Threads that are created meanwhile do not interrupt who computes, if there is one core for all of them; they run
    when that one waits, or lets others run. Otherwise gloo's thread that looks for what arrives would interrupt the one
    that sends while that holds the connection, and look again and again, until the scheduler's next tick. Where the
    scheduler takes no orders, as in some containers, they remain as they are.
    """
    is_linux = hasattr(os, "SCHED_BATCH")
    if not is_linux or len(os.sched_getaffinity(0)) > 1 or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def nccl_group(store: dist.Store, name: str, rank: int) -> dist.ProcessGroup:
    """The same between two GPUs, each process having set its own as the current one."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TRANSFER_TIMEOUT
    options.config.max_ctas = LINK_CTAS
    with _errors_that_end_no_process():
        return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, 2, options)


@contextlib.contextmanager
def _errors_that_end_no_process():
    """
    Unless it is told otherwise while it is made, a group ends its process when the other one dies. The death of a draft
    must not end the target.
    """
    before = os.environ.get(NCCL_ERRORS)
    os.environ[NCCL_ERRORS] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NCCL_ERRORS]
        else:
            os.environ[NCCL_ERRORS] = before


def give_up(groups: list[dist.ProcessGroup]) -> None:
    """
    Aborts what is under way on these groups and empties the list. In a thread, because a gloo group that is collected
    as garbage waits for the other process: one that has not ended costs patience and not the program.
    """

    def close():
        while groups:
            groups.pop().abort()

    closing = threading.Thread(target=close, daemon=True)
    try:
        closing.start()
    except RuntimeError:  # the program ends, and early versions of Python 3.12 start no threads then
        return close()
    closing.join(CLOSE_TIMEOUT)


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor, root: int) -> dist.Work:
    """Starts to send `tensor`, or to receive into it."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, TRANSFER_TIMEOUT
    return group.broadcast([tensor], options)
