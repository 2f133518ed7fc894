"""How often a round waits for the device, in each phase on both sides. The numbers may only fall."""

import pytest
import torch

from hf_ssd.cache import cached_model
from hf_ssd.cache.branches import Branches
from hf_ssd.distributed.draft_server import DraftServer
from hf_ssd.distributed.wire import Kind
from hf_ssd.drafting.speculator import Speculator
from hf_ssd.generation.sequences import Sequences

from ..helpers.loopback import PackingChannel
from ..helpers.stand_in_gpu import StandInGPU
from ..helpers.stand_in_rounds import generate
from ..helpers.tiny import padded_batch, tiny_model

BUDGET = {  # greedy, sampled
    # The outcome is what the host goes on with, so it is waited for.
    "target: decide": (1, 1),
    "target: send outcome": (0, 0),
    "target: bookkeeping": (0, 0),
    "target: receive": (0, 0),
    "target: feed": (0, 0),
    "target: receive q": (0, 0),
    "draft: look up": (0, 0),
    "draft: complete on a hit": (0, 0),
    # The tokens. When sampling, how many tokens have a probability comes with them.
    "draft: complete on a miss": (1, 1),
    # The probabilities, behind the tokens.
    "draft: answer": (0, 1),
    # The probabilities that the cache shape looks at.
    "draft: choose outcomes": (1, 1),
    # The tokens of each pass come while the next one runs, and the host asks whether they have.
    "draft: grow": (0, 0),
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


def work_until_a_hit_has_left(monkeypatch, do_sample: bool) -> list[int]:
    """What the draft asks its device to do between an outcome that hits and the tokens that answer it."""
    gpu, answer, send, came, counts = StandInGPU(), DraftServer._answer, PackingChannel.send, [0], []

    def answers(server, call, message):
        came[0] = gpu.operations
        answer(server, call, message)

    def sends(end, message):
        if message.kind == Kind.SPECULATION:
            counts.append(gpu.operations - came[0])
        send(end, message)

    monkeypatch.setattr(DraftServer, "_answer", answers)
    monkeypatch.setattr(PackingChannel, "send", sends)
    output, _ = generate(monkeypatch, 1, do_sample, gpu=gpu)
    records = output.ssd_stats.records
    assert len(counts) == len(records)
    assert min(count for count, record in zip(counts, records) if not record.hits[0]) > 50  # work is noticed
    hits = [count for count, record in zip(counts, records) if record.hits[0]]
    assert len(hits) > 3
    return hits


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_hit_leaves_before_the_draft_asks_its_device_for_anything(do_sample, monkeypatch):
    """Tokens are on the host. What they were drawn from, and the draft's own bookkeeping, come after them."""
    assert max(work_until_a_hit_has_left(monkeypatch, do_sample)) == 0


def test_a_draft_that_takes_in_the_outcome_first_is_noticed(monkeypatch):
    """The mutant."""
    look_up = Speculator.look_up
    monkeypatch.setattr(Speculator, "look_up", lambda self, *a: (look_up(self, *a), self.catch_up())[0])
    assert max(work_until_a_hit_has_left(monkeypatch, False)) > 5


def with_item(original):
    def mutant(self, *arguments):
        result = original(self, *arguments)
        (result[0] if isinstance(result, tuple) else result).sum().item()
        return result

    return mutant


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
