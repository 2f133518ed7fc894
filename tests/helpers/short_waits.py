"""Waits for messages that sleep soon: tests run beside each other, and a wait that spins takes the core of another."""

import functools

from hf_ssd.distributed import transport

SPIN = 0.0005  # seconds


def sleep_soon(wait=transport.wait):
    """In this process, and in those that are forked from it."""

    @functools.wraps(wait)
    def short(work, deadline, awake=transport.AWAKE):
        wait(work, deadline, min(awake, SPIN))

    transport.wait = short
