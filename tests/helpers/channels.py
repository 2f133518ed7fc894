"""The two ends of a channel in this process, and steps that run at the same time."""

import threading

import torch.distributed as dist

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
