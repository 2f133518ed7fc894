"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the package, and used in calls."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = ROOT.joinpath("CONTRIBUTING.md").read_text()


def code_of(name: str) -> str:
    """Returns the block of Python that defines this class."""
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```$", TEXT, re.MULTILINE | re.DOTALL)
    return next(textwrap.dedent(code) for _, code in blocks if f"class {name}(" in code)


RECIPES = {  # the files that each recipe changes, and what is put in the place of what
    "a cache shape": {
        "drafting/cache_shapes.py": [
            ("\nSHAPES = {", f"\n{code_of('Ends')}\n\nSHAPES = {{"),
            ("SHAPES = {", 'SHAPES = {\n    "ends": Ends,'),
        ],
        "config.py": [("FAN_OUTS = (", 'FAN_OUTS = ("ends", ')],
    },
    "a fallback": {
        "drafting/fallbacks.py": [
            ("\ndef fallbacks_for(", f"\n{code_of('RepeatFallback')}\n\ndef fallbacks_for("),
            ("return {NGRAM", 'return {"repeat": RepeatFallback(), NGRAM'),
        ],
        "config.py": [('"ngram", "random")', '"ngram", "random", "repeat")')],
    },
    "a drafter": {
        "drafting/twice_drafter.py": None,
        "drafting/drafters.py": [
            ("from .parallel_drafter", "from .twice_drafter import TwiceDrafter\nfrom .parallel_drafter"),
            ("fits the model\n", 'fits the model\n    "twice": TwiceDrafter,\n'),
        ],
        "config.py": [("\nDRAFTERS = (", '\nDRAFTERS = ("twice", ')],
    },
    "a planner": {
        "planning/doubling.py": None,
        "planning/planners.py": [
            ("from .fixed_plan import", "from .doubling import Doubling\nfrom .fixed_plan import"),
            (
                '    if config.lookahead != "auto" and',
                '    if config.lookahead == "doubling":\n        return Doubling(config, is_parallel)\n'
                '    if config.lookahead != "auto" and',
            ),
        ],
        "config.py": [("\nLOOKAHEADS = (", '\nLOOKAHEADS = ("doubling", ')],
    },
    "a field of the record": {
        "rounds.py": [("    compiles: bool = False", "    compiles: bool = False\n    branches: int = 0")],
        "distributed/wire.py": [("\nRECORD = {", '\nRECORD = {\n    "branches": COUNT,')],
    },
    "a message": {
        "distributed/wire.py": [
            ("\n\nclass ProtocolError", "    HEAT = 16\n\n\nclass ProtocolError"),
            ("\nPLAN = {", '\nHEAT = {"degrees": Field(0, 200)}\nPLAN = {'),
        ],
        "distributed/draft_server.py": [
            ("\nHANDLERS = {", '\nHANDLERS = {Kind.HEAT: "_heat", '),
            ("    def _translate(", code_of("Heated").partition("\n")[2] + "\n    def _translate("),
        ],
    },
}

PROGRAM = """
import torch
import hf_ssd
from hf_ssd.distributed import wire
from hf_ssd.distributed.local import LocalWorker
from hf_ssd.rounds import AHEAD, RoundRecord, Speculation
from tests.conftest import padded_batch, tiny_draft, tiny_model
from tests.stand_ins.thread_worker import ThreadWorker

target, inputs = hf_ssd.enable(tiny_model()), padded_batch(2)
plain = target.generate(**inputs, do_sample=False, max_new_tokens=40)
with hf_ssd.distributed.assistant.DraftAssistant([ThreadWorker(tiny_draft())]) as worker:
    for settings in ({"fan_out": "ends"}, {"fallback": "repeat"}, {"drafter": "twice"}, {"lookahead": "doubling"}):
        output = target.generate(
            **inputs, do_sample=False, max_new_tokens=40, assistant_model=worker, return_dict_in_generate=True,
            ssd_config=hf_ssd.SSDConfig(**{"lookahead": 3, "budget": 4, **settings}),
        )
        stats = output.ssd_stats
        assert stats.draft_failure is None and {*stats.column("mode")} == {AHEAD}, stats.draft_failure
        assert torch.equal(output.sequences, plain) and any(map(any, stats.column("hits")))
        repeats = any("repeat" in sources for sources in stats.column("sources"))
        assert repeats == ("fallback" in settings)
        assert ({4, 8} <= {*stats.column("lookahead")}) == ("lookahead" in settings)
told = Speculation([[1]], None, RoundRecord(branches=7, sources=["ngram"]))
told = wire.read_speculation(wire.write_speculation(told), 1)
assert told.record.branches == 7
worker = LocalWorker(tiny_draft())
worker.channel.send(wire.Message(wire.Kind.HEAT, payload=[70]))
worker.work()
assert worker.server.degrees == 70
print(hf_ssd.__file__, "done")
"""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_changes_one_or_two_files(name):
    changed = [file for file, edits in RECIPES[name].items() if edits is not None]
    assert len(changed) <= 2 and all(f"hf_ssd/{file}" in TEXT for file in RECIPES[name])


def test_what_the_recipes_make_is_used_in_calls(tmp_path, fresh_python):
    package = tmp_path / "hf_ssd"
    shutil.copytree(ROOT / "hf_ssd", package, ignore=shutil.ignore_patterns("__pycache__"))
    package.joinpath("drafting/twice_drafter.py").write_text(code_of("TwiceDrafter"))
    package.joinpath("planning/doubling.py").write_text(code_of("Doubling"))
    for recipe in RECIPES.values():
        for file, edits in recipe.items():
            for before, after in edits or ():
                text = package.joinpath(file).read_text()
                assert text.count(before) == 1, (file, before)
                package.joinpath(file).write_text(text.replace(before, after))
    program = f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{PROGRAM}"
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.split() == [str(package / "__init__.py"), "done"]
