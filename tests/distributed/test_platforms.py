"""Systems that lack what Linux has: the missing functions are taken away here."""

import ast
import logging
import os
from pathlib import Path

import pytest

import hf_ssd

from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

POSIX_ALONE = {"curses", "fcntl", "grp", "pty", "pwd", "readline", "resource", "termios", "tty"}
NOT_ON_MACOS = ("memfd_create", "sched_getaffinity", "sched_getscheduler", "sched_setaffinity", "sched_setscheduler")
NOT_ON_MACOS += ("SCHED_BATCH",)
WITHOUT_LINUX = f"""
import os

for name in {NOT_ON_MACOS}:
    delattr(os, name)
is_folder = os.path.isdir
os.path.isdir = lambda path: not str(path).startswith("/proc") and is_folder(path)
"""
OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
OPTIONS |= {"return_dict_in_generate": True}


def posix_imports_of(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    names = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    return POSIX_ALONE & {*names, *(getattr(node, "module", None) for node in body)}


def test_every_module_can_be_imported_without_what_windows_lacks():
    modules = list(Path(hf_ssd.__path__[0]).rglob("*.py"))
    assert len(modules) > 50 and [path for path in modules if posix_imports_of(path)] == []


def test_on_windows_a_loaded_draft_drafts_in_turn_and_others_are_refused(monkeypatch, tmp_path, caplog):
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
    draft.save_pretrained(tmp_path)
    plain = target.generate(**padded_batch(2), **OPTIONS).sequences
    config = hf_ssd.SSDConfig(lookahead=4, budget=8)
    monkeypatch.delattr(os, "fork")
    sentence = (
        "A draft worker needs Linux or macOS. On Windows run the program under WSL, or pass the draft as a loaded"
    )
    with pytest.raises(ValueError, match=sentence):
        hf_ssd.launch_draft(draft)
    with pytest.raises(ValueError, match=sentence):
        target.generate(**padded_batch(2), **OPTIONS, assistant_model=str(tmp_path), ssd_config=config)
    with caplog.at_level(logging.WARNING):
        outputs = [
            target.generate(**padded_batch(2), **OPTIONS, assistant_model=draft, ssd_config=config) for _ in range(2)
        ]
    for output in outputs:
        assert output.sequences.equal(plain)
        assert output.ssd_stats.draft_failure is None and set(output.ssd_stats.column("mode")) == {"in_turn"}
    assert caplog.text.count(sentence) == 1


@pytest.mark.slow
def test_a_worker_without_the_functions_of_linux(monkeypatch, tmp_path, fresh_python):
    target = hf_ssd.enable(tiny_model())
    plain = target.generate(**padded_batch(2), **OPTIONS).sequences
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX)
    monkeypatch.syspath_prepend(tmp_path)  # the worker has it in its path, so it runs at the worker's start
    for name in NOT_ON_MACOS:
        monkeypatch.delattr(os, name)
    is_folder = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: not str(path).startswith("/proc") and is_folder(path))
    with hf_ssd.launch_draft(tiny_draft(), num_threads=1) as assistant:
        output = target.generate(
            **padded_batch(2), **OPTIONS, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(lookahead=4, budget=8)
        )
    assert output.sequences.equal(plain) and output.ssd_stats.draft_failure is None
    assert output.ssd_stats.hit_rate > 0
