"""The calls of `matrix.py`: greedy tokens are plain generation's, and sampled ones do not depend on who drafts when."""

import contextlib
import functools
import time
from dataclasses import dataclass

import pytest
import torch

import hf_ssd
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.rounds import NGRAM, NOTHING

from . import matrix
from .helpers.tiny import padded_batch

PASS = 0.06  # seconds of a target that gains by any draft


@dataclass
class Models:
    name: str
    target: torch.nn.Module
    draft: torch.nn.Module | None
    assistant: DraftAssistant | None

    def __post_init__(self):
        self.once = functools.cache(self.generate)  # for a call with which several cells compare theirs

    def generate(self, option, rows, asynchronous=None, setting=None, rule="rejection", **options):
        """Returns the output of a call: in turn, with the worker, or, if nothing is said, of plain generation."""
        pair, inputs, speculation = matrix.PAIRS[self.name], padded_batch(rows), {}
        if asynchronous is not None:
            config = hf_ssd.SSDConfig(**matrix.SETTINGS[setting], asynchronous=asynchronous, verification=rule)
            speculation = {"assistant_model": self.assistant if asynchronous else self.draft, "ssd_config": config}
            speculation |= pair.options
        options = {"max_new_tokens": 24, "return_dict_in_generate": True, **options, **matrix.OPTIONS[option]}
        if "prompt" in options:
            inputs = padded_batch(rows, options.pop("prompt"))
        inputs["input_ids"] %= pair.vocabulary
        torch.manual_seed(11)
        return self.target.generate(**inputs, **options, **speculation)


@pytest.fixture(scope="module")
def make():
    """Makes the models of a pair, with a worker, when they are first asked for."""
    with contextlib.ExitStack() as workers:

        @functools.cache
        def make(name):
            pair = matrix.PAIRS[name]
            draft = assistant = None
            if pair.draft is not None:
                draft = pair.draft()
                assistant = workers.enter_context(hf_ssd.launch_draft(draft, num_threads=1, **pair.launch))
            return Models(name, hf_ssd.enable(pair.target()), draft, assistant)

        yield make


@contextlib.contextmanager
def slow(target, seconds):
    hook = target.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    try:
        yield
    finally:
        hook.remove()


def check_speculated(stats, pair, setting, option, rows, is_ahead):
    """A call that fell back to plain decoding would pass every equality."""
    lookahead, modes = matrix.SETTINGS[setting]["lookahead"], {*stats.column("mode")}
    is_ahead = is_ahead and pair.draft is not None
    assert stats.draft_failure is None
    if option in matrix.SHORT or (option, rows) in matrix.REJECTED:
        return
    assert max(max(row) for row in stats.column("accepted")) > 0
    if option in matrix.CALLBACKS:  # texts of a few tokens, or so many rejections that little is prepared
        return
    if setting in matrix.PLANNED:
        assert max(stats.column("lookahead")) > 1
        assert setting != "auto budget" or "ahead" in modes
        return
    assert modes == (matrix.AHEAD if is_ahead else matrix.IN_TURN) and (stats.hit_rate > 0) == is_ahead
    if setting in matrix.TREES:
        return
    if setting not in matrix.LOOKAHEADS:
        assert not all(record.hits[row] for record in stats.records for row in record.live)
        assert max(stats.column("lookahead")) > 1
    elif option in matrix.NOTHING:
        assert stats.tokens_per_round > pair.least and 0 < stats.acceptance_rate < 1
        assert {*stats.column("lookahead")[:2]} == {lookahead}
    if pair.draft is None:
        assert {*stats.column("budget")} == {0} and {s for r in stats.records for s in r.sources} == {NGRAM, NOTHING}
    if pair.one_pass:
        assert max(stats.column("steps")) <= 1 and max(stats.column("passes")) <= 1


def check_trees(stats, pair, setting, is_ahead):
    """Texts of chains would be the same."""
    if setting not in matrix.TREES:
        return
    nodes, widest = {*stats.column("nodes")}, matrix.SETTINGS[setting]["tree_nodes"]
    taken = [record.took_sibling(row) for record in stats.records for row in record.live]
    if pair in matrix.NO_TREES and (is_ahead or pair == "hybrid"):
        assert nodes == {0} and not any(taken)
    elif matrix.PAIRS[pair].draft is None:  # so few n-grams that few siblings are known, and hardly one is taken
        assert max(nodes) > matrix.SETTINGS[setting]["lookahead"]
    else:
        assert widest in nodes and any(taken)


