"""EAGLE-3 heads: the formats they are published in, and what they propose, against passes without any cache."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

import hf_ssd
from hf_ssd import SSDConfig
from hf_ssd.drafting.cache_shapes import shape_for
from hf_ssd.drafting.drafters import drafter_for
from hf_ssd.drafting.head_drafter import HeadDrafter, HeadPrefix
from hf_ssd.drafting.heads.loading import head_for
from hf_ssd.drafting.speculator import Speculator
from hf_ssd.rounds import AHEAD, Outcome, Plan

from ..cache.test_hidden_states import expected_features
from ..helpers.heads import tiny_head
from ..helpers.tiny import VOCAB, tiny_model

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

from train_eagle3 import save_head  # noqa: E402

PROMPTS = [[2, 3, 1], [3, 1, 2, 2, 5, 1, 7]]
LOOKAHEAD = 3
PLAN = Plan(AHEAD, LOOKAHEAD, LOOKAHEAD, budget=8)
EXACT = {"atol": 1e-5, "rtol": 0}


@pytest.fixture(scope="module")
def pair():
    target = tiny_model()
    return target, tiny_head(target)


# ---------------------------------------------------------------- proposals


def features(target, texts, known):
    """Returns what the target's process would send: features of all tokens but the last that the draft has none for."""
    of_rows = [expected_features(target, torch.tensor(text))[:-1][n:] for text, n in zip(texts, known)]

    def receive(tokens, width):
        flat = torch.cat(of_rows)
        assert flat.shape == (tokens, width)
        return flat

    return receive


def reference(head, target, text, continuation):
    """
    Returns the distributions after `text` and each token of `continuation`. The head reads the target's features of all
    tokens of the text but the last, and its own states from there on.
    """
    states = head.fuse(expected_features(target, torch.tensor(text))[:-1])
    tokens, results = text[1:], []
    for token in [*continuation, None]:
        inputs = head.inputs(torch.tensor(tokens), states)[None]
        output = head(inputs).last_hidden_state[0]
        results.append(head.logits(output[-1]).float().softmax(-1))
        tokens, states = [*tokens, token], torch.cat([states, output[-1:]])
    return torch.stack(results)


def new_speculator(pair):
    generation = GenerationConfig(max_length=80, eos_token_id=None, pad_token_id=0, do_sample=True, top_k=0)
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    config = SSDConfig(lookahead=LOOKAHEAD, budget=8)
    drafter = drafter_for(pair[1], config, generation, prompts, seed=5)
    assert isinstance(drafter, HeadDrafter)
    speculator = Speculator(drafter, config, shape_for(config), limit=80)
    speculator.begin()
    return speculator


@torch.inference_mode()
def check_proposals(pair, rounds=4):
    """In each round nothing hits; what is drafted just in time and what is prepared is what the head gives."""
    target, head = pair
    speculator, texts = new_speculator(pair), [list(prompt) for prompt in PROMPTS]
    accepted, drafted, known = [0, 0], [[], []], [0, 0]
    for turn in range(rounds):
        used = speculator.prepared.branches if speculator.prepared else [{}, {}]
        bonus = [next(t for t in range(2, VOCAB) if (k, t) not in of_row) for k, of_row in zip(accepted, used)]
        outcome = Outcome.of(drafted, accepted, bonus)
        texts = [text + tokens for text, tokens in zip(texts, outcome.tokens)]
        answer = speculator.answer(Outcome(outcome.tokens, states=features(target, texts, known)), PLAN)
        known, drafted = [len(text) - 1 for text in texts], answer.tokens
        for row, text in enumerate(texts):
            q = reference(head, target, text, drafted[row])
            torch.testing.assert_close(answer.probabilities[row], q[:LOOKAHEAD], **EXACT)
        speculator.prepare(PLAN)
        cache = speculator.prepared
        told = torch.cat(cache.probabilities, dim=2)
        for row, text in enumerate(texts):
            for place, (k, token) in enumerate(zip(cache.accepted[row], cache.bonus[row])):
                follow = [*drafted[row][:k], token, *cache.tokens[row][place]]
                q = reference(head, target, text, follow)
                torch.testing.assert_close(told[row, place], q[k + 1 : k + 1 + LOOKAHEAD], **EXACT)
        accepted = [turn % (LOOKAHEAD + 1), (turn + 2) % (LOOKAHEAD + 1)]


def test_what_is_proposed_is_what_the_head_gives_for_features_and_own_states(pair):
    check_proposals(pair)


@pytest.mark.slow
def test_what_a_head_with_a_sliding_window_proposes(pair):
    window = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    head = tiny_head(pair[0], norm_output=True, fc_norm=True, norm_before_residual=True, **window)
    assert head.config.layer_types == ["sliding_attention"]
    check_proposals((pair[0], head))


def features_one_position_off(monkeypatch):
    fuse = HeadPrefix.read_target
    monkeypatch.setattr(
        HeadPrefix,
        "read_target",
        lambda self, states: fuse(self, lambda *size: (states(*size) if callable(states) else states).roll(1, 0)),
    )


