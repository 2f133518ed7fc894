"""Memory is free when a call returns, descriptors do not run out, and workers can be closed."""

import gc
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import hf_ssd
from hf_ssd.distributed import launch, meeting, worker_process
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.sessions import DraftError
from hf_ssd.distributed.worker_process import WorkerProcess
from hf_ssd.drafting.draft_info import DraftInfo

from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import padded_batch, ready, tiny_draft, tiny_model

FIXED = hf_ssd.SSDConfig(lookahead=3, budget=8)
IN_TURN = hf_ssd.SSDConfig(lookahead=3, asynchronous=False)


def workers_are(monkeypatch, command: list[str]) -> None:
    """Starts another program in the place of each worker."""
    popen = subprocess.Popen
    monkeypatch.setattr(worker_process.subprocess, "Popen", lambda _, **options: popen(command, **options))


# ---------------------------------------------------------------- memory


class Interrupt(LogitsProcessor):
    """Ends a call after some rounds as Ctrl-C does."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls > 5:
            raise KeyboardInterrupt
        return scores


def tensors_left(call) -> int:
    """Returns how many tensors wait for Python's cyclic collector after a call."""
    call()  # what is loaded or learned once is not meant
    gc.collect()
    gc.disable()
    try:
        call()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def generate(target, draft, config, **options):
    return target.generate(
        **padded_batch(2), **{"max_new_tokens": 12, **options}, assistant_model=draft, ssd_config=config
    )


def generate_broken_off(target, draft, config):
    with pytest.raises(KeyboardInterrupt):
        generate(target, draft, config, logits_processor=LogitsProcessorList([Interrupt()]))


