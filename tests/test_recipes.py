"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the package, and used in calls."""

import re
import shutil
import textwrap

import pytest

from .helpers import programs
from .helpers.programs import ROOT

TEXT = ROOT.joinpath("CONTRIBUTING.md").read_text()


def code_of(name: str) -> str:
    """Returns the block of Python that defines this class, or a test whose name begins so."""
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```$", TEXT, re.MULTILINE | re.DOTALL)
    return next(textwrap.dedent(code) for _, code in blocks if f"class {name}(" in code or f"def {name}" in code)


RECIPES = {  # the files that each recipe changes, and what is put in the place of what
    "a cache shape": {
        "drafting/cache_shapes.py": [
            ("\nSHAPES = {", f"\n{code_of('Ends')}\n\nSHAPES = {{"),
            ("SHAPES = {", 'SHAPES = {\n    "ends": Ends,'),
        ],
        "config.py": [("FAN_OUTS = (", 'FAN_OUTS = ("ends", ')],
    },
    "a fallback": {
        "generation/proposers/repeat.py": None,
        "generation/proposers/__init__.py": [
            ("from .random_tokens import", "from .repeat import RepeatFallback\nfrom .random_tokens import"),
            ("    NGRAM: lambda", '    "repeat": lambda request: RepeatFallback(),\n    NGRAM: lambda'),
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
    "a head": {
        "drafting/heads/eagle.py": None,
        "drafting/heads/loading.py": [
            ("from .dflash import", "from .eagle import EagleHead\nfrom .dflash import"),
            ("= (Eagle3Head,", "= (EagleHead, Eagle3Head,"),
        ],
    },
    "a planner": {
        "planning/doubling.py": None,
        "planning/planner.py": [
            ("from .fixed_plan import", "from .doubling import Doubling\nfrom .fixed_plan import"),
            (
                "    if is_fixed(kind.config):",
                '    if kind.config.lookahead == "doubling":\n        return Doubling(kind.config)\n'
                "    if is_fixed(kind.config):",
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
            ("\n\nclass ProtocolError", "    HEAT = 11\n\n\nclass ProtocolError"),
            ("\nPLAN = {", '\nHEAT = {"degrees": Field(0, 200)}\nPLAN = {'),
        ],
        "distributed/draft_server.py": [
            (
                "            case Kind.START:",
                "            case Kind.HEAT:\n                self._heat(message)\n            case Kind.START:",
            ),
            ("    def _start(", code_of("Heated").partition("\n")[2] + "\n    def _start("),
        ],
    },
}

FORGET = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("hf_ssd", "tests")]:
    del sys.modules[name]  # which a preloaded Python has of the original
"""
PROGRAM = """
import pathlib
import tempfile
import torch
from safetensors.torch import save_file
import hf_ssd
from hf_ssd.distributed import wire
from hf_ssd.drafting.heads.eagle import EagleHead
from hf_ssd.rounds import AHEAD, IN_TURN, RoundRecord, Speculation
from tests.helpers.loopback import Loopback
from tests.helpers.tiny import padded_batch, tiny_draft, tiny_model
from tests.helpers.thread_worker import ThreadWorker

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
head = tempfile.mkdtemp()
pathlib.Path(head, "config.json").write_text('{"architectures": ["EagleHead"]}')
state = {name: one for name, one in EagleHead(target).state_dict().items() if name.startswith(("fc", "layers"))}
save_file(state, pathlib.Path(head, "model.safetensors"))
output = target.generate(
    **inputs, do_sample=False, max_new_tokens=40, assistant_model=head, return_dict_in_generate=True,
    ssd_config=hf_ssd.SSDConfig(lookahead=3, on_draft_failure="raise"),
)
assert torch.equal(output.sequences, plain) and {*output.ssd_stats.column("mode")} == {IN_TURN}
assert {3} <= {*output.ssd_stats.column("lookahead")}
told = Speculation([[1]], None, RoundRecord(branches=7, sources=["ngram"]))
told = wire.read_speculation(wire.write_speculation(told), 1)
assert told.record.branches == 7
worker = Loopback(tiny_draft())
worker.channel.send(wire.Message(wire.Kind.HEAT, payload=[70]))
worker.work()
assert worker.server.degrees == 70
print(hf_ssd.__file__, "done")
"""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_changes_one_or_two_files(name):
    changed = [file for file, edits in RECIPES[name].items() if edits is not None]
    assert len(changed) <= 2 and all(f"hf_ssd/{file}" in TEXT for file in RECIPES[name])


# The tests that the recipes name: what is put in the place of what, and which of the tests are of the recipes.
EAGLE = "from hf_ssd.drafting.heads.eagle import EagleHead\n"
CASES = """
    "twice": Case(lambda target, noise: tiny_draft(seed=3, disagreement=noise, **SIZES), {"drafter": "twice"}),
    "first_eagle": Case(lambda target, noise: EagleHead(target).eval(), takes_worker=False, kind="eagle3"),
"""
GIVEN = "@given(st.lists(st.floats(0, 1), max_size=8))"
TESTS = {
    "drafting/test_cache_shapes.py": ([(GIVEN, f"{code_of('test_ends')}\n\n{GIVEN}")], "ends"),
    "matrix.py": (
        [
            ('"geometric", "uniform")}', '"geometric", "uniform", "ends")}'),
            ('    "random": {', '    "repeat": {"fallback": "repeat"},\n    "random": {'),
        ],
        "ends or repeat",
    ),
    "conformance/test_sampled.py": (
        [('    "random": {', '    "repeat": {"fallback": "repeat", "at_least": 1.0},\n    "random": {')],
        "test_every_setting_leaves_the_targets_distribution and repeat and not worker",
    ),
    "drafting/test_every_drafter.py": (
        [
            ('\n    "parallel": Case(', f'{CASES}    "parallel": Case('),
            ("from hf_ssd.rounds import NGRAM", f"{EAGLE}from hf_ssd.rounds import NGRAM"),
        ],
        "twice or first_eagle",
    ),
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A folder with a copy of the package and of its tests, changed as the recipes say."""
    folder = tmp_path_factory.mktemp("recipes")
    package = folder / "hf_ssd"
    for part in ("hf_ssd", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for link in ("examples", "docs", "setup.cfg"):
        folder.joinpath(link).symlink_to(ROOT / link)
    package.joinpath("drafting/twice_drafter.py").write_text(code_of("TwiceDrafter"))
    package.joinpath("drafting/heads/eagle.py").write_text(code_of("EagleHead"))
    package.joinpath("planning/doubling.py").write_text(code_of("Doubling"))
    package.joinpath("generation/proposers/repeat.py").write_text(code_of("RepeatFallback"))
    edits = [(package / file, edits) for recipe in RECIPES.values() for file, edits in recipe.items()]
    edits += [(folder / "tests" / file, edits) for file, (edits, _) in TESTS.items()]
    for file, of_file in edits:
        for before, after in of_file or ():
            text = file.read_text()
            assert text.count(before) == 1, (file, before)
            file.write_text(text.replace(before, after))
    return folder


def test_what_the_recipes_make_is_used_in_calls(changed):
    program = f"{FORGET}\nsys.path[:0] = [{str(changed)!r}]\n{PROGRAM}"
    assert programs.run("-c", program, cwd=changed).split() == [str(changed / "hf_ssd/__init__.py"), "done"]


@pytest.mark.slow
@pytest.mark.parametrize("file", TESTS)
def test_the_tests_that_the_recipes_name_pass(changed, file, fresh_python):
    chosen = ("-k", TESTS[file][1], "-m", "", "-n", "0", "-q", "-p", "no:cacheprovider")
    said = programs.run("-m", "pytest", f"tests/{file}".replace("/matrix", "/test_matrix"), *chosen, cwd=changed)
    assert " passed" in said and "failed" not in said
