"""Systems that lack what Linux has: the missing functions are taken away here."""

import ast
import logging
import os
from pathlib import Path

import pytest

import hf_ssd

from ..helpers.calls import call
from ..helpers.tiny import tiny_draft

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


def posix_imports_of(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    names = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    return POSIX_ALONE & {*names, *(getattr(node, "module", None) for node in body)}


def test_every_module_can_be_imported_without_what_windows_lacks():
    modules = list(Path(hf_ssd.__path__[0]).rglob("*.py"))
    assert len(modules) > 50 and [path for path in modules if posix_imports_of(path)] == []


def test_on_windows_a_loaded_draft_drafts_in_turn_and_others_are_refused(target, monkeypatch, tmp_path, caplog):
    draft = tiny_draft()
    draft.save_pretrained(tmp_path)
    monkeypatch.delattr(os, "fork")
    sentence = "A draft worker needs Linux or macOS. On Windows run the program under WSL, or pass the draft as a load"
    with pytest.raises(ValueError, match=sentence):
        hf_ssd.launch_draft(draft)
    with pytest.raises(ValueError, match=sentence):
        call(target, str(tmp_path))
    with caplog.at_level(logging.WARNING):
        stats = [call(target, draft).ssd_stats for _ in range(2)]
    for one in stats:
        assert one.draft_failure is None and set(one.column("mode")) == {"in_turn"}
    assert caplog.text.count(sentence) == 1


@pytest.mark.slow
def test_a_worker_without_the_functions_of_linux(target, monkeypatch, tmp_path, fresh_python):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX)
    monkeypatch.syspath_prepend(tmp_path)  # the worker has it in its path, so it runs at the worker's start
    for name in NOT_ON_MACOS:
        monkeypatch.delattr(os, name)
    is_folder = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: not str(path).startswith("/proc") and is_folder(path))
    with hf_ssd.launch_draft(tiny_draft(), num_threads=1) as assistant:
        stats = call(target, assistant).ssd_stats
    assert stats.draft_failure is None and stats.hit_rate > 0
