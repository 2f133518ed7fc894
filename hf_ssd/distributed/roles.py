"""Under torchrun: which ranks hold the target, which ranks draft, and how target and draft find each other.

torchrun ends all ranks when any rank is killed, so a draft rank is a supervisor, whose child, the draft worker, may die
and be restarted alone. Target and supervisor leave each other notes in torchrun's store, which both trust: how many
children were `asked` for, which child to `kill`, which child has `ended` and the end of its standard error, and whether
the target is `done`.
"""

import atexit
import functools
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from .. import devices
from .assistant import DraftAssistant
from .launch import START_TIMEOUT, worker_settings
from .meeting import join
from .target_ranks import TargetRanks
from .transport import LOOPBACK
from .weights import SharedWeights
from .worker_process import Child, WorkerProcess

LOADING_TIMEOUT = timedelta(hours=2)  # transformers' own: ranks finish loading a large target far apart
POLL = 0.05  # seconds between two checks of the notes
SUPERVISOR_TIMEOUT = 3.0  # seconds for the supervisor to notice that its child has ended, or is to end
STORE_TIMEOUT = 60.0  # seconds
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Roles:
    """
    The role of this process. Made by [`init_roles`].

    Attributes:
        is_draft (`bool`): Whether this rank drafts: the last ranks do.
        is_leader (`bool`): Whether this is rank 0, which talks to the draft. Only this rank should print.
        tp_size (`int`): Number of ranks that hold the target.
        device (`torch.device`): Device on which to load the model. For a draft rank this is the CPU, because the rank
            is a supervisor, whose child takes the model to the rank's GPU.
    """

    def __init__(self, num_draft_ranks: int):
        self.rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in VARIABLES[:4])
        self.num_draft_ranks, self.tp_size = num_draft_ranks, world_size - num_draft_ranks
        self.is_draft, self.is_leader = self.rank >= self.tp_size, self.rank == 0
        usable = [device for device in devices.accelerators() if device.type != "mps"]  # which has no process groups
        # A rank that sees only its own accelerator sees it under number 0.
        self.worker_device = usable[local_rank % len(usable)] if usable else torch.device("cpu")
        self.device = torch.device("cpu") if self.is_draft else self.worker_device
        self.store, _, _ = next(dist.rendezvous("env://"))  # kept: the first rank may be its server
        self.on_one_machine = local_world_size == world_size
        self._is_done, self._process, self.ranks = False, os.getpid(), None
        if self.is_draft:
            return
        # transformers insists on a world of exactly tp_size ranks, so the target's ranks get their own world.
        os.environ["WORLD_SIZE"] = str(self.tp_size)
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)
            os.environ["LOCAL_RANK"] = str(self.device.index)  # transformers uses it as the device's number
        if self.tp_size > 1:
            kind = self.device.type
            dist.init_process_group(  # with gloo, because outcomes are CPU tensors
                "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}",
                store=dist.PrefixStore("hf_ssd/target", self.store),
                rank=self.rank,
                world_size=self.tp_size,
                timeout=LOADING_TIMEOUT,
                device_id=self.device if kind == "cuda" else None,
            )
            self.ranks = TargetRanks(dist.new_group(backend="gloo"))
        if self.is_leader:
            atexit.register(self.shutdown)

    def target_config(
        self, model: str | os.PathLike | PreTrainedConfig | None = None, **options
    ) -> DistributedConfig | None:
        """
        Returns the `distributed_config` for the target's `from_pretrained`, to be passed on each of its ranks.

        Args:
            model (`str`, `os.PathLike` or `PreTrainedConfig`, *optional*): The target, to check before it is
                loaded that this many ranks can share it.
            options: Options of `DistributedConfig`, for example `tp_plan`.

        Raises:
            `ValueError`: the number of ranks does not divide the target's attention heads or key-value heads.
        """
        if isinstance(model, (str, os.PathLike)):
            model = AutoConfig.from_pretrained(model, trust_remote_code=False)
        if model is not None:
            check_heads(model, self.tp_size)
        return DistributedConfig(tp_size=self.tp_size, **options) if self.tp_size > 1 else None

    @functools.cached_property
    def draft(self) -> DraftAssistant:
        """
        The draft, to be passed as `assistant_model` on every rank of the target. The first access, which
        all ranks of the target must make, waits until the draft ranks are ready.
        """
        if self.is_draft:
            raise ValueError("This rank drafts, so it has no draft to talk to; call `roles.serve(model)`.")
        indices = range(self.num_draft_ranks) if self.is_leader else ()
        starts = [functools.partial(SupervisedChild, self._place(index)) for index in indices]
        return DraftAssistant([WorkerProcess(start, START_TIMEOUT) for start in starts], ranks=self.ranks)

    def serve(
        self,
        model: PreTrainedModel | str | os.PathLike,
        dtype: str | torch.dtype | None = None,
        timeout: float = START_TIMEOUT,
        compile: bool | None = None,
        **load_options,
    ) -> None:
        """
        Drafts, until the target is done.

        Args:
            model (`PreTrainedModel`, `str` or `os.PathLike`): The draft. A folder or hub id is loaded only by
                the worker, straight to its device.
            dtype, compile, load_options: See [`~hf_ssd.launch_draft`].
            timeout (`float`, *optional*, defaults to 600): Seconds for the worker to reach the target.

        Raises:
            `ValueError`: this rank does not draft.
        """
        if not self.is_draft:
            raise ValueError("This rank holds the target; only draft ranks serve (`if roles.is_draft:`).")
        settings = worker_settings(model, dtype, compile, load_options, timeout)
        settings |= {"device": str(self.worker_device), "cores": None}
        weights = SharedWeights(model) if isinstance(model, PreTrainedModel) else None
        if weights is not None:
            weights.fill()
        del model  # the child shares the copied weights, so this process frees the model
        # Start a worker, and another one whenever the target asks for it, until the target or the store is gone.
        place, number = self._place(self.rank - self.tp_size), 1
        notes, process = join(place, STORE_TIMEOUT), Child(settings, weights, meeting_of(place, number))
        try:
            while not notes.check(["done"]):
                if notes.add("asked", 0) > number:
                    process.end()
                    number += 1
                    process = Child(settings, weights, meeting_of(place, number))
                elif process.is_running and notes.check([f"kill/{number}"]):
                    process.end()
                elif not process.is_running and not notes.check([f"ended/{number}"]):
                    notes.set(f"ended/{number}", process.stderr_tail() or " ")
                time.sleep(POLL)
        except RuntimeError:
            pass  # the store is gone, and with it the target
        finally:
            process.end()
            if weights is not None:
                weights.close()

    def shutdown(self) -> None:
        """
        Ends the draft ranks, whose `serve()` then returns, and takes this rank out of the target's group. May be called
        more than once. The leader calls it when the program ends.
        """
        if self._is_done or self.is_draft or os.getpid() != self._process:
            return
        self._is_done = True
        if self.is_leader:
            try:
                if "draft" in self.__dict__:
                    self.draft.close()
            finally:  # otherwise the draft ranks would wait for ever
                for index in range(self.num_draft_ranks):
                    join(self._place(index), STORE_TIMEOUT).set("done", "yes")
        if self.tp_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _place(self, index: int) -> dict:
        """Returns the place of the notes to and from a draft rank."""
        run, restart = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        address = {"host": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"]), "secret": ""}
        hostname = LOOPBACK if self.on_one_machine else None
        return {**address, "hostname": hostname, "prefix": f"hf_ssd/{run}/{restart}/draft/{index}"}


def init_roles(num_draft_ranks: int = 1) -> Roles:
    """
    Divides the ranks that torchrun (or `accelerate launch`) started: the last ranks draft, the others hold the target.

    ```python
    roles = hf_ssd.distributed.init_roles(num_draft_ranks=1)
    if roles.is_draft:
        roles.serve(DRAFT)  # returns when the target is done
    else:
        model = AutoModelForCausalLM.from_pretrained(TARGET, distributed_config=roles.target_config(TARGET))
        target = hf_ssd.enable(model.to(roles.device))
        target.generate(**inputs, assistant_model=roles.draft, ssd_config=hf_ssd.SSDConfig())
        roles.shutdown()
    ```

    Args:
        num_draft_ranks (`int`, *optional*, defaults to 1): Number of ranks that draft; each prepares a share of the
            outcomes.

    Returns:
        [`Roles`]: The role of this process.

    Raises:
        `RuntimeError`: the program was not started by torchrun, or torch.distributed was initialized before.
        `ValueError`: there are not enough ranks.
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"init_roles() is for programs that torchrun starts ({missing[0]} is not set): "
            "`torchrun --nproc-per-node 2 program.py`. In a single process use hf_ssd.launch_draft()."
        )
    if dist.is_initialized():
        raise RuntimeError("Call init_roles() before torch.distributed is initialized: it divides the ranks.")
    world_size = int(os.environ["WORLD_SIZE"])
    if not 1 <= num_draft_ranks < world_size:
        raise ValueError(
            f"`num_draft_ranks` is {num_draft_ranks}, but of {world_size} ranks at least one must draft and at least "
            "one hold the target; start more ranks with --nproc-per-node."
        )
    return Roles(num_draft_ranks)


def check_heads(config: PreTrainedConfig, tp_size: int) -> None:
    """Raises `ValueError` if the number of ranks does not divide the attention heads or the key-value heads."""
    if tp_size == 1:
        return
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    counts = {"attention heads": heads, "key-value heads": getattr(text, "num_key_value_heads", None) or heads}
    for name, count in counts.items():
        if count % tp_size:
            fitting = [n for n in range(1, heads + 1) if not any(c % n for c in counts.values())]
            raise ValueError(
                f"The target has {count} {name}, which {tp_size} ranks cannot share equally; use "
                f"{' or '.join(map(str, fitting))} ranks for the target."
            )


def meeting_of(place: dict, number: int) -> dict:
    """Returns where the child of this number meets the target. `place` is the place of the notes of its rank."""
    return {**place, "prefix": f"{place['prefix']}/{number}"}


class SupervisedChild:
    """A supervisor's child as the target sees it, with the interface of [`Child`]. The notes are in `place`."""

    def __init__(self, place: dict):
        self.notes = join(place, STORE_TIMEOUT)
        self.number = self.notes.add("asked", 1)  # the first child starts unasked
        self.meeting = meeting_of(place, self.number)

    @property
    def is_running(self) -> bool:
        return not self.notes.check([f"ended/{self.number}"])

    def stderr_tail(self) -> str:
        deadline = time.monotonic() + SUPERVISOR_TIMEOUT
        while self.is_running and time.monotonic() < deadline:
            time.sleep(POLL)
        written = b"" if self.is_running else self.notes.get(f"ended/{self.number}")
        return written.decode("utf-8", errors="replace").strip()

    def end(self) -> None:
        self.notes.set(f"kill/{self.number}", "yes")
        self.stderr_tail()  # when it has ended
