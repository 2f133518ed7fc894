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
from ..helpers.suites import quick_first
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


def work_until_answers_leave(monkeypatch, gpu) -> list[int]:
    """Collects what the draft asks its device to do between each outcome and the tokens that answer it."""
    answer, send, came, counts = DraftServer._answer, PackingChannel.send, [0], []

    def answers(server, call, message):
        came[0] = gpu.operations
        answer(server, call, message)

    def sends(end, message):
        if message.kind == Kind.SPECULATION:
            counts.append(gpu.operations - came[0])
        send(end, message)

    monkeypatch.setattr(DraftServer, "_answer", answers)
    monkeypatch.setattr(PackingChannel, "send", sends)
    return counts


def check_budget(monkeypatch, rows: int, do_sample: bool, tokens: int = 40):
    """
    A hit leaves before the draft asks its device for anything: tokens are on the host, and what they were drawn from,
    and the draft's own bookkeeping, come after them.
    """
    gpu = StandInGPU()
    work = work_until_answers_leave(monkeypatch, gpu)
    output, _ = generate(monkeypatch, rows, do_sample, gpu=gpu, max_new_tokens=tokens)
    stats, counts = output.ssd_stats, most(gpu.visits)
    assert stats.draft_failure is None and stats.hit_rate > 0 and len(stats.column("accepted")) > tokens // 5
    allowed = {phase: numbers[do_sample] for phase, numbers in BUDGET.items() if do_sample or phase[-1] != "q"}
    assert counts.keys() == allowed.keys()
    assert not {phase: n for phase, n in counts.items() if n > allowed[phase]}, "a phase waits more often than it did"
    assert counts == allowed, "a phase waits less often: lower its number in the table"
    work_of = {True: [], False: []}
    for record, operations in zip(stats.records, work, strict=True):
        work_of[record.is_hit].append(operations)
    assert min(work_of[False]) > 50 and (rows > 1 or work_of[True])  # work is noticed
    assert max(work_of[True], default=0) == 0, "a hit is kept waiting"
    return output


@pytest.mark.parametrize("rows, do_sample", quick_first([(4, False), (1, True), (1, False), (4, True)], 2))
def test_no_phase_of_a_round_waits_more_often(rows, do_sample, monkeypatch):
    output = check_budget(monkeypatch, rows, do_sample)
    if not do_sample:  # what the stand-in computes is right
        inputs = padded_batch(rows) if rows > 1 else {"input_ids": padded_batch(1)["input_ids"]}
        expected = tiny_model().generate(**inputs, do_sample=False, max_new_tokens=40)
        assert torch.equal(output.sequences.cpu(), expected)


def with_item(original):
    def mutant(self, *arguments):
        result = original(self, *arguments)
        (result[0] if isinstance(result, tuple) else result).sum().item()
        return result

    return mutant


def of_ordinary_memory(from_host):
    return lambda values, device: torch.tensor(values, device=device)


def taken_in_first(look_up):
    return lambda self, *arguments: (look_up(self, *arguments), self.catch_up())[0]


MUTANTS = [
    (1, Sequences, "propose", with_item, "waits more often"),
    (1, Speculator, "look_up", taken_in_first, "kept waiting"),
    (1, Branches, "grow", with_item, "waits more often"),
    (4, cached_model, "from_host", of_ordinary_memory, "waits more often"),
]


@pytest.mark.slow
@pytest.mark.parametrize("rows, owner, name, mutant, words", MUTANTS)
def test_mistakes_are_noticed(rows, owner, name, mutant, words, monkeypatch):
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name)))
    with pytest.raises(AssertionError, match=words):
        check_budget(monkeypatch, rows, False, tokens=24)