CALLS = {
    "greedy": lambda *call: generate(*call),
    "sampled": lambda *call: generate(*call, do_sample=True),
    "with scores": lambda *call: generate(*call, return_dict_in_generate=True, output_scores=True, output_logits=True),
    "streamed": lambda *call: generate(*call, streamer=hf_ssd.RoundStreamer(lambda stats: None)),
    "broken off": generate_broken_off,
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("place", ["in turn", "worker"])
def test_the_memory_of_a_call_is_free_when_it_returns(place, kind, target, draft):
    """The worker is a thread here, so what waits for the collector on both sides is seen."""
    if place == "in turn":
        assert tensors_left(lambda: CALLS[kind](target, draft, IN_TURN)) == 0
        return
    with DraftAssistant([ThreadWorker(draft)]) as assistant:
        assert tensors_left(lambda: CALLS[kind](target, assistant, FIXED)) == 0


def test_the_memory_of_a_call_whose_draft_cannot_start_is_free_when_it_returns(target):
    def fail():
        raise DraftError("no")

    def call():
        broken = DraftAssistant([WorkerProcess(fail, 60.0)], wait=False)
        broken.workers[0].thread.join()
        broken.info = DraftInfo(97)
        assert generate(target, broken, FIXED, return_dict_in_generate=True).ssd_stats.draft_failure == "no"

    assert tensors_left(call) == 0


def test_the_memory_of_a_draft_whose_worker_does_not_start_is_free(draft, monkeypatch):
    workers_are(monkeypatch, ["/bin/false"])

    def call():
        with pytest.raises(hf_ssd.DraftError, match="ended while it started"):
            hf_ssd.launch_draft(draft, num_threads=1)

    assert tensors_left(call) == 0


@pytest.mark.slow
def test_no_process_grows_without_the_collector(monkeypatch):
    """A worker of its own process, in which the collector is off as well."""
    sizes = {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 600}
    target, draft = hf_ssd.enable(tiny_model(**sizes)), tiny_draft(**sizes)
    program = "import gc; gc.disable(); from hf_ssd.distributed.worker import main; main()"
    workers_are(monkeypatch, [sys.executable, "-c", program])
    prompts = torch.randint(2, 97, (9, 4, 500), generator=torch.Generator().manual_seed(0))
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        processes = [psutil.Process(), psutil.Process(assistant.workers[0].process.popen.pid)]

        def megabytes(prompts):
            for batch in prompts:
                target.generate(batch, max_new_tokens=4, assistant_model=assistant, ssd_config=FIXED)
            return [one.memory_info().rss / 2**20 for one in processes]

        gc.disable()
        try:
            before = megabytes(prompts[:3])
            after = megabytes(prompts[3:])
        finally:
            gc.enable()
    cache = 2 * 3 * prompts[0].numel() * 4 * 128 * 4 / 2**20
    for grown in (new - old for new, old in zip(after, before)):
        assert grown < 2 * cache, (before, after)


# ---------------------------------------------------------------- descriptors


def kill_while_it_starts(monkeypatch, folder):
    popen = subprocess.Popen

    def killed(_, **options):
        started = popen(["sleep", "60"], **options)
        started.kill()
        return started

    monkeypatch.setattr(worker_process.subprocess, "Popen", killed)


def nothing_to_load(monkeypatch, folder):
    monkeypatch.setattr(launch, "SharedWeights", lambda model: None)  # so that the worker looks for a folder
    (folder / "model.safetensors").write_bytes(b"nothing")


FAILURES = {
    "exits at once": lambda monkeypatch, folder: workers_are(monkeypatch, ["/bin/false"]),
    "no program": lambda monkeypatch, folder: workers_are(monkeypatch, ["/nonexistent"]),
    "killed while it starts": kill_while_it_starts,
    "no connection": lambda monkeypatch, folder: monkeypatch.setattr(worker_process, "Channel", None),
    "cannot load": nothing_to_load,
}


QUICK = ["exits at once", "no program", "killed while it starts"]  # in which nothing is loaded


@pytest.mark.parametrize("failure", FAILURES)
def test_starts_that_fail_leave_no_descriptor(failure, tmp_path, monkeypatch):
    tiny_draft().save_pretrained(tmp_path)
    FAILURES[failure](monkeypatch, tmp_path)

    def fail(times):
        for draft in [tiny_draft(), str(tmp_path)] * times:
            with pytest.raises(hf_ssd.DraftError):
                hf_ssd.launch_draft(draft, num_threads=1)
        return psutil.Process().num_fds()

    before = fail(1)
    assert fail(10 if failure in QUICK else 2) == before


def test_after_half_an_entry_workers_meet_in_another_file():
    place, _ = meeting.private_meeting()
    store = meeting.join(place, 5.0)
    store.set("here", "yes")
    meeting.check_file(place)
    again, _ = meeting.private_meeting()
    assert again["path"] == place["path"]
    with open(place["path"], "ab") as file:
        file.write((9).to_bytes(4, sys.byteorder) + b"ref")
    meeting.check_file(place)
    again, _ = meeting.private_meeting()
    assert again["path"] != place["path"]
    with open(place["path"], "ab") as file:  # the store reads the rest when it is collected
        file.write(b"count/" + (1).to_bytes(4, sys.byteorder) + b"9")


CLOSED = """
import os, sys
for descriptor in {closed}:  # as in an interpreter that starts without them
    os.close(descriptor)
    setattr(sys, ["stdin", "stdout", "stderr"][descriptor], None)
import torch, hf_ssd
from transformers import AutoModelForCausalLM
target = hf_ssd.enable(AutoModelForCausalLM.from_pretrained({folder!r}))
draft = AutoModelForCausalLM.from_pretrained({folder!r})
with hf_ssd.launch_draft(draft, num_threads=1, timeout=60) as assistant:
    output = target.generate(
        torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3), max_new_tokens=8, do_sample=False,
        assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(lookahead=3, on_draft_failure="raise"),
        return_dict_in_generate=True,
    )
    with open({result!r}, "w") as file:
        print(output.ssd_stats.acceptance_rate, file=file)
"""


def test_a_program_without_standard_input_has_a_worker(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    result = tmp_path / "result"
    program = CLOSED.format(closed=[0], folder=str(tmp_path), result=str(result))
    subprocess.run([sys.executable, "-c", program], timeout=120)
    assert result.read_text().split() == ["1.0"]


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_a_daemon_has_a_worker(closed, tmp_path, fresh_python):
    tiny_model().save_pretrained(tmp_path)
    result = tmp_path / "result"
    (tmp_path / "script.py").write_text(CLOSED.format(closed=[], folder=str(tmp_path), result=str(result)))
    subprocess.run(["sh", "-c", f'exec "$0" "$1" {closed}', sys.executable, tmp_path / "script.py"], timeout=200)
    assert result.read_text().split() == ["1.0"]


def test_what_a_worker_writes_to_its_standard_error_is_bounded(assistant):
    ready(assistant)
    (worker,) = assistant.workers
    line, pid, limit = b"a warning of many\n", worker.process.popen.pid, worker_process.STDERR_LIMIT
    with open(f"/proc/{pid}/fd/2", "ab") as stderr:
        stderr.write(line * (limit // len(line) + 1))
        stderr.write("the last one, café\n".encode())
    deadline = time.monotonic() + 30
    while os.fstat(worker.process.stderr.fileno()).st_size > limit and time.monotonic() < deadline:
        worker.stderr_tail()  # moves no place at which the worker writes
        time.sleep(0.05)
    assert os.fstat(worker.process.stderr.fileno()).st_size <= limit
    written = worker.stderr_tail()
    assert written.endswith("a warning of many\nthe last one, café") and len(written) <= worker_process.STDERR_TAIL


def test_a_worker_that_meets_an_error_of_the_protocol_ends_at_once():
    program = (
        "import os, threading\n"
        "from hf_ssd.distributed import worker\n"
        "from hf_ssd.distributed.wire import ProtocolError\n"
        "def run():\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"  # as gloo's, which an orderly exit waits for
        "    raise ProtocolError('nonsense')\n"
        "worker.run = run\n"
        "worker.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=60)
    assert ended.returncode == 1 and b"ProtocolError: nonsense" in ended.stderr


# ---------------------------------------------------------------- closing


@pytest.mark.parametrize("kind", ["model", "folder", "all"])
def test_a_worker_that_a_call_started_can_be_closed(kind, tmp_path, target):
    tiny_draft().save_pretrained(tmp_path)
    draft = str(tmp_path) if kind == "folder" else tiny_draft()
    generate(target, draft, FIXED)
    process = ready(launch.assistant_for(draft)).workers[0].process
    assert process.is_running
    hf_ssd.close(*([] if kind == "all" else [draft]))
    assert not process.is_running
    output = generate(target, draft, FIXED, return_dict_in_generate=True)  # which starts another one
    assert torch.equal(output.sequences, target.generate(**padded_batch(2), max_new_tokens=12))
    assert ready(launch.assistant_for(draft)).workers[0].process is not process
    hf_ssd.close(draft)
    hf_ssd.close(draft)


def test_what_close_does_not_take_is_said(assistant):
    with pytest.raises(TypeError, match="DraftAssistant has a close"):
        hf_ssd.close(assistant)


def test_a_disabled_model_is_as_it_was_before(draft):
    model = tiny_model()
    kind = type(model)
    hf_ssd.enable(model, draft, IN_TURN)
    assert type(model) is not kind
    assert hf_ssd.disable(model) is model and type(model) is kind
    assert not hasattr(model.generate(**padded_batch(2), max_new_tokens=4, return_dict_in_generate=True), "ssd_stats")
    hf_ssd.disable(model)
    output = hf_ssd.enable(model).generate(**padded_batch(2), max_new_tokens=4, return_dict_in_generate=True)
    assert not hasattr(output, "ssd_stats")  # the draft was forgotten


def test_an_assistant_tells_where_and_what_it_is(draft):
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        pid = assistant.workers[0].process.popen.pid
        assert repr(assistant) == f"DraftAssistant('', device='cpu', state='ready', processes=[{pid}])"
    assert repr(assistant) == "DraftAssistant('', device='cpu', state='closed', processes=[])"
