"""Real CUDA graphs. On devices that take the place of GPUs, tapes take the place of graphs."""

import pytest
import torch
from transformers import set_seed

import hf_ssd
from hf_ssd.cache.graphs import CAPTURES, Graphs

from ..helpers.comparing import generate
from ..helpers.tape import use_tapes
from ..helpers.tiny import FAMILIES, tiny_draft, tiny_model
from ..stand_ins.test_graphs import call, same
from .test_gpu import DEVICES, GREEDY, SAMPLED, TARGET, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not DEVICES, reason="needs a GPU")]


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    kind = torch.device(TARGET).type
    if kind not in CAPTURES:
        use_tapes(monkeypatch, kind)


@pytest.mark.parametrize("family, padded", [*((family, True) for family in FAMILIES), ("llama", False)])
def test_logits_of_replays_are_those_of_eager_passes(family, padded):
    model = tiny_model(family).to(TARGET)
    expected, _ = call(model, False, padded=padded)
    for is_first in (True, False):
        found, decoder = call(model, True, padded=padded)
        assert same(found, expected) and Graphs.of(model).failure is None
        assert (decoder.preparations > 0) == is_first


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_calls_with_graphs_give_the_tokens_of_calls_without(how, rows):
    target, draft = hf_ssd.enable(tiny_model().to(TARGET)), tiny_draft().to(TARGET)
    outputs = []
    for cuda_graphs in (False, True, True):
        set_seed(3)
        of_config = {"lookahead": 3, "cuda_graphs": cuda_graphs}
        outputs.append(generate(target, draft, inputs(rows), of_config, **how, max_new_tokens=40))
    assert all(torch.equal(output.sequences, outputs[0].sequences) for output in outputs)
    assert [any(output.ssd_stats.column("compiles")) for output in outputs] == [False, True, False]
    assert all(Graphs.of(model).passes and Graphs.of(model).failure is None for model in (target, draft))