def states_of_rejected_tokens_stay(monkeypatch):
    take = HeadPrefix.read_target

    def keeps(self, states):
        fed = list(self.fed)
        take(self, states)
        self.fed = fed

    monkeypatch.setattr(HeadPrefix, "read_target", keeps)


def tokens_of_another_vocabulary(monkeypatch):
    logits = HeadDrafter._logits
    monkeypatch.setattr(HeadDrafter, "_logits", lambda self, states: logits(self, states).roll(1, -1))


MUTANTS = [features_one_position_off, states_of_rejected_tokens_stay, tokens_of_another_vocabulary]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_noticed(mutant, pair, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_proposals(pair)


@torch.inference_mode()
def test_after_a_hit_the_prefix_has_the_targets_features(pair):
    target, head = pair
    speculator, texts, known = new_speculator(pair), [list(prompt) for prompt in PROMPTS], [0, 0]
    outcome = Outcome([[4], [6]])
    for _ in range(4):
        texts = [text + tokens for text, tokens in zip(texts, outcome.tokens)]
        answer = speculator.answer(Outcome(outcome.tokens, states=features(target, texts, known)), PLAN)
        known = [len(text) - 1 for text in texts]
        speculator.prepare(PLAN)
        for row, text in enumerate(texts):
            fused = head.fuse(expected_features(target, torch.tensor(text)))[: len(text) - 1]
            torch.testing.assert_close(speculator.drafter.prefix.states.values[row, : len(text) - 1], fused, **EXACT)
        cache = speculator.prepared
        firsts = [row[0] for row in cache.accepted], [row[0] for row in cache.bonus]
        outcome = Outcome.of(answer.tokens, *firsts)
    assert all(answer.record.hits)


# ---------------------------------------------------------------- formats


@torch.inference_mode()
def check_loaded(target, head, folder):
    loaded, text = head_for(folder, target), torch.arange(2, 9)
    inputs = [one.inputs(text, one.fuse(expected_features(target, text)))[None] for one in (head, loaded)]
    ours, theirs = (one.logits(one(given).last_hidden_state) for one, given in zip((head, loaded), inputs))
    torch.testing.assert_close(ours, theirs, **EXACT)
    return loaded


def test_a_head_in_the_format_of_safeailab(pair, tmp_path):
    """Names and config as in yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, without embeddings, as a file of torch too."""
    target, head = pair
    save_head(head, tmp_path)
    loaded = check_loaded(target, head, tmp_path)
    assert loaded.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    state = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[0] for name in state} == {"fc", "midlayer", "norm", "lm_head", "d2t", "t2d"}
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    values = json.loads((tmp_path / "config.json").read_text())
    for name in ("eagle_aux_hidden_state_layer_ids", "norm_before_fc", "norm_before_residual"):
        del values[name]
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["LlamaForCausalLM"]}))
    deep = tiny_model(num_hidden_layers=8)
    assert head_for(tmp_path, deep).config.target_layers == [2, 4, 5]  # where the config names no layers
    values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}  # as SpecForge writes them
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert head_for(tmp_path, deep).config.target_layers == [2, 5, 7]


def test_heads_that_do_not_fit_are_refused_in_a_sentence(pair, tmp_path):
    target, head = pair
    save_head(head, tmp_path)
    with pytest.raises(ValueError, match="is an EAGLE-3 head, which reads hidden states of its target; pass `target="):
        hf_ssd.launch_draft(tmp_path)
    with pytest.raises(ValueError, match="have 64; it was made for another target"):
        hf_ssd.launch_draft(tmp_path, target=tiny_model(hidden_size=64, head_dim=16), dtype="auto")
    with pytest.raises(ValueError, match="has those of 0 to 2; the draft was made for another target"):
        hf_ssd.launch_draft(tmp_path, target=tiny_model(num_hidden_layers=2))
    other = hf_ssd.enable(tiny_model(vocab_size=VOCAB + 200))
    with pytest.raises(ValueError, match="`embed_tokens.weight` has the shape"):
        other.generate(torch.tensor([[1, 2]]), assistant_model=tmp_path, ssd_config=SSDConfig())
    with pytest.raises(ValueError, match="have 192; the draft was made for another target"):
        wide = hf_ssd.enable(tiny_model(hidden_size=64, head_dim=16))
        wide.generate(torch.tensor([[1, 2]]), assistant_model=head, ssd_config=SSDConfig())
    for name in ("autoregressive", "parallel"):
        with pytest.raises(ValueError, match="The draft reads hidden states of the target"):
            hf_ssd.enable(target).generate(
                torch.tensor([[1, 2]]), assistant_model=head, ssd_config=SSDConfig(drafter=name)
            )
    with pytest.raises(ValueError, match="does not read hidden states"):
        hf_ssd.enable(target).generate(
            torch.tensor([[1, 2]]), assistant_model=tiny_model(), ssd_config=SSDConfig(drafter="eagle3")
        )
