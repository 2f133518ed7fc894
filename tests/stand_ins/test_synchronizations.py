"""How often a round waits for the device, in each phase on both sides. The numbers may only fall."""

import pytest
import torch

from hf_ssd.cache import cached_model
from hf_ssd.cache.branches import Branches
from hf_ssd.generation.sequences import Sequences

from ..conftest import padded_batch, tiny_model
from .rounds import generate

BUDGET = {  # greedy, sampled
    # The outcome is what the host goes on with, so it is waited for. When sampling, `torch.multinomial` looks twice
    # whether it was given probabilities, and raises as plain generation does.
    "target: decide": (1, 3),
    "target: send outcome": (0, 0),
    # The new tokens of each row; the device has nothing else to do by then.
    "target: bookkeeping": (1, 1),
    "target: receive": (0, 0),
    "target: feed": (0, 0),
    "target: receive q": (0, 0),
    # Which rows hit.
    "draft: look up": (1, 1),
    "draft: complete on a hit": (0, 0),
    # The draft measures what its steps take, all of them together.
    "draft: complete on a miss": (1, 1),
    # The tokens. When sampling also how many tokens have a probability, and the probabilities.
    "draft: answer": (1, 2),
    # The probabilities that the cache shape looks at.
    "draft: choose outcomes": (1, 1),
    # A forward pass ends before the next one begins, so that an outcome that has come is noticed in time.
    "draft: grow": (1, 1),
    "draft: learn": (0, 0),
}
ONCE = ("", "target: end", "draft: start", "draft: end")


def most(visits) -> dict[str, int]:
    """The most waits of any visit, for each phase of a round."""
    counts: dict[str, int] = {}
    for phase, waits in visits:
        if phase not in ONCE:
            counts[phase] = max(counts.get(phase, 0), waits.total())
    return counts


def check_budget(monkeypatch, rows: int, do_sample: bool):
    output, gpu = generate(monkeypatch, rows, do_sample)
    stats, counts = output.ssd_stats, most(gpu.visits)
    assert stats.draft_failure is None and stats.hit_rate > 0 and len(stats.column("accepted")) > 10
    allowed = {phase: numbers[do_sample] for phase, numbers in BUDGET.items() if do_sample or phase[-1] != "q"}
    assert counts.keys() == allowed.keys()
    assert not {phase: n for phase, n in counts.items() if n > allowed[phase]}, "a phase waits more often than it did"
    assert counts == allowed, "a phase waits less often: lower its number in the table"
    return output


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("do_sample", [False, True])
def test_no_phase_of_a_round_waits_more_often(rows, do_sample, monkeypatch):
    output = check_budget(monkeypatch, rows, do_sample)
    if not do_sample:  # what the stand-in computes is right
        inputs = padded_batch(rows) if rows > 1 else {"input_ids": padded_batch(1)["input_ids"]}
        expected = tiny_model().generate(**inputs, do_sample=False, max_new_tokens=40)
        assert torch.equal(output.sequences.cpu(), expected)


def with_item(original):
    return lambda self, tokens: (tokens.sum().item(), original(self, tokens))[1]


@pytest.mark.parametrize("owner, name", [(Sequences, "propose"), (Branches, "grow")])
def test_an_item_in_the_loop_is_noticed(owner, name, monkeypatch):
    """The mutant, on both sides."""
    monkeypatch.setattr(owner, name, with_item(getattr(owner, name)))
    with pytest.raises(AssertionError, match="waits more often"):
        check_budget(monkeypatch, 1, False)


def test_numbers_that_are_copied_from_ordinary_memory_are_noticed(monkeypatch):
    """The mutant: `torch.tensor(values, device=...)`."""
    monkeypatch.setattr(cached_model, "from_host", lambda values, device: torch.tensor(values, device=device))
    with pytest.raises(AssertionError, match="waits more often"):
        check_budget(monkeypatch, 4, False)
