"""Starting and ending worker processes."""

import gc
import json
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, QuantoConfig
from transformers.utils import logging

import hf_ssd
from hf_ssd.distributed import worker_process
from hf_ssd.distributed.launch import assistant_for, worker_settings
from hf_ssd.distributed.worker import load_model
from hf_ssd.drafting.resolver import config_at
from hf_ssd.rounds import IN_TURN

from ..helpers.processes import children, ends_within, noted_workers
from ..helpers.tiny import padded_batch, ready, tiny_draft, tiny_model

CONFIG = hf_ssd.SSDConfig(lookahead=3, budget=8, fan_out="uniform")


@pytest.mark.slow
def test_a_draft_passed_as_an_object_gets_one_worker_that_ends_with_it(target, fresh_python):
    draft, before = tiny_draft(), children()
    options = {**padded_batch(1), "max_new_tokens": 5, "return_dict_in_generate": True, "ssd_config": CONFIG}
    first = target.generate(**options, assistant_model=draft)
    assert {record.mode for record in first.ssd_stats.records} == {IN_TURN}  # while the worker is starting
    assert first.ssd_stats.acceptance_rate > 0
    (pid,) = children() - before
    assert ready(assistant_for(draft)).workers[0].process.popen.pid == pid
    output = target.generate(**options, assistant_model=draft)
    assert torch.equal(output.sequences, first.sequences) and output.ssd_stats.hit_rate > 0
    assert children() - before == {pid}
    gone = weakref.ref(draft)
    del draft
    gc.collect()
    assert gone() is None and ends_within(pid, 5)


def test_a_folder_as_assistant_model_is_checked_before_it_is_loaded(tmp_path, target):
    tiny_draft(vocab_size=300).save_pretrained(tmp_path)
    before = children()
    with pytest.raises(ValueError, match="vocabulary of 97 tokens and the draft one of 300"):
        target.generate(**padded_batch(1), max_new_tokens=5, assistant_model=tmp_path, ssd_config=CONFIG)
    assert children() == before


@pytest.fixture
def started(monkeypatch):
    return noted_workers(monkeypatch)


@pytest.mark.parametrize(
    "model, words",
    [
        (tiny_draft().config, "could not load its model: OSError: .*safetensors.*\n.*Traceback"),
        (MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=97)), "cannot be rolled back"),
    ],
    ids=["without weights", "recurrent"],
)
def test_a_worker_that_cannot_draft_says_why_in_the_first_line_and_leaves_no_process(model, words, tmp_path, started):
    model.save_pretrained(tmp_path)
    with pytest.raises(hf_ssd.DraftError, match=words):
        hf_ssd.launch_draft(tmp_path)
    assert [worker.poll() is None for worker in started] == [False]


def test_a_quantization_config_reaches_the_worker(tmp_path, monkeypatch):
    given, loaded = QuantoConfig(weights="int4"), {}

    def from_pretrained(path, **options):
        loaded.update(options)
        return tiny_draft()

    settings = json.loads(json.dumps(worker_settings(tmp_path, None, None, {"quantization_config": given})))
    loader = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setattr("hf_ssd.distributed.worker.AutoModelForCausalLM", loader)
    load_model({**settings, "weights": None, "device": "cpu"})
    assert loaded["quantization_config"].to_dict() == given.to_dict() and loaded["device_map"] == {"": "cpu"}
    assert type(loaded["quantization_config"]) is QuantoConfig


