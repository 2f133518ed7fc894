"""Pairs of any size that agree as often as asked."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.layered_pair import SIZES, Size, acceptance_rate, layered_pair

from .helpers.programs import run

AGREEMENTS = [(0.6, 1.0), (0.9, 0.0)]  # and temperatures


@pytest.fixture(scope="module")
def pairs():
    return {asked: layered_pair("tiny", *asked, torch.float32) for asked in AGREEMENTS}


@pytest.mark.parametrize("agreement, temperature", AGREEMENTS)
def test_the_agreement_asked_for(pairs, agreement, temperature):
    target, draft = pairs[agreement, temperature]
    rate = acceptance_rate(target, draft, temperature, seed=7, new_tokens=128)  # not the bisection's texts
    assert abs(rate - agreement) < 0.05
    assert abs(target.config.acceptance_rate - agreement) < 0.02 and 0 < target.config.epsilon < 1


@pytest.mark.slow
def test_a_hybrid_pair_agrees_as_often_as_asked():
    size = Size(hidden=64, layers=6, draft_layers=2, intermediate=176, heads=4, kv_heads=2, vocab=512, hybrid=True)
    target, draft = layered_pair(size, 0.85, dtype=torch.float32)
    assert [hasattr(layer, "self_attn") for layer in draft.model.layers] == [False, True]
    assert abs(acceptance_rate(target, draft, seed=7, new_tokens=128) - 0.85) < 0.06
    torch.manual_seed(1)
    output = target.generate(torch.randint(1, 512, (1, 8)), max_new_tokens=64, do_sample=False)
    assert len(set(output[0, 8:].tolist())) > 30


def test_the_draft_is_the_first_layers_greedy_text_does_not_loop_and_favourites_are_clear(pairs):
    target, draft = pairs[0.9, 0.0]
    assert len(draft.model.layers) == SIZES["tiny"].draft_layers < len(target.model.layers)
    known = target.state_dict()
    for name, weight in draft.state_dict().items():
        assert torch.equal(weight, known[name]) and weight.data_ptr() != known[name].data_ptr()
    prompts = torch.randint(1, 512, (8, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompts)
    ids = target.generate(prompts, attention_mask=mask, max_new_tokens=128, do_sample=False)
    assert ids.shape == (8, 136)  # nothing ends early
    assert min(len(set(row.tolist())) for row in ids[:, 8:]) > 60
    probabilities = target(ids).logits[:, 8:].softmax(-1)
    assert 0.5 < probabilities.amax(-1).mean() < 0.8
    assert 0.5 < torch.special.entr(probabilities).sum(-1).mean() < 1.5  # nats


@pytest.mark.slow
def test_same_seed_same_pair_and_the_default_generator_is_left_alone(pairs):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = pairs[0.6, 1.0][0]
    two, other = (layered_pair("tiny", 0.6, 1.0, torch.float32, seed=seed)[0] for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.model.layers[-1].mlp.down_proj.weight, two.model.layers[-1].mlp.down_proj.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_the_named_sizes_have_the_parameters_they_say():
    for name in sorted(set(SIZES) - {"tiny"}):
        size = SIZES[name]
        for said, layers in zip(name.split("/"), (size.layers, size.draft_layers)):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(size.config(layers))
            assert f"{model.num_parameters() / 1e6:.0f}m" == said


def test_errors_come_before_work():
    for arguments, words in [(("huge",), "287m/39m"), (("tiny", 1.5), "0.1 to 1"), (("tiny", 0.9, -1.0), "greedy")]:
        with pytest.raises(ValueError, match=words):
            layered_pair(*arguments)
    with pytest.raises(ValueError, match="draft_layers"):
        Size(hidden=64, layers=2, draft_layers=2, intermediate=176, heads=4, kv_heads=2)


@pytest.mark.slow
def test_the_script_saves_a_pair_that_loads(tmp_path):
    said = run("examples/layered_pair.py", "--size", "tiny", "--agreement", 0.8, "--output", tmp_path)
    rate = float(re.search(r"acceptance rate ([\d.]+)", said).group(1))
    assert abs(rate - 0.8) < 0.05 and "parameters" in said and "epsilon" in said
    target, draft = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("target", "draft"))
    assert target.dtype == draft.dtype == torch.bfloat16
    assert target.config.eos_token_id is None and target.generation_config.eos_token_id is None
    assert acceptance_rate(target, draft, seed=1, new_tokens=64) == pytest.approx(rate, abs=0.01)
