"""Compiled models: the same logits, and nothing compiled again while a text grows."""

import functools

import pytest
import torch
from transformers import GenerationConfig
from transformers.utils import logging

import hf_ssd
from hf_ssd.cache import compiled, ragged_layers
from hf_ssd.cache.branches import Branches
from hf_ssd.cache.passes import WINDOW_STEP, cached_model
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.drafting.drafts import Drafts
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.planning.cost_model import CostModel
from hf_ssd.rounds import AHEAD, Outcome, Plan

from ..helpers.tiny import VOCAB, padded_batch, tiny_draft, tiny_model

ONE_LAYER = {"num_hidden_layers": 1}


@pytest.fixture
def compilations(monkeypatch):
    """The shapes for which something was compiled, with a backend that takes no time."""
    torch._dynamo.reset()
    shapes = []

    def backend(graph, inputs):
        shapes.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)])
        return graph.forward

    call = torch.compile(compiled._call, dynamic=True, backend=backend)
    monkeypatch.setattr(compiled, "_compiled_call", lambda: call)
    return shapes


def to_compile(model):
    model.compile(dynamic=True)
    return model


def both(run, family="llama", **sizes):
    """Runs passes of a model that is not compiled and of one that is: their logits are the same. Returns the latter."""
    results = []
    for prepared in (lambda model: model, to_compile):
        decoder = cached_model(prepared(tiny_model(family, **sizes)), RaggedCache())
        results.append(run(decoder, torch.Generator().manual_seed(0)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    return decoder


def drawn(generator, *shape):
    return torch.randint(2, 97, shape, generator=generator)


def grows(decoder, generator, steps=12):
    """Rows that advance by different amounts, and branches, for a text that outgrows several windows."""
    logits, lengths = [decoder.extend(drawn(generator, 2, 9), [0, 0])], [9, 7]
    for step in range(steps):
        count = (3, 20, 2, 9)[step % 4]
        logits.append(decoder.extend(drawn(generator, 2, count), lengths))
        lengths = [n + count - (row + step) % 3 for row, n in enumerate(lengths)]
        if step % 3 == 0:  # all rows equally long
            lengths = [min(lengths)] * 2
        width = 2 + step % 4
        forks = torch.tensor([[n - i % 2 for i in range(width)] for n in lengths])
        branches = Branches(decoder, forks, base=max(lengths), depth=3)
        logits += [branches.grow(drawn(generator, 2, width)) for _ in range(3)]
    assert steps < 12 or max(lengths) > WINDOW_STEP
    return logits


def place_by_numbers(self, columns, width):
    is_number = isinstance(columns, slice) or bool((columns == columns[0]).all())
    self.placement = None if is_number else (columns, width)
    for layer in self.layers if is_number else ():
        layer.width = columns.start if isinstance(columns, slice) else int(columns[0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma"])  # windows: none, all, some
@torch.inference_mode()
def test_logits_are_the_same_and_nothing_is_compiled_again(family, compilations, monkeypatch):
    for name in ("ROOM", "ROOM_SHARE"):  # the cache must grow with each new column
        monkeypatch.setattr(ragged_layers, name, 0)
    both(grows, family, **({} if family == "gemma" else ONE_LAYER))
    # A mask for layers that slide is another one only where a text is longer than they see.
    assert len(compilations) <= (1 if family == "llama" else 2)
    if family == "llama":  # the mutant: the cache is told where to write by numbers, which are compiled in
        torch._dynamo.reset()
        compilations.clear()
        monkeypatch.setattr(RaggedCache, "place", place_by_numbers)
        both(functools.partial(grows, steps=1), **ONE_LAYER)
        assert len(compilations) > 1


@pytest.mark.slow
@pytest.mark.parametrize("order", [(1, 8, 1, 3), (2, 4, 1, 16)])
@torch.inference_mode()
def test_one_token_several_and_rows_that_are_left_out_are_compiled_together(order, compilations):
    """Whatever comes first, and also where the first width is that of something else in the model."""
    end = 70 + sum(order)

    def extends(decoder, generator):
        place, steps = 70, [decoder.extend(drawn(generator, 5, 70), [0] * 5)]  # a prefill
        for count in order:
            steps.append(decoder.extend(drawn(generator, 5, count), [place] * 5))
            place += count
        for finished in (0, 1, 2, 4):
            decoder.leave_out([row < finished for row in range(5)])
            for count in (3, 2, 4):
                steps.append(decoder.extend(drawn(generator, 5, count), [end + row % 3 for row in range(5)])[4])
        return steps

    decoder = both(extends, **ONE_LAYER)
    assert len(compilations) == 1
    assert len(decoder.cache.rows) == 2  # a single row would be compiled as a case of its own
    decoder.fewest_tokens = 1  # the mutant
    decoder.extend(torch.full((5, 1), 7), [end] * 5)
    assert len(compilations) == 2


@pytest.mark.slow
def test_a_round_that_compiles_is_told_and_teaches_the_planner_nothing(compilations, capsys, monkeypatch):
    target, draft = hf_ssd.enable(to_compile(tiny_model(**ONE_LAYER))), tiny_draft(**ONE_LAYER)
    seen, observe = [], CostModel.observe

    def observed(costs, before, now):
        seen.append(before.compiles or now.compiles)
        observe(costs, before, now)

    monkeypatch.setattr(CostModel, "observe", observed)
    logging.enable_progress_bar()
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "assistant_model": draft}
    for call in range(2):
        config = hf_ssd.SSDConfig(lookahead=3, asynchronous=False)
        stats = target.generate(**padded_batch(1), **options, ssd_config=config).ssd_stats
        assert stats.column("compiles") == [call == 0, *[False] * (stats.rounds - 1)]
        assert ("compiling the model" in capsys.readouterr().err) == (call == 0)
    assert seen and not any(seen)


@torch.inference_mode()
def test_attention_that_takes_no_masks_runs_uncompiled_and_sees_no_more_than_is_in_use(compilations, monkeypatch):
    for module in ("cached_model", "passes"):
        monkeypatch.setattr(f"hf_ssd.cache.{module}.is_flash_attention", lambda model: True)
    decoder = cached_model(to_compile(tiny_model(**ONE_LAYER)), RaggedCache())
    for start, count in ((0, 5), (5, 3)):
        decoder.extend(torch.full((1, count), 7), [start])
        assert decoder.cache.window is None and decoder.cache.get_seq_length() == start + count
    assert not compilations


@pytest.mark.slow
@torch.inference_mode()
def test_whatever_is_planned_a_draft_compiles_once_for_one_row_and_once_for_several(compilations):
    draft = to_compile(tiny_draft(**ONE_LAYER))
    for rows in (1, 3, 2):
        for lookahead, budget in [(3, 4), (1, 1), (5, 9)]:
            config, generation_config = hf_ssd.SSDConfig(lookahead, budget), GenerationConfig(max_length=99)
            prompts = [torch.arange(2, 9 + row) for row in range(rows)]
            speculator = Drafts().speculator(draft, SessionRequest(config, generation_config, prompts, 0, VOCAB))
            plan = Plan(AHEAD, lookahead, 1, budget)
            speculator.drafter.begin()
            for accepted in (0, 0, 1):
                speculator.prepare(plan)
                speculator.answer(Outcome.of(speculator.verified, [accepted] * rows, [7] * rows), plan)
        assert len(compilations) == 1 + (rows > 1)