def test_a_folder_with_adapters_has_the_config_of_their_model(tmp_path, monkeypatch):
    tiny_draft().save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    adapter = {"base_model_name_or_path": str(tmp_path / "base"), "peft_type": "LORA"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    monkeypatch.setattr("hf_ssd.drafting.resolver.is_peft_available", lambda: True)
    assert config_at(tmp_path / "adapter").vocab_size == 97
    monkeypatch.setattr("hf_ssd.drafting.resolver.is_peft_available", lambda: False)
    with pytest.raises(ValueError, match="is a folder without a model"):
        config_at(tmp_path / "adapter")


def test_a_worker_that_dies_while_it_starts_is_explained(monkeypatch, tmp_path, folder, fresh_python):
    (tmp_path / "hf_ssd").mkdir()
    (tmp_path / "hf_ssd" / "__init__.py").write_text("raise ImportError('this installation is broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = children()
    with pytest.raises(hf_ssd.DraftError, match="ended while it started: ImportError: this installation is broken\n"):
        hf_ssd.launch_draft(folder)
    assert children() <= before


def test_a_worker_that_dies_while_it_connects_is_noticed_at_once(monkeypatch, started):
    """What gloo says of it comes later."""
    is_over = threading.Event()

    def channel(*args, **kwargs):
        started[0].kill()
        is_over.wait(60)
        raise RuntimeError("gloo has given up")

    monkeypatch.setattr(worker_process, "Channel", channel)
    with pytest.raises(hf_ssd.DraftError, match="ended while it started"):
        hf_ssd.launch_draft(tiny_draft(), num_threads=1)
    is_over.set()


def test_bad_arguments(draft, monkeypatch):
    for options, words in [
        ({"dtype": "bfloat16"}, "already loaded"),
        ({"num_threads": 99}, "`num_threads` is 99"),
        ({"device": "cpu", "devices": ["cpu"]}, "takes the place of `device`"),
        ({"devices": []}, "one device for each worker"),
    ]:
        with pytest.raises(ValueError, match=words):
            hf_ssd.launch_draft(draft, **options)
    monkeypatch.setattr("hf_ssd.devices.accelerators", lambda: [torch.device("cuda:0")])
    with pytest.raises(ValueError, match="is for a draft on the CPU"):
        hf_ssd.launch_draft("anything", device="cuda:0", num_threads=1)


PROGRAM = textwrap.dedent(
    """
    import os, hf_ssd, torch
    from transformers import AutoModelForCausalLM
    torch.set_num_threads(1)
    target = hf_ssd.enable(AutoModelForCausalLM.from_pretrained({folder!r}))
    draft = AutoModelForCausalLM.from_pretrained({folder!r})
    hit_rate = 0
    while hit_rate != 1:  # until the worker is ready, the draft drafts in turn
        output = target.generate(torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3), max_new_tokens=8,
                                 do_sample=False, assistant_model=draft,
                                 ssd_config=hf_ssd.SSDConfig(fan_out=[2, 2, 2, 2]), return_dict_in_generate=True)
        hit_rate = output.ssd_stats.hit_rate

    from hf_ssd.distributed.launch import assistant_for
    print(assistant_for(draft).workers[0].process.popen.pid, hit_rate, flush=True)
    {last}
    """
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("how, end", [("script without a guard", ""), ("interactive", "os.kill(os.getpid(), 9)")])
def test_every_way_to_run_python_and_the_worker_ends_with_it(how, end, folder, tmp_path, fresh_python):
    program = PROGRAM.format(folder=folder, last=end)
    (tmp_path / "program.py").write_text(program)
    # As in a notebook, `__main__` of an interactive program has no file.
    command, typed = ([str(tmp_path / "program.py")], None) if how == "script without a guard" else (["-i"], program)
    run = subprocess.run([sys.executable, *command], input=typed, capture_output=True, text=True, timeout=120)
    assert (run.returncode == 0) == (end == ""), run.stderr
    pid, hit_rate = run.stdout.split()
    assert hit_rate == "1.0" and ends_within(int(pid), 5)


def test_a_slow_start_shows_that_it_goes_on(monkeypatch, capsys):
    monkeypatch.setattr("hf_ssd.distributed.assistant.SHOWN_AFTER", 0.0)
    logging.enable_progress_bar()  # which a program run in this process may have switched off
    start = time.monotonic()
    hf_ssd.launch_draft(tiny_draft(), num_threads=1).close()
    seconds, shown = time.monotonic() - start, capsys.readouterr().err.count("starting the draft")
    assert 1 <= shown <= 3 + seconds  # once a second, at first, when the worker is there, and at the end
    logging.disable_progress_bar()
    try:
        hf_ssd.launch_draft(tiny_draft(), num_threads=1).close()
    finally:
        logging.enable_progress_bar()
    assert not capsys.readouterr().err


def test_whether_the_worker_compiles_is_as_with_the_model_unless_said(tmp_path):
    draft, compiled = tiny_draft(num_hidden_layers=1), tiny_draft(num_hidden_layers=1)
    compiled.compile()
    for model, unless_said in [(draft, False), (compiled, True), (tmp_path, False)]:
        for said, expected in [(None, unless_said), (True, True), (False, False)]:
            assert worker_settings(model, None, said, {})["compile"] is expected


@pytest.mark.slow
def test_without_a_compiler_the_draft_runs_as_it_is(tmp_path, monkeypatch, caplog):
    target, draft = hf_ssd.enable(tiny_model(num_hidden_layers=1)), tiny_draft(num_hidden_layers=1)
    monkeypatch.setenv("CXX", str(tmp_path / "no_such_compiler"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    inputs, options = padded_batch(2), {"max_new_tokens": 20, "do_sample": False}
    logging.enable_propagation()
    with hf_ssd.launch_draft(draft, num_threads=1, compile=True) as assistant:
        assert "no_such_compiler" in assistant.workers[0].worker_info["uncompiled_because"]
        output = target.generate(**inputs, **options, assistant_model=assistant, ssd_config=CONFIG)
    logging.disable_propagation()
    assert torch.equal(output, target.generate(**inputs, **options))
    assert "The draft runs without torch.compile: " in caplog.text and "no_such_compiler" in caplog.text


def test_a_draft_on_the_target_s_accelerator_is_warned_of(target, assistant, monkeypatch):
    said, inputs = [], {"input_ids": torch.tensor([[3, 5, 7]]), "max_new_tokens": 4, "assistant_model": assistant}
    monkeypatch.setattr("hf_ssd.devices.logger", SimpleNamespace(warning_once=said.append))
    target.generate(**inputs, ssd_config=hf_ssd.SSDConfig(lookahead=2, budget=2))
    assert not said  # both are on the CPU, where each has cores of its own
    monkeypatch.setattr("hf_ssd.devices.identity", lambda device: "one GPU")
    monkeypatch.setitem(assistant.workers[0].worker_info, "identity", "one GPU")
    target.generate(**inputs, ssd_config=hf_ssd.SSDConfig(lookahead=2, budget=2))
    assert len(said) == 1 and "can be slower than drafting in turn" in said[0]
