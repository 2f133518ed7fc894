"""torch.distributed groups of two ranks: a process of the draft and a process of the target."""

import contextlib
import ctypes
import gc
import os
import threading
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate.utils import patch_environment

TARGET, DRAFT = 0, 1  # ranks
LOOPBACK = "127.0.0.1"
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
CONNECT_TIMEOUT = timedelta(seconds=20)  # for the other process to join; both processes are known to be running
# An idle worker waits as long as its program runs. Waits end by the caller's deadline, or with the other process.
TRANSFER_TIMEOUT = timedelta(days=365)
CLOSE_TIMEOUT = 5.0  # seconds
LINK_CTAS = 2  # blocks of the GPU that one transfer may use; distributions are a few megabytes

_kept: weakref.WeakSet = weakref.WeakSet()


def keep_when_forked(thing):
    """
    Returns `thing`, and keeps it alive for ever in forked children. Destructors of groups and stores wait for threads
    that do not exist there, which would abort the child.
    """
    _kept.add(thing)
    return thing


def _keep() -> None:
    for thing in list(_kept):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    if _kept:  # earlier garbage may hold transfers and devices, which have no name here
        gc.freeze()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)


def gloo_group(store: dist.Store, name: str, rank: int, hostname: str | None = LOOPBACK) -> dist.ProcessGroup:
    """
    Connects to the other process, which does the same. `hostname` is the address of this end. With `None`, gloo chooses
    an address that other machines can reach, by the name of the machine or by `GLOO_SOCKET_IFNAME`.
    """
    options = keep_when_forked(dist.ProcessGroupGloo._Options())  # the options hold a device with a thread
    options._timeout, options._threads = CONNECT_TIMEOUT, 1
    with _threads_that_let_compute():
        if hostname is None:
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
        else:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname, lazy_init=False)]
        return keep_when_forked(dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, options))


@contextlib.contextmanager
def _threads_that_let_compute():
    """
    If the process has a single core, threads that are created in this block do not interrupt the thread that computes.
    Otherwise gloo's receiving thread interrupts its sending thread and spins until the scheduler's next tick, which
    takes a tenth of a draft's time.
    """
    if not hasattr(os, "SCHED_BATCH") or len(os.sched_getaffinity(0)) > 1 or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    _set_policy(os.SCHED_BATCH)
    try:
        yield
    finally:
        _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> None:
    with contextlib.suppress(OSError):  # some containers do not allow it
        os.sched_setscheduler(0, policy, os.sched_param(0))


def nccl_group(store: dist.Store, name: str, rank: int) -> dist.ProcessGroup:
    """Connects two GPUs with NCCL. Each process must have set its own GPU as the current device."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout, options.config.max_ctas = TRANSFER_TIMEOUT, LINK_CTAS
    # NCCL reads it while the group is made. Unless it is "0", the death of the draft's process would end the target's.
    with patch_environment(**{NCCL_ERRORS: "0"}):
        return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, 2, options)


def give_up(groups: list[dist.ProcessGroup]) -> None:
    """
    Aborts these groups with their transfers, and empties the list. This runs in a thread, because a gloo group that is
    collected as garbage waits for the other process, which may hang.
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
    """Starts to send `tensor` if this rank is `root`, otherwise to receive into it."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, TRANSFER_TIMEOUT
    return group.broadcast([tensor], options)
