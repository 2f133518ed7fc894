"""While the plan is plain decoding the target sends nothing; when drafting resumes, one message says what went by."""

import threading

import pytest
import torch
from transformers import LogitsProcessorList, set_seed

import hf_ssd
from hf_ssd.distributed import wire
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.cores import TargetCores
from hf_ssd.distributed.sessions import SessionRequest
from hf_ssd.distributed.target_ranks import TargetRanks
from hf_ssd.distributed.wire import Kind
from hf_ssd.drafting.draft_info import DraftInfo
from hf_ssd.generation import loop
from hf_ssd.generation.draft import FaultTolerantDraft
from hf_ssd.rounds import AHEAD, IN_TURN, NGRAM, NOTHING, PLAIN, PREPARED, PRIMARY, Outcome, Plan

from ..helpers.at_length import AtLength
from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import VOCAB, padded_batch, tiny_model

PLAIN_ROUNDS, DRAFTING_ROUNDS, NEW_TOKENS = 6, 3, 70


class InAndOut:
    """A planner that decodes plainly for six rounds, drafts for three, and so on."""

    expects_draft = False

    def __init__(self, drafting=Plan(AHEAD, 3, 3, 4), plain=Plan(PLAIN)):  # noqa: B008
        self.drafting, self.plain, self.rounds = drafting, plain, 0

    @property
    def plan(self):
        return self.plain if self.rounds % (PLAIN_ROUNDS + DRAFTING_ROUNDS) < PLAIN_ROUNDS else self.drafting

    def begin_call(self):
        pass

    def reason_of(self, records):
        return "the test says so"

    def observe(self, before, now):
        self.rounds += 1


def launched(workers):
    """Drafts that are the target itself, made here, because workers start in threads that share a random state."""
    return DraftAssistant([ThreadWorker(tiny_model()) for _ in range(workers)])


@pytest.fixture
def assistant():
    with launched(1) as assistant:
        yield assistant


def generate(monkeypatch, target, assistant, planner, rows=2, vocab=VOCAB, **options):
    """Returns the output, after it was seen that it is what plain decoding gives."""
    monkeypatch.setattr(loop, "planner_for", lambda *_: planner)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    batch = padded_batch(rows)
    batch["input_ids"] %= vocab
    output = target.generate(
        **batch, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(), return_dict_in_generate=True, **options
    )  # fmt: skip
    assert output.ssd_stats.draft_failure is None
    if not options["do_sample"]:
        options.pop("logits_processor", None)
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


@pytest.mark.parametrize("drafting", [Plan(AHEAD, 3, 3, 4), Plan(IN_TURN, 3, 3)], ids=lambda plan: plan.mode)
@pytest.mark.parametrize("workers, rows", [(1, 1), (1, 3), (2, 2)])
def test_nothing_is_sent_in_plain_mode_and_one_message_carries_what_went_by(
    target, monkeypatch, workers, rows, drafting
):
    with launched(workers) as assistant:
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


FEW = 12  # tokens, so that texts repeat themselves


def accepted_after_ngrams(monkeypatch, drafting, rows, **options):
    """
    A call whose draft is the target, and whose plain rounds verify n-grams. Returns how many n-grams' and drafted
    tokens were accepted and rejected.
    """
    target, counts = hf_ssd.enable(tiny_model(vocab_size=FEW)), {NGRAM: [0, 0], PRIMARY: [0, 0]}
    with DraftAssistant([ThreadWorker(tiny_model(vocab_size=FEW))]) as assistant:
        assistant.info = DraftInfo.of(target.config)
        planner = InAndOut(drafting, Plan(PLAIN, early=9))
        records = generate(monkeypatch, target, assistant, planner, rows, FEW, **options).ssd_stats.records
        # One message tells of all plain rounds, whatever their number of tokens.
        sent = [message for message in assistant.workers[0].sent if message.kind == Kind.OUTCOME]
        assert len(sent) - sum(record.mode != PLAIN for record in records) in (0, 1)  # nobody waits for the last answer
    for record in records:
        assert {*record.sources} <= ({NGRAM, NOTHING} if record.mode == PLAIN else {PREPARED, PRIMARY})
        assert record.early == (9 if NGRAM in record.sources else record.early)
        for row in record.live:
            source = NGRAM if record.mode == PLAIN else PRIMARY
            counts[source][0] += record.accepted[row]
            counts[source][1] += record.proposed(row) - record.accepted[row]
    assert {record.mode for record in records} == {PLAIN, drafting.mode}
    return counts


@pytest.mark.parametrize("drafting", [Plan(AHEAD, 3, 3, 4), Plan(IN_TURN, 3, 3)], ids=lambda plan: plan.mode)
@pytest.mark.parametrize("rows", [1, 3])
def test_plain_rounds_that_verify_ngrams_are_told_too(monkeypatch, drafting, rows):
    counts = accepted_after_ngrams(monkeypatch, drafting, rows)
    assert counts[NGRAM][0] > 5 and counts[PRIMARY][0] > 20
    assert counts[PRIMARY][1] <= 2 * rows  # the draft knows all tokens; only the end of a text cuts its proposals


def test_ngrams_that_are_not_told_are_noticed(monkeypatch):
    """The mutant for the test above: only the last round is told."""
    monkeypatch.setattr(FaultTolerantDraft, "_untold", lambda self, latest: latest.tokens)
    assert accepted_after_ngrams(monkeypatch, Plan(IN_TURN, 3, 3), 1)[PRIMARY][1] > 2


def test_a_seed_repeats_a_sampled_call_whose_plans_are_the_same(target, assistant, monkeypatch):
    outputs = []
    for _ in range(2):
        set_seed(3)
        outputs.append(generate(monkeypatch, target, assistant, InAndOut(), do_sample=True, max_new_tokens=40))
        assert {record.mode for record in outputs[-1].ssd_stats.records} == {PLAIN, AHEAD}
    assert all(output.ssd_stats.acceptance_rate > 0.5 for output in outputs)


def test_a_call_that_is_all_plain_costs_the_draft_nothing(target, assistant, monkeypatch):
    passes = []
    assistant.workers[0].draft.register_forward_hook(lambda *_: passes.append(1))
    generate(monkeypatch, target, assistant, InAndOut(Plan(PLAIN)))
    assert not passes and not assistant.workers[0].sent


def test_a_draft_that_is_ready_late_reads_what_was_generated_with_the_prompts(target, monkeypatch):
    gate = threading.Event()

    class LateWorker(ThreadWorker):
        def _connect(self, meeting):
            assert gate.wait(60)
            super()._connect(meeting)

    def let_in():
        gate.set()
        for slot in assistant.workers:
            slot.thread.join(60)

    planner, length = InAndOut(), padded_batch(2)["input_ids"].shape[1] + 2 * PLAIN_ROUNDS
    with DraftAssistant([LateWorker(tiny_model())], wait=False) as assistant:
        assistant.info = DraftInfo.of(target.config)
        processor = LogitsProcessorList([AtLength(length, let_in)])
        output = generate(monkeypatch, target, assistant, planner, logits_processor=processor)
        stats, (worker,) = output.ssd_stats, assistant.workers
        start = next(message.payload for message in worker.sent if message.kind == Kind.START)
    assert stats.acceptance_rate == 1 and stats.draft_joined_at >= 2 * PLAIN_ROUNDS - 1
    for row, prompt in enumerate(start["prompts"]):
        text = output.sequences[row, 3 * row :].tolist()  # without padding
        assert prompt == text[: len(prompt)] and len(prompt) > length - 3 * row


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
