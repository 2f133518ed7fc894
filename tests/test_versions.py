"""Other releases of transformers and torch than the tested ones, and none of the calls that releases warn of."""

import contextlib
import importlib.metadata
import sys
import warnings

import pytest
import torch
from transformers import DynamicCache, GenerationMixin
from transformers.utils import logging

import hf_ssd
from hf_ssd import versions
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.generation.checks import check_generation
from hf_ssd.rounds import AHEAD, IN_TURN

from . import matrix
from .helpers import comparing
from .helpers.thread_worker import ThreadWorker
from .helpers.tiny import padded_batch, tiny_model

REQUIRED = ["torch>=2.11,<2.15", "transformers>=5.17,<5.25", "tqdm>=4.60", 'transformers[serving]; extra == "serve"']


@pytest.fixture
def installed(monkeypatch):
    """The installed releases, which a test may change."""
    found = {"transformers": "5.24.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: REQUIRED)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found[name])
    versions.warn_if_untested.cache_clear()
    yield found
    versions.warn_if_untested.cache_clear()


@pytest.fixture
def said(monkeypatch):
    """The warnings of this package."""
    lines = []
    monkeypatch.setattr(logging.get_logger("hf_ssd.versions"), "warning", lines.append)
    return lines


def generate(target, draft, inputs=None, **options):
    output = comparing.generate(target, draft, inputs or padded_batch(2), max_new_tokens=12, **options)
    assert output.ssd_stats.tokens_per_round > 1.1
    return output


RELEASES = [  # of transformers and torch, and whether they are among the tested ones
    ("5.17.0", "2.11.0", True),
    ("5.24.3", "2.13.0+cpu", True),
    ("5.25.0.dev0", "2.13.0", False),
    ("5.16.1", "2.13.0", False),
    ("5.24.0", "2.15.0+cu130", False),
]


def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("transformers, torch_version, is_tested", RELEASES)
def test_releases_outside_of_the_tested_range_are_named_once_and_calls_go_on(
    target, draft, installed, said, monkeypatch, transformers, torch_version, is_tested
):
    """A package that is not installed says nothing."""
    installed |= {"transformers": transformers, "torch": torch_version}
    for _ in range(2):
        generate(target, draft)
    assert len(said) == (0 if is_tested else 1)
    for line in said:
        assert transformers in line and torch_version in line and "<5.25" in line and "<2.15" in line
    said.clear()
    versions.warn_if_untested.cache_clear()
    monkeypatch.setattr(importlib.metadata, "requires", not_installed)
    generate(target, draft)
    assert not said


@pytest.mark.parametrize("lacks", ["the cache", "_prefill", "_optimize_model_for_decode"])
def test_a_release_that_renames_what_a_call_needs_gets_a_sentence_about_versions(
    target, draft, installed, monkeypatch, lacks
):
    original = GenerationMixin._prepare_cache_for_generation

    def under_another_name(self, generation_config, model_kwargs, *args):
        original(self, generation_config, model_kwargs, *args)
        model_kwargs["keys_and_values"] = model_kwargs.pop(CACHE)

    installed["transformers"] = "5.25.0"
    if lacks == "the cache":
        monkeypatch.setattr(GenerationMixin, "_prepare_cache_for_generation", under_another_name)
    else:
        monkeypatch.delattr(GenerationMixin, lacks)
    words = r"transformers 5.25.0 .* tested on .*<5.25.* missing; install a tested"
    with pytest.raises(RuntimeError, match=words) as found:
        generate(target, draft)
    assert "remove" not in str(found.value) and "ssd_config" not in str(found.value)


def test_an_import_that_fails_gets_a_sentence_about_versions(installed, monkeypatch):
    installed["transformers"] = "5.25.0"
    monkeypatch.delattr("transformers.generation.logits_process.DiaEOSDelayPatternLogitsProcessor")
    monkeypatch.delitem(sys.modules, check_generation.__module__)
    monkeypatch.delitem(sys.modules, "hf_ssd.generation.api")
    monkeypatch.delitem(vars(hf_ssd), "enable")
    with pytest.raises(ImportError, match=r"transformers 5.25.0 .* tested on .*DiaEOS.*; install tested releases"):
        _ = hf_ssd.enable


def plain_calls(draft):
    """Calls of the usual kinds: greedy, sampled, with the cache returned, and continued from it."""
    target, inputs = hf_ssd.enable(tiny_model()), padded_batch(2)
    generate(target, draft, do_sample=True, top_k=5)
    first = generate(target, draft)
    mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(2, 12)], dim=1)
    more = {"input_ids": first.sequences, "attention_mask": mask}
    plain = target.generate(**more, max_new_tokens=12, do_sample=False)
    continued = generate(target, draft, more, **{CACHE: getattr(first, CACHE)})
    assert torch.equal(continued.sequences, plain)
    cache = DynamicCache(config=target.config)
    assert torch.equal(generate(target, draft, **{CACHE: cache}).sequences, first.sequences)
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    return target, first, more, plain


def deprecations(caught):
    return [str(one.message) for one in caught if issubclass(one.category, (FutureWarning, DeprecationWarning))]


@pytest.fixture
def no_deprecations(caplog, monkeypatch):
    """Raises where something is used that is deprecated."""
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        yield
    assert not [record.getMessage() for record in caplog.records if "deprecated" in record.getMessage()]


@pytest.mark.parametrize("name", ["llama", "hybrid", "no draft"])
def test_calls_use_nothing_that_is_deprecated(name, draft, no_deprecations):
    """In turn, and with a worker or n-grams. The worker is a thread, whose warnings are errors too."""
    if name == "llama":
        plain_calls(draft)
    pair, inputs = matrix.PAIRS[name], padded_batch(2)
    inputs["input_ids"] %= pair.vocabulary
    config = {} if pair.draft else {"drafter": "ngram", "budget": "auto"}
    launched = DraftAssistant([ThreadWorker(pair.draft())]) if pair.draft else contextlib.nullcontext()
    with launched as worker:
        output = generate(hf_ssd.enable(pair.target()), worker, inputs, of_config=config)
    assert {*output.ssd_stats.column("mode")} == {AHEAD if pair.draft else IN_TURN}


@pytest.mark.slow
def test_the_older_name_of_a_cache_is_taken_where_transformers_takes_it(draft):
    """Then transformers warns of the argument, as in plain generation, and of nothing else."""
    target, _, more, plain = plain_calls(draft)
    output = generate(target, draft)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        continued = generate(target, draft, more, past_key_values=getattr(output, CACHE))
    assert torch.equal(continued.sequences, plain)
    assert len(deprecations(caught)) == (CACHE != "past_key_values")
