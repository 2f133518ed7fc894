"""One call: a draft that comes late, an interrupt at any line, and processes that were forked."""

import os
import sys
import threading
import time

import pytest
import torch

import hf_ssd
from hf_ssd.cache.trial import check_supported
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.drafting.draft_info import DraftInfo
from hf_ssd.drafting.sampling import DraftSampler
from hf_ssd.generation.draft import FaultTolerantDraft
from hf_ssd.rounds import IN_TURN

from ..helpers import calls
from ..helpers.at_length import AtLength
from ..helpers.preparing import preparing
from ..helpers.programs import run
from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import VOCAB, padded_batch, ready, tiny_draft


def call(target, assistant, processor=None, rows=3, new_tokens=40, config=None, **options):
    return calls.call(target, assistant, rows, processor, settings=config, max_new_tokens=new_tokens, **options)


# ---------------------------------------------------------------- a draft that comes late


class LateWorker(ThreadWorker):
    """Is ready when the test says so."""

    def __init__(self, draft, gate):
        super().__init__(draft)
        self.gate = gate

    def _connect(self):
        assert self.gate.wait(60)
        super()._connect()


class Late(DraftAssistant):
    """An assistant whose only worker is ready when the test says so."""

    def __init__(self, draft, **options):
        self.gate = threading.Event()
        super().__init__([LateWorker(draft, self.gate)], wait=False, **options)
        self.info = DraftInfo(VOCAB)

    def let_in(self):
        self.gate.set()
        self.workers[0].thread.join(60)


@pytest.mark.parametrize("rows, has_ended, penalty", [(1, False, 1.3), (3, False, 1.0), (3, True, 1.0)])
def test_a_draft_joins_in_the_middle_of_a_call(target, rows, has_ended, penalty):
    options = {"repetition_penalty": penalty}
    if has_ended:
        plain = target.generate(**padded_batch(rows), do_sample=False, max_new_tokens=40)
        options |= {"eos_token_id": int(plain[1, 12]), "pad_token_id": 0}
    with Late(tiny_draft(disagreement=0.0)) as assistant:  # the target itself
        output = call(target, assistant, AtLength(16, assistant.let_in), rows, **options)
    if has_ended:
        assert (output.sequences[:, 13:16] != 0).any(1).tolist() == [True, False, True]
    stats = output.ssd_stats
    assert stats.draft_failure is None
    joined = stats.draft_joined_at
    assert 7 <= joined <= 9 and not any(stats.column("lookahead")[:joined])
    for of_row in zip(*stats.column("accepted")[joined:]):
        rounds = [(k, a) for k, a in zip(stats.column("lookahead")[joined:], of_row) if a >= 0]
        # All that it proposes is accepted, so it knows the text; except behind an end, in a row's last round.
        assert all(k == a for k, a in rounds[:-1])
    assert any(map(any, stats.column("hits")[joined:]))


@pytest.mark.slow
def test_it_would_be_noticed_if_what_was_generated_before_were_not_told(target, monkeypatch):
    """The mutant for the test above."""
    monkeypatch.setattr(FaultTolerantDraft, "_request_now", lambda self, *_: self.request)
    with Late(tiny_draft(disagreement=0.0)) as assistant:
        stats = call(target, assistant, AtLength(16, assistant.let_in)).ssd_stats
    assert any(0 <= a < k for k, accepted in zip(stats.column("lookahead"), stats.column("accepted")) for a in accepted)


