"""Whole calls of other kinds on the stand-in GPU: nothing is on the wrong device, and tokens are those of the CPU."""

import pytest
import torch

from hf_ssd.cache import masks
from hf_ssd.cache.ragged import RaggedCache

from ..helpers.stand_in_rounds import generate
from ..helpers.suites import quick_first
from ..helpers.tiny import VOCAB, padded_batch, tiny_model
from .test_synchronizations import BUDGET, most

ENDS = {"eos_token_id": [5, 6, 7, 8, 9, 10]}  # at different lengths
CALLS = {
    "n-grams and some windows": {"family": "gemma", "fallback": "ngram"},
    "windows": {"family": "mistral"},
    "random": {"fallback": "random", "repetition_penalty": 1.2, "min_new_tokens": 8},
    "in turn": {"asynchronous": False, "no_repeat_ngram_size": 2},
    "a constraint": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row, VOCAB, 2))},
    "ends": ENDS,
    "sampled": {"do_sample": True, "fallback": "ngram", "saguaro_c": 0.5, "no_repeat_ngram_size": 2, "top_p": 0.9},
}
OURS = ("family", "fallback", "asynchronous")


@pytest.mark.parametrize("rows", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick_first(CALLS, 2))
def test_whole_calls_are_on_one_device(name, rows, monkeypatch):
    options = CALLS[name]
    output, _ = generate(monkeypatch, rows, **{"do_sample": False, "max_new_tokens": 16, **options})
    assert output.ssd_stats.draft_failure is None and max(map(max, output.ssd_stats.column("accepted"))) > 0
    if name != "sampled":
        inputs = padded_batch(rows) if rows > 1 else {"input_ids": padded_batch(1)["input_ids"]}
        theirs = {option: value for option, value in options.items() if option not in OURS}
        target = tiny_model(options.get("family", "llama"))
        plain = target.generate(**inputs, do_sample=False, max_new_tokens=16, **theirs)
        assert torch.equal(output.sequences.cpu(), plain)


@pytest.mark.slow
def test_rows_that_end_make_nothing_wait(monkeypatch):
    plain = tiny_model().generate(**padded_batch(4), do_sample=False, max_new_tokens=24)
    end = int(plain[0, 12])  # of a row whose place others take
    output, gpu = generate(monkeypatch, 4, False, eos_token_id=end, max_new_tokens=24)
    assert -1 in output.ssd_stats.column("accepted")[-1]
    assert output.ssd_stats.draft_failure is None
    assert not {phase: n for phase, n in most(gpu.visits).items() if n > BUDGET[phase][0]}, "a phase waits"


def indexed_on_the_host(self, *indices):
    for storage in self.storage:
        yield storage, *indices


@pytest.mark.slow
@pytest.mark.parametrize(
    "owner, name, mutant",
    [
        (RaggedCache, "_indexed", indexed_on_the_host),
        (masks, "visible_up_to", lambda last, width, valid=None: torch.arange(width) <= last[:, :, None]),
    ],
    ids=["an index on the host", "a tensor made on the host"],
)
def test_mistakes_are_noticed(owner, name, mutant, monkeypatch):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, ValueError), match="a phase waits|same device"):
        test_rows_that_end_make_nothing_wait(monkeypatch)
