"""A draft that prepares ahead of time in the test's own process, where a mutant reaches it too."""

import contextlib
import dataclasses

import pytest

from hf_ssd.distributed.local import LocalSession


@contextlib.contextmanager
def preparing():
    """Prepares ahead of time without a worker, in a moment, and collects the share of rows that hit in each round."""
    answer = LocalSession.receive_speculation

    def prepares(self):
        speculator = self.speculator
        if not speculator.config.asynchronous:
            speculator.config = dataclasses.replace(speculator.config, asynchronous=True)
            speculator.prepare()
        prepare, is_due = speculator.prepare, getattr(speculator.planner, "is_due", lambda: False)
        speculator.prepare = lambda: prepare(is_due)
        received = answer(self)
        speculator.prepare = prepare
        hits.append(received.hits.float().mean().item())
        return received

    hits = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSession, "receive_speculation", prepares)
        yield hits


@pytest.fixture
def prepared_in_process():
    """The same for a whole test."""
    with preparing() as hits:
        yield hits
