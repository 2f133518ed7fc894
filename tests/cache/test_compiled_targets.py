"""Models that the user has compiled: as the user has, and uncompiled where that fails."""

import pytest
import torch
import torch._inductor.compile_fx as inductor
from transformers.utils import logging

import hf_ssd
from hf_ssd.cache import compiled
from hf_ssd.cache.cached_model import view_for_passes

from ..helpers.comparing import GREEDY, generate
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

ONE_LAYER = {"num_hidden_layers": 1}


def by_forward(model, **options):
    model.forward = torch.compile(model.forward, **options)


@pytest.fixture(autouse=True)
def no_inductor(monkeypatch):
    """Fails where something is compiled by inductor, which takes half a minute."""
    torch._dynamo.reset()
    monkeypatch.setattr(inductor, "compile_fx", lambda *_, **__: pytest.fail("inductor was called"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiles, settings",
    [
        (torch.nn.Module.compile, {"options": {"speed": 3}}),
        (torch.nn.Module.compile, {}),
        (torch.nn.Module.compile, {"mode": "careful"}),
        (by_forward, {"dynamic": True}),
        (by_forward, {"options": {"speed": 3}}),
    ],
)
def test_a_target_is_compiled_by_the_users_backend(compiles, settings):
    seen = []

    def mine(graph, inputs, **given):
        seen.append(given)
        return graph.forward

    target = hf_ssd.enable(tiny_model(**ONE_LAYER))
    plain = target.generate(**padded_batch(2), **GREEDY).sequences
    compiles(target, backend=mine, **settings)
    for _ in range(2):
        assert torch.equal(generate(target, tiny_draft(**ONE_LAYER), padded_batch(2)).sequences, plain)
    assert seen == [{name: value for name, value in settings.items() if name != "dynamic"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, patched",
    [
        ({"mode": "max-autotune-no-cudagraphs"}, {"max_autotune": True}),
        ({"options": {"epilogue_fusion": False}}, {"epilogue_fusion": False}),
        ({}, {}),
    ],
)
def test_mode_and_options_of_inductor_are_passed_on(settings, patched, monkeypatch):
    seen = []

    def compile_fx(graph, inputs, config_patches=None, **_):
        seen.append(config_patches or {})
        return graph.forward

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    compiled._compiled_call.cache_clear()
    target = hf_ssd.enable(tiny_model(**ONE_LAYER))
    target.compile(**settings)
    generate(target, tiny_draft(**ONE_LAYER), padded_batch(2))
    compiled._compiled_call.cache_clear()
    assert len(seen) == 1 and patched.items() <= seen[0].items() and bool(seen[0]) == bool(settings)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["target", "draft"])
def test_what_cannot_be_compiled_runs_uncompiled_and_says_so_once(side, monkeypatch):
    def broken(graph, inputs):
        raise OSError("no C++ compiler")

    said = []
    monkeypatch.setattr(logging.get_logger("hf_ssd.cache.compiled"), "warning", lambda text, *_: said.append(text))
    models = {"target": hf_ssd.enable(tiny_model(**ONE_LAYER)), "draft": tiny_draft(**ONE_LAYER)}
    plain = models["target"].generate(**padded_batch(2), **GREEDY).sequences
    models[side].compile(backend=broken)
    for _ in range(2):
        output = generate(models["target"], models["draft"], padded_batch(2))
        assert torch.equal(output.sequences, plain) and output.ssd_stats.tokens_per_round > 1.5
    assert len(said) == 1 and "no C++ compiler" in said[0]


@torch.no_grad()
def test_a_part_that_is_compiled_by_itself_stays_compiled():
    model, tokens, calls = tiny_model(), torch.tensor([[5, 7, 11, 13]]), []

    def backend(graph, inputs):
        return lambda *arguments: calls.append(1) or graph.forward(*arguments)

    model.model.layers[1].mlp.compile(backend=backend)
    view = view_for_passes(model)
    expected, before = model(tokens).logits, len(calls)
    torch.testing.assert_close(view(tokens).logits, expected)
    assert len(calls) == before + 1
