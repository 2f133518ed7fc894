"""While the plan is plain decoding the target sends nothing; when drafting resumes, one message says what went by."""

import pytest
import torch

import hf_ssd
from hf_ssd.distributed import wire
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.cores import TargetCores
from hf_ssd.distributed.target_ranks import TargetRanks
from hf_ssd.distributed.wire import Kind
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.generation import loop
from hf_ssd.generation.draft import FaultTolerantDraft
from hf_ssd.planning.fixed_plan import FixedPlan
from hf_ssd.rounds import AHEAD, IN_TURN, NGRAM, NOTHING, PLAIN, Outcome, Plan

from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import padded_batch, tiny_model

PLAIN_ROUNDS, DRAFTING_ROUNDS, NEW_TOKENS = 6, 3, 70


class InAndOut(FixedPlan):
    """A planner that decodes plainly for six rounds, drafts for three, and so on."""

    def __init__(self, drafting=Plan(AHEAD, 3, 3, 4), plain=Plan(PLAIN)):  # noqa: B008
        self.drafting, self.plain, self.rounds = drafting, plain, 0

    @property
    def plan(self):
        return self.plain if self.rounds % (PLAIN_ROUNDS + DRAFTING_ROUNDS) < PLAIN_ROUNDS else self.drafting

    def observe(self, before, now):
        self.rounds += 1


def launched(workers):
    """Drafts that are the target itself, made here, because workers start in threads that share a random state."""
    return DraftAssistant([ThreadWorker(tiny_model()) for _ in range(workers)])


@pytest.fixture
def assistant():
    with launched(1) as assistant:
        yield assistant


def generate(monkeypatch, target, assistant, planner, rows=2, **options):
    """Returns the output, after it was seen that it is what plain decoding gives."""
    monkeypatch.setattr(loop, "planner_for", lambda *_: planner)
    batch, options = padded_batch(rows), {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    ssd = {"assistant_model": assistant, "ssd_config": hf_ssd.SSDConfig()}
    output = target.generate(**batch, **ssd, return_dict_in_generate=True, **options)
    assert output.ssd_stats.draft_failure is None
    assert torch.equal(output.sequences, target.generate(**batch, **options))
    return output


def tokens_told(worker, rows):
    """How many tokens of the first row each of the messages tells of."""
    told = [message.payload for message in worker.sent if message.kind == Kind.OUTCOME]
    return [len(wire.read_outcome(payload, rows)[0].tokens[0]) for payload in told]


def tokens_due(records):
    """Nothing in a plain round, and then all that went by; what went by before the first one is in the prompts."""
    asked = [number for number, record in enumerate(records) if record.mode != PLAIN]
    asked.append(len(records))  # the last outcome, behind which nothing is asked: all calls here end while drafting
    gained = [record.accepted[0] + 1 for record in records]
    return [1, *(sum(gained[before:after]) for before, after in zip(asked, asked[1:]))]


@pytest.mark.parametrize("mode, workers, rows", [(AHEAD, 1, 1), (IN_TURN, 1, 3), (AHEAD, 2, 2)])
def test_nothing_is_sent_in_plain_mode_and_one_message_carries_what_went_by(target, monkeypatch, mode, workers, rows):
    with launched(workers) as assistant:
        drafting = Plan(mode, 3, 3, 4 * (mode == AHEAD))
        stats = generate(monkeypatch, target, assistant, InAndOut(drafting), rows).ssd_stats
        for worker in assistant.workers:
            assert tokens_told(worker, rows) == tokens_due(stats.records)
            assert any(told > PLAIN_ROUNDS for told in tokens_told(worker, rows))
            of_rounds = [message.kind for message in worker.sent if message.kind != Kind.OUTCOME]
            verified = [Kind.SPECULATION] * sum(record.mode != PLAIN for record in stats.records)  # one knows by itself
            assert of_rounds == [Kind.START, *(verified if workers > 1 else ()), Kind.END]
    assert stats.acceptance_rate == 1  # the draft is the target: it knows all tokens that went by


def test_what_went_by_and_is_not_told_is_noticed(target, assistant, monkeypatch):
    """The mutant for the test above."""
    monkeypatch.setattr(FaultTolerantDraft, "_untold", lambda self, latest: latest.tokens)
    assert generate(monkeypatch, target, assistant, InAndOut()).ssd_stats.acceptance_rate < 1


def test_a_call_that_is_all_plain_costs_the_draft_nothing(target, assistant, monkeypatch):
    passes = []
    assistant.workers[0].draft.register_forward_hook(lambda *_: passes.append(1))
    generate(monkeypatch, target, assistant, InAndOut(Plan(PLAIN)))
    assert not passes and not assistant.workers[0].sent


@pytest.mark.parametrize("ranks", [1, 2])
def test_ngrams_are_verified_and_counted_where_several_ranks_hold_the_target(ranks):
    leader = TargetRanks()
    leader.size = ranks
    planner, text = InAndOut(plain=Plan(PLAIN, early=9)), [2, 3, 4, 5] * 3
    request = SessionRequest(hf_ssd.SSDConfig(), None, [torch.tensor(text)], 0, 97)
    draft = FaultTolerantDraft(None, None, request, planner, torch.device("cpu"), leader, TargetCores(None))
    draft.open(0.0)
    draft.send_outcome(Outcome([[2]]))
    first = draft.receive_speculation()
    assert draft.receive_probabilities() is None  # they are certain
    assert first.tokens == [[3, 4, 5, 2, 3, 4, 5, 2, 3]] and first.record.early_alone == []
    draft.send_outcome(Outcome([[3, 4, 5, 2, 3, 9]]))
    second = draft.receive_speculation()
    assert (second.record.early_alone, second.record.early_beside) == ([6], [6])
    assert (first.record.sources, second.record.sources) == ([NGRAM], [NOTHING])
