"""The two ends of a channel in this process, and steps that run at the same time."""

import threading
from types import SimpleNamespace

import torch.distributed as dist

from hf_ssd.distributed.shared_channel import SharedChannel
from hf_ssd.distributed.transport import Channel


def both(*steps) -> list:
    """Runs each in a thread, and returns what they return or raise."""
    results = [None] * len(steps)

    def run(i):
        try:
            results[i] = steps[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=[i]) for i in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def channel_ends() -> list[Channel]:
    """Returns the target's end and the draft's."""
    store = dist.HashStore()
    return both(lambda: Channel(store, True), lambda: Channel(store, False))


class SharedEnds:
    """A channel that sessions share, and the worker's end of it, which closes when the worker is ended."""

    def __init__(self):
        self.target, self.draft = channel_ends()
        self.process = SimpleNamespace(is_running=True, stderr_tail=lambda: "", end=self.end)
        self.channel = SharedChannel(self.target, self.process)

    def end(self):
        self.process.is_running = False
        self.draft.close()