@pytest.mark.slow
@pytest.mark.parametrize("counts_from_the_prompt", [True, False])
def test_the_drafts_processors_count_from_the_prompt(target, counts_from_the_prompt, monkeypatch):
    seen, made, request_now = [], DraftSampler.__init__, FaultTolerantDraft._request_now

    def watch(self, model, config, generation_config, prompt_length, *others):
        seen.append(prompt_length)
        made(self, model, config, generation_config, prompt_length, *others)

    def forgets(self, *arguments):
        request = request_now(self, *arguments)
        request.prompt_length = max(map(len, request.prompts))
        return request

    monkeypatch.setattr(DraftSampler, "__init__", watch)
    if not counts_from_the_prompt:  # the mutant
        monkeypatch.setattr(FaultTolerantDraft, "_request_now", forgets)
    with Late(tiny_draft()) as assistant:
        call(target, assistant, AtLength(16, assistant.let_in))
    assert (seen == [9]) == counts_from_the_prompt


@pytest.mark.slow
def test_a_sampled_call_that_is_to_be_repeatable_waits_for_its_draft(target, draft):
    def sampled(assistant, **options):
        return call(target, assistant, seed=7, do_sample=True, top_k=0, **options)

    oracle = sampled(draft, config={"asynchronous": False})
    with Late(draft) as assistant:
        threading.Timer(0.5, assistant.gate.set).start()
        output = sampled(assistant)
    assert torch.equal(output.sequences, oracle.sequences) and output.ssd_stats.draft_joined_at == 0
    with Late(draft) as assistant:
        output = sampled(assistant, config={"lookahead": "auto"})
        assert output.ssd_stats.draft_joined_at is None and output.ssd_stats.rounds == 39
        assert "while the draft worker was starting" in output.ssd_stats.advice[0]
        start = time.monotonic()
        output = sampled(assistant, max_time=1.0)
        assert time.monotonic() - start < 20 and output.ssd_stats.draft_joined_at is None
        assistant.gate.set()


@pytest.mark.slow
def test_a_worker_that_starts_takes_no_time_from_the_call(target, fresh_python):
    draft = tiny_draft()  # a real worker, which takes seconds
    output = call(target, draft, new_tokens=230, rows=1, max_time=5.0)
    plain = target.generate(**padded_batch(1), do_sample=False, max_new_tokens=230)
    tokens = output.sequences.shape[1]
    assert output.ssd_stats.records[0].mode == IN_TURN and tokens > 30
    assert torch.equal(output.sequences, plain[:, :tokens])


