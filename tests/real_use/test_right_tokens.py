"""Plain generation's tokens, and a draft that knows them, in calls that the other tests do not make."""

import functools

import pytest
import torch

import hf_ssd
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.drafting.speculator import Speculator
from hf_ssd.generation import loop
from hf_ssd.rounds import AHEAD, FILLER, PLAIN, Plan

from ..conftest import tiny_model
from ..stand_ins.thread_worker import ThreadWorker

# ---------------------------------------------------------------- rounds in which the draft is not asked


class Fillers:
    """A planner that times wider passes in the first rounds, decodes plainly for some, and then drafts."""

    profiles, reason = False, "the test says so"

    def __init__(self, fillers: int, plain: int):
        self.left, self.plain, self.rounds = [3] * fillers, range(fillers, fillers + plain), 0

    @property
    def plan(self):
        return Plan(PLAIN) if self.rounds in self.plain else Plan(AHEAD, 3, 3, 4)

    def next_filler(self):
        return self.left.pop() if self.left else None

    def observe(self, before, now):
        self.rounds += 1


@pytest.fixture
def texts(monkeypatch):
    """What the draft has read of each row whenever it is asked."""
    seen, look_up = [], Speculator.look_up

    def watched(self, *arguments):
        found, prefix = look_up(self, *arguments), self.drafter.prefix
        seen.append([prefix.ids[row, :length].tolist() for row, length in enumerate(prefix.lengths)])
        return found

    monkeypatch.setattr(Speculator, "look_up", watched)
    return seen


@pytest.mark.parametrize("rows", [[0], [0, 1, 11, 4]], ids=["one row", "several rows, of which some end"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_draft_reads_the_targets_text_where_fillers_were_right_by_chance(target, monkeypatch, texts, rows, workers):
    """These texts repeat a token, as those with blank lines do, and the fillers repeat the last token."""
    inputs = torch.randint(2, 97, (64, 6), generator=torch.Generator().manual_seed(0))[rows]
    options = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "do_sample": False}
    options |= {"max_new_tokens": 30, "pad_token_id": 0, "eos_token_id": 59 if len(rows) > 1 else None}
    monkeypatch.setattr(loop, "planner_for", lambda *_: Fillers(fillers=4, plain=3))
    drafts = [functools.partial(ThreadWorker, tiny_model()) for _ in range(workers)]
    with DraftAssistant(drafts) as assistant:
        output = target.generate(
            **options, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(), return_dict_in_generate=True
        )
    stats, sequences = output.ssd_stats, target.generate(**options)
    assert torch.equal(output.sequences, sequences) and stats.draft_failure is None
    fillers = [record for record in stats.records if FILLER in record.sources]
    assert len(fillers) == 4 and sum(max(record.accepted) for record in fillers) > 4
    drafted = [record for record in stats.records if record.mode == AHEAD]
    assert drafted[0].accepted.count(-1) == (1 if len(rows) > 1 else 0)  # a row that ended before the draft was asked
    # The draft is the target itself: it is right wherever it has read the target's text.
    assert len(drafted) > 3 and all(k in (-1, record.lookahead) for record in drafted for k in record.accepted)
    assert len(texts) >= workers * len(drafted)
    for of_rows in texts:
        assert of_rows == [sequences[row, : len(text)].tolist() for row, text in enumerate(of_rows)]
