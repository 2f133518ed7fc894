"""Memory is free when a call returns, descriptors do not run out, and workers can be closed."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LogitsProcessorList

import hf_ssd
from hf_ssd.distributed import launch, meeting, worker_process
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.sessions import DraftError
from hf_ssd.distributed.worker_process import WorkerProcess
from hf_ssd.drafting.draft_info import DraftInfo

from ..helpers.at_length import AtLength
from ..helpers.calls import call
from ..helpers.processes import workers_are
from ..helpers.programs import run
from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import padded_batch, ready, tiny_draft, tiny_model

FIXED = hf_ssd.SSDConfig(lookahead=3, budget=8)
IN_TURN = hf_ssd.SSDConfig(lookahead=3, asynchronous=False)


# ---------------------------------------------------------------- memory


def tensors_left(step) -> int:
    """Returns how many tensors wait for Python's cyclic collector after a call."""
    step()  # what is loaded or learned once is not meant
    gc.collect()
    gc.disable()
    try:
        step()
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
    """As by Ctrl-C, after some rounds."""
    with pytest.raises(KeyboardInterrupt):
        generate(target, draft, config, logits_processor=LogitsProcessorList([AtLength(14, interrupt)]))


def interrupt():
    raise KeyboardInterrupt


CALLS = {
    "sampled": lambda *call: generate(*call, do_sample=True),
    "with scores": lambda *call: generate(*call, return_dict_in_generate=True, output_scores=True, output_logits=True),
    "streamed": lambda *call: generate(*call, streamer=hf_ssd.RoundStreamer(lambda stats: None)),
    "broken off": generate_broken_off,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place, kind", [*(("worker", kind) for kind in CALLS), ("in turn", "sampled"), ("in turn", "broken off")]
)
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

    def call_in_vain():
        broken = DraftAssistant([WorkerProcess(fail, 60.0)], wait=False)
        broken.workers[0].thread.join()
        broken.info = DraftInfo(97)
        assert generate(target, broken, FIXED, return_dict_in_generate=True).ssd_stats.draft_failure == "no"

    assert tensors_left(call_in_vain) == 0


def test_the_memory_of_a_draft_whose_worker_does_not_start_is_free(draft, monkeypatch):
    workers_are(monkeypatch, ["/bin/false"])

    def call():
        with pytest.raises(hf_ssd.DraftError, match="ended while it started"):
            hf_ssd.launch_draft(draft, num_threads=1)

    assert tensors_left(call) == 0


# ---------------------------------------------------------------- descriptors


def nothing_to_load(monkeypatch, folder):
    monkeypatch.setattr(launch, "SharedWeights", lambda model: None)  # so that the worker looks for a folder
    (folder / "model.safetensors").write_bytes(b"nothing")


FAILURES = {
    "exits at once": lambda monkeypatch, folder: workers_are(monkeypatch, ["/bin/false"]),
    "no program": lambda monkeypatch, folder: workers_are(monkeypatch, ["/nonexistent"]),
    "no connection": lambda monkeypatch, folder: monkeypatch.setattr(worker_process, "Channel", None),
    "cannot load": nothing_to_load,
}


QUICK = ["exits at once", "no program"]  # in which nothing is loaded


@pytest.mark.slow
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
import hf_ssd
from tests.helpers.calls import call
from tests.helpers.tiny import tiny_model
with hf_ssd.launch_draft(tiny_model(), num_threads=1, timeout=60) as assistant:
    stats = call(hf_ssd.enable(tiny_model()), assistant, settings={{"on_draft_failure": "raise"}}).ssd_stats
    with open({result!r}, "w") as file:
        print(stats.acceptance_rate, file=file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_daemon", [False, True])
def test_a_program_without_standard_streams_has_a_worker(tmp_path, is_daemon, request, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    result, command = tmp_path / "result", [sys.executable, str(tmp_path / "script.py")]
    (tmp_path / "script.py").write_text(CLOSED.format(closed=[] if is_daemon else [0], result=str(result)))
    if is_daemon:
        request.getfixturevalue("fresh_python")
        command = ["sh", "-c", 'exec "$0" "$1" <&- >&- 2>&-', *command]
    subprocess.run(command, timeout=200)
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
        worker.process.stderr_tail()  # moves no place at which the worker writes
        time.sleep(0.05)
    assert os.fstat(worker.process.stderr.fileno()).st_size <= limit
    written = worker.process.stderr_tail()
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
    assert "ProtocolError: nonsense" in run("-c", program, status=1, timeout=60)


# ---------------------------------------------------------------- closing


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "folder", "all"])
def test_a_worker_that_a_call_started_can_be_closed(kind, tmp_path, target):
    tiny_draft().save_pretrained(tmp_path)
    draft = str(tmp_path) if kind == "folder" else tiny_draft()
    call(target, draft)
    assistant = ready(launch.assistant_for(draft))
    process = assistant.workers[0].process
    assert process.is_running and assistant.finalizer.atexit
    if kind == "folder":  # by either kind of path, it is one worker
        assert launch.assistant_for(tmp_path) is assistant and call(target, tmp_path).ssd_stats.hit_rate > 0
    hf_ssd.close(*([] if kind == "all" else [draft]))
    assert not process.is_running
    call(target, draft)  # which starts another one
    assert ready(launch.assistant_for(draft)).workers[0].process is not process
    hf_ssd.close(draft)
    hf_ssd.close(draft)


def test_an_assistant_tells_where_and_what_it_is_and_closes_itself(draft):
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        pid = assistant.workers[0].process.popen.pid
        assert repr(assistant) == f"DraftAssistant('', device='cpu', state='ready', processes=[{pid}])"
        with pytest.raises(TypeError, match="DraftAssistant has a close"):
            hf_ssd.close(assistant)
    assert repr(assistant) == "DraftAssistant('', device='cpu', state='closed', processes=[])"


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