# ---------------------------------------------------------------- interrupts


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that is run in some files, once a function of a name is called."""

    FILES = ("distributed/assistant.py", "distributed/shared_channel.py", "generation/draft.py")

    def __init__(self, at, begins=None):
        self.left, self.where, self.begins = at, None, begins

    def __call__(self, frame, event, argument):
        if self.begins not in (None, frame.f_code.co_name):
            return None
        self.begins = None
        is_session = frame.f_code.co_qualname.startswith("WorkerSession.")
        if not is_session and not frame.f_code.co_filename.endswith(self.FILES):
            return None
        if event == "line" and self.where is None:
            self.left -= 1
            if not self.left:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *exception):
        sys.settrace(None)
        return exception[0] is KeyboardInterrupt


def interrupted_everywhere(target, assistant, begins=None):
    """
    Interrupts a call at one line after the other, and yields those after which the call had not ended for its worker,
    or the next call did not speculate.
    """
    places, plain = set(), target.generate(**padded_batch(1), do_sample=False, max_new_tokens=12)
    for at in range(1, 1000):
        with Interrupt(at, begins) as interrupt:
            call(target, assistant, rows=1, new_tokens=3)
        if interrupt.where is None:
            break
        places.add(interrupt.where)
        if any(worker.channel is not None and worker.channel.inboxes for worker in assistant.workers):
            yield interrupt.where  # the worker still has the call
        try:
            stats = call(target, ready(assistant), rows=1, new_tokens=12, plain=plain).ssd_stats
            if not stats.hit_rate:
                yield interrupt.where
        except (ValueError, hf_ssd.DraftError):
            yield interrupt.where
    assert len(places) > 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_interrupt_at_any_line_leaves_an_assistant_that_works(target, draft):
    with DraftAssistant([ThreadWorker(draft)]) as assistant:
        assert list(interrupted_everywhere(target, assistant)) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_closing_once_would_not_be_enough(target, draft, monkeypatch):
    """The mutant: what was interrupted while it closed is not closed again."""
    original = FaultTolerantDraft.close

    def close(self):
        if not self.__dict__.get("was_closed"):
            self.was_closed = True
            original(self)

    monkeypatch.setattr(FaultTolerantDraft, "close", close)
    with DraftAssistant([ThreadWorker(draft)]) as assistant:
        assert next(interrupted_everywhere(target, assistant, begins="close"))


# ---------------------------------------------------------------- a draft in this process


@pytest.fixture
def short_sighted():
    """A draft that was tried, and raises behind its 20th position."""

    def look(_, arguments, inputs):
        if inputs["position_ids"].max() >= 20:
            raise IndexError("index out of range")

    draft = tiny_draft()
    check_supported(draft, drafts=True)
    draft.register_forward_pre_hook(look, with_kwargs=True)
    return draft


@pytest.mark.parametrize("prompt, new_tokens", [(padded_batch(2), 40), ({"input_ids": torch.full((1, 30), 7)}, 5)])
def test_a_draft_in_this_process_that_raises_costs_no_tokens(target, short_sighted, warnings, prompt, new_tokens):
    options, config = {"inputs": prompt, "new_tokens": new_tokens}, {"asynchronous": False}
    stats = call(target, short_sighted, config=config, **options).ssd_stats
    assert "The draft raised IndexError" in stats.draft_failure and len(warnings) == 1
    with pytest.raises(hf_ssd.DraftError) as raised:
        call(target, short_sighted, config={**config, "on_draft_failure": "raise"}, **options)
    assert isinstance(raised.value.__cause__, IndexError)


def test_what_the_users_fallback_raises_is_the_users(target, draft):
    class Broken:
        def propose(self, input_ids, lookahead):
            raise ZeroDivisionError

    with preparing(), pytest.raises(ZeroDivisionError):
        call(target, draft, config={"asynchronous": False, "fallback": Broken()})


# ---------------------------------------------------------------- processes that were forked

# Children that call, close or drop the assistant of their parent are in `test_calls_as_a_state_machine.py`.
PROGRAM = """
import gc, os, sys, time
import torch
import hf_ssd
from hf_ssd.distributed.launch import assistant_for
from tests.helpers.tiny import tiny_draft, tiny_model
from tests.faults.test_calls import call
from tests.helpers.at_length import AtLength
target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
assistant = hf_ssd.launch_draft(draft, num_threads=1)
plain = call(target, assistant).sequences
parent = os.getpid()

def forked(child):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        child()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0, child.__name__
    stats = call(target, assistant).ssd_stats
    assert stats.draft_failure is None and stats.hit_rate > 0, child.__name__

def has_a_worker_of_its_own():
    while call(target, draft).ssd_stats.draft_joined_at != 0:
        time.sleep(0.1)

# A start that failed is kept by its error, with its store.
call(target, draft)
(start,) = assistant_for(draft).workers
while start.process is None:
    time.sleep(0.01)
time.sleep(0.5)
start.process.popen.kill()
start.thread.join(60)
gc.disable()
assert "ended while it started" in call(target, draft).ssd_stats.draft_failure
del start
forked(gc.collect)
gc.enable()

forked(has_a_worker_of_its_own)

# In the middle of a call, which both then finish.
pids = []
output = call(target, assistant, AtLength(15, lambda: pids.append(os.fork())))
assert torch.equal(output.sequences, plain)
if os.getpid() != parent:
    assert "was forked in the middle of a call" in output.ssd_stats.draft_failure
    sys.exit(0)
assert output.ssd_stats.draft_failure is None and os.waitpid(pids[0], 0)[1] == 0
assert call(target, assistant).ssd_stats.hit_rate > 0
print("all is well", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_leaves_its_parents_worker_alone(fresh_python):
    assert "all is well" in run("-c", PROGRAM)