def marked(cells):
    """Of the cells that are not slow by themselves, the quick suite has every second: its neighbours are like it."""
    quick = [cell for cell in cells if not is_slow(cell, cells)][::2]
    return [pytest.param(*cell, marks=[pytest.mark.slow] * (cell not in quick)) for cell in cells]


def is_slow(cell, cells):
    """What has a cell with several rows is tried with one row in the slow suite, except the usual draft."""
    pair, setting, option, rows = cell
    is_usual = pair == "llama" and option in matrix.NOTHING and setting in matrix.LOOKAHEADS
    has_several = any(other[:3] == cell[:3] and other[3] > 1 for other in cells)
    is_named = cell in matrix.SLOW_CELLS or not {*cell[:3]}.isdisjoint(matrix.SLOW)
    return is_named or (rows == 1 and has_several and not is_usual)


@pytest.mark.parametrize("pair, setting, option, rows", marked(matrix.GREEDY_CELLS))
def test_greedy_tokens_are_those_of_plain_generate(make, pair, setting, option, rows):
    """With the worker and, where the pair is what differs, in turn."""
    is_planned = setting in matrix.PLANNED
    is_usual = option in matrix.NOTHING and setting in matrix.LOOKAHEADS  # rates of acceptance are looked at
    is_of_pairs = is_usual or (
        option in matrix.NOTHING and (matrix.PAIRS[pair].draft is None or setting in matrix.TREES)
    )
    models = make(pair)
    is_short = rows > 1 and option not in matrix.NOTHING  # rows of which one soon accepts a token
    more = {"max_new_tokens": 50 if is_planned else 40 if is_usual else 16 if is_short else 24}
    more |= {"output_scores": True} if option in matrix.CALLBACKS else {}
    plain = models.once(option, rows, do_sample=False, **more)
    for asynchronous in (True, False) if is_of_pairs else (True,):
        with slow(models.target, PASS) if is_planned else contextlib.nullcontext():
            output = models.generate(option, rows, asynchronous, setting, do_sample=False, **more)
        assert torch.equal(output.sequences, plain.sequences)
        assert [of.dtype for of in output.scores or ()] == [of.dtype for of in plain.scores or ()]
        check_speculated(output.ssd_stats, matrix.PAIRS[pair], setting, option, rows, asynchronous)
        if option in matrix.NOTHING:
            check_trees(output.ssd_stats, pair, setting, asynchronous)


@pytest.mark.parametrize("pair, setting, option, rows", marked(matrix.SAMPLED_CELLS))
def test_sampled_tokens_with_a_worker_are_those_of_drafting_in_turn(make, pair, setting, option, rows):
    outputs = [make(pair).generate(option, rows, way, setting, do_sample=True) for way in (True, False)]
    ahead, in_turn = (output.ssd_stats for output in outputs)
    assert torch.equal(*(output.sequences for output in outputs))
    assert ahead.column("accepted") == in_turn.column("accepted") and ahead.draft_failure is None
    assert ahead.tokens_per_round > 1.05 and in_turn.hit_rate == 0 and {*in_turn.column("mode")} == matrix.IN_TURN
    if setting not in matrix.PLANNED and pair != "no draft":  # so quick a target may leave no time to prepare
        assert ahead.hit_rate > 0 and {*ahead.column("mode")} == matrix.AHEAD


@pytest.mark.parametrize("pair, setting, option, rows", marked(matrix.COUPLED_CELLS))
def test_coupled_tokens_are_those_of_single_passes(make, pair, setting, option, rows):
    models, options = make(pair), {"rule": "coupled", "do_sample": True}
    alone = models.once(option, rows, False, "single passes", **options)
    assert {*alone.ssd_stats.column("mode")} == {"plain"}
    # Cache shapes and fallbacks are nothing to a draft in turn.
    is_in_turn = setting in {*matrix.LOOKAHEADS, *matrix.PLANNED, *matrix.TREES} or models.draft is None
    for asynchronous in [True] * (models.draft is not None) + [False] * is_in_turn:
        output = models.generate(option, rows, asynchronous, setting, **options)
        stats = output.ssd_stats
        assert torch.equal(output.sequences, alone.sequences) and stats.draft_failure is None
        if setting not in matrix.PLANNED and (option, rows) not in matrix.REJECTED:
            assert max(max(row) for row in stats.column("accepted")) > 0
            assert {*stats.column("mode")} == (matrix.AHEAD if asynchronous else matrix.IN_TURN)
            assert (stats.hit_rate > 0) == asynchronous
            check_trees(stats, pair, setting, asynchronous)
