"""`pytest -m gpu` in a process of its own, for a limited time."""

import os
import re
import sys
from collections import Counter
from pathlib import Path

from .clock import run_for
from .results import Report

ROOT = Path(__file__).parents[2]
OUTCOME = re.compile(r"^(tests/\S+?::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)", re.MULTILINE)
IN_A_DRY_RUN = ["-k", "oracle"]


def measure(args, layout, report: Report, seconds: float) -> None:
    """Runs the tests, and notes the outcome of each that ended in time."""
    # Options that need plugins of pytest are left out: none of them need be installed.
    options = ["-m", "gpu", "-v", "--tb=short", "-o", "addopts=", "-p", "no:cacheprovider"]
    options += IN_A_DRY_RUN if args.dry_run else []
    command = [sys.executable, "-m", "pytest", "tests/gpu", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if args.dry_run:
        environment["HF_SSD_TEST_DEVICES"] = "cpu"
    part = report.begin("tests", {"command": " ".join(["pytest", *command[3:]])})
    if not (ROOT / "tests" / "gpu").is_dir():
        part["result"] = "the tests are not part of an installation; run this in a clone"
        report.save()
        return
    log = report.folder / "tests.txt"
    code = run_for(seconds, command, log, cwd=ROOT, env=environment)
    part["result"] = "passed" if code == 0 else f"pytest ended with {code}"
    if code is None:
        part["result"] = f"cut off after {seconds:.0f} s"
    part["outcomes"] = dict(OUTCOME.findall(log.read_text(errors="replace")))
    part["counts"] = {name.lower(): count for name, count in Counter(part["outcomes"].values()).items()}
    report.save()
