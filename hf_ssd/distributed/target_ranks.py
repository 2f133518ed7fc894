"""The processes that hold a target together. All of them follow the decisions of the first rank."""

import contextlib
import dataclasses

import torch
import torch.distributed as dist

from ..rounds import RoundRecord, Speculation
from .sessions import DraftError
from .transport import Channel
from .wire import Kind, Message

LONGEST_SILENCE = 1800.0  # seconds; the leader may have to start a worker before it sends a message


class TargetRanks:
    """Under tensor parallelism only rank 0, the *leader*, talks to the draft and decides, and tells the others."""

    def __init__(self, group: dist.ProcessGroup | None = None):  # of gloo and all ranks; `None` for a single process
        self.group = group
        self.is_leader = group is None or dist.get_rank(group) == 0
        self.size = 1 if group is None else dist.get_world_size(group)
        self.call = 0
        self.channel = None if group is None else Channel(None, self.is_leader, group=group)

    def share_values(self, values):
        """Returns the leader's values, for JSON, on every rank, or raises if it has failed in the call or is silent."""
        if self.group is None:
            return values
        if self.is_leader:
            self.channel.send(Message(Kind.VALUES, self.call, payload=values))
            return values
        message = self.channel.receive(LONGEST_SILENCE)
        while message.session != self.call:  # older messages belong to a call that has failed
            message = self.channel.receive(LONGEST_SILENCE)
        if message.kind == Kind.ERROR:
            is_draft_error, text = message.payload
            raise (DraftError if is_draft_error else RuntimeError)(f"Rank 0 of the target has broken off: {text}")
        return message.payload

    def share_speculation(self, speculation: Speculation | None) -> Speculation:
        """Returns the leader's speculation on every rank, without probabilities."""
        values = (speculation.tokens, dataclasses.asdict(speculation.record)) if self.is_leader else None
        tokens, record = self.share_values(values)
        return Speculation(tokens, None, RoundRecord(**record))

    def share_random_state(self, device: torch.device) -> None:
        """Gives all ranks the leader's random state, as if all had made the leader's random draws."""
        if self.group is None:
            return
        on_device = [] if device.type == "cpu" else [device]
        generators = torch.get_device_module(device) if on_device else torch
        state = generators.get_rng_state(*on_device)
        state = torch.tensor(self.share_values(state.tolist()), dtype=torch.uint8)
        generators.set_rng_state(state, *on_device)

    @contextlib.contextmanager
    def one_call(self):
        """A block that all ranks run. If the leader raises in it, the other ranks are told and raise as well."""
        self.call += 1
        try:
            yield
        except BaseException as error:
            if self.is_leader and self.group is not None:
                what = isinstance(error, DraftError), f"{type(error).__name__}: {error}"
                self.channel.send(Message(Kind.ERROR, self.call, payload=what))
            raise
