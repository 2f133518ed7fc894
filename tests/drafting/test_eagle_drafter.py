"""EAGLE-3 heads: the formats they are published in, and what they propose, against passes without any cache."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from train_eagle3 import save_head
from transformers import GenerationConfig

import hf_ssd
from hf_ssd import SSDConfig
from hf_ssd.drafting.cache_shapes import shape_for
from hf_ssd.drafting.drafters import drafter_for
from hf_ssd.drafting.head_drafter import HeadDrafter, HeadPrefix
from hf_ssd.drafting.heads.loading import head_for
from hf_ssd.drafting.speculator import Speculator
from hf_ssd.rounds import AHEAD, Outcome, Plan

from ..helpers.heads import expected_features, tiny_head
from ..helpers.tiny import VOCAB, tiny_model

PROMPTS = [[2, 3, 1], [3, 1, 2, 2, 0, 1]]
LOOKAHEAD = 3
PLAN = Plan(AHEAD, LOOKAHEAD, LOOKAHEAD, budget=8)
EXACT = {"atol": 1e-5, "rtol": 0}


def new_speculator(model) -> Speculator:
    config, prompts = SSDConfig(lookahead=LOOKAHEAD, budget=8), [torch.tensor(prompt) for prompt in PROMPTS]
    generation = GenerationConfig(max_length=80, eos_token_id=None, pad_token_id=0, do_sample=True, top_k=0)
    speculator = Speculator(drafter_for(model, config, generation, prompts, seed=5), shape_for(config), limit=80)
    speculator.drafter.begin()
    return speculator


@torch.inference_mode()
def check_proposals(speculator: Speculator, reference, features, rounds: int = 6) -> None:
    """
    Each third round hits, and the others miss.

    Args:
        reference (`Callable`): Takes a text, tokens after it of which the target has not verified the first ones, and
            how many tokens these are. Returns the distributions of the others.
        features (`Callable`): Takes the texts, and how many tokens of each have features. Returns how the draft
            receives features of the others.
    """
    texts, accepted, drafted, known = [list(prompt) for prompt in PROMPTS], [0, 0], [[], []], [0, 0]
    for turn in range(rounds):
        cache, is_hit = speculator.prepared, turn % 3 == 2
        used = cache.branches if cache else [{}, {}]
        tokens = range(speculator.drafter.vocab_size)
        bonus = [next(t for t in tokens if (k, t) not in of_row) for k, of_row in zip(accepted, used)]
        if is_hit:
            accepted, bonus = [row[0] for row in cache.accepted], [row[0] for row in cache.bonus]
        outcome = Outcome.of(drafted, accepted, bonus)
        texts = [text + tokens for text, tokens in zip(texts, outcome.tokens)]
        answer = speculator.answer(Outcome(outcome.tokens, states=features(texts, known)), PLAN)
        known, drafted = [len(text) - 1 for text in texts], answer.tokens
        assert answer.record.hits == [is_hit] * 2
        speculator.prepare(PLAN)
        accepted = [turn % (LOOKAHEAD + 1), (turn + 2) % (LOOKAHEAD + 1)]
        if is_hit:
            continue
        cache = speculator.prepared
        told, count = torch.cat(cache.probabilities, dim=2), 0
        for row, text in enumerate(texts):
            torch.testing.assert_close(answer.probabilities[row], reference(text, drafted[row], 0), **EXACT)
            for place, (k, token) in enumerate(zip(cache.accepted[row], cache.bonus[row])):
                if k >= 0:
                    follow, count = [*drafted[row][:k], token, *cache.tokens[row][place]], count + 1
                    torch.testing.assert_close(told[row, place], reference(text, follow, k + 1), **EXACT)
        assert count >= 8


@pytest.fixture(scope="module")
def pair():
    target = tiny_model()
    return target, tiny_head(target)


# ---------------------------------------------------------------- proposals


@torch.inference_mode()
def check(pair):
    """
    What is proposed is what the head gives, which reads the target's features of all tokens of the text but the last,
    and its own states from there on.
    """
    target, head = pair
    speculator = new_speculator(head)
    assert isinstance(speculator.drafter, HeadDrafter)

    given = [torch.zeros(0, head.config.target_width) for _ in PROMPTS]

    def features(texts, known):
        of_rows = [expected_features(target, torch.tensor(text))[n:-1] for text, n in zip(texts, known)]

        def receive(tokens, width):
            flat = torch.cat(of_rows)
            assert flat.shape == (tokens, width)
            for row, (before, new) in enumerate(zip(given, of_rows)):
                states = speculator.drafter.prefix.states.values[row, : len(before)]
                torch.testing.assert_close(states, head.fuse(before), **EXACT)  # after a hit too
                given[row] = torch.cat([before, new])
            return flat

        return receive

    def reference(text, follow, own):
        states = head.fuse(expected_features(target, torch.tensor(text))[:-1])
        tokens, results = text[1:], []
        for token in [*follow, None]:
            output = head(head.inputs(torch.tensor(tokens), states)[None]).last_hidden_state[0]
            results.append(head.logits(output[-1]).float().softmax(-1))
            tokens, states = [*tokens, token], torch.cat([states, output[-1:]])
        return torch.stack(results[own : own + LOOKAHEAD])

    check_proposals(speculator, reference, features)


def test_what_is_proposed_is_what_the_head_gives_for_features_and_own_states(pair):
    check(pair)


@pytest.mark.slow
def test_what_a_head_with_a_sliding_window_proposes(pair):
    window = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    head = tiny_head(pair[0], norm_output=True, fc_norm=True, norm_before_residual=True, **window)
    assert head.config.layer_types == ["sliding_attention"]
    check((pair[0], head))


def features_one_position_off(monkeypatch):
    take = HeadPrefix.read_target

    def off(self, outcome):
        take(self, dataclasses.replace(outcome, states=lambda *size: outcome.states(*size).roll(1, 0)))

    monkeypatch.setattr(HeadPrefix, "read_target", off)


def states_of_rejected_tokens_stay(monkeypatch):
    take = HeadPrefix.read_target

    def keeps(self, outcome):
        fed = list(self.fed)
        take(self, outcome)
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
        check(pair)


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
    (target, head), ids = pair, torch.tensor([[1, 2]])
    save_head(head, tmp_path)
    wide, many, shallow = {"hidden_size": 64, "head_dim": 16}, {"vocab_size": VOCAB + 200}, {"num_hidden_layers": 2}
    for changes, words in (
        (None, "is an EAGLE-3 head, which reads hidden states of its target; pass `target="),
        (wide, "have 64; it was made for another target"),
        (shallow, "has those of 0 to 2; the draft was made for another target"),
    ):
        with pytest.raises(ValueError, match=words):
            hf_ssd.launch_draft(tmp_path, **({} if changes is None else {"target": tiny_model(**changes)}))
    for model, draft, drafter, words in (
        (tiny_model(**many), tmp_path, "auto", "`embed_tokens.weight` has the shape"),
        (tiny_model(**wide), head, "auto", "have 192; the draft was made for another target"),
        (target, head, "autoregressive", "The draft reads hidden states of the target"),
        (target, head, "parallel", "The draft reads hidden states of the target"),
        (target, tiny_model(), "eagle3", "does not read hidden states"),
    ):
        with pytest.raises(ValueError, match=words):
            hf_ssd.generate(model, ids, assistant_model=draft, ssd_config=SSDConfig(drafter=drafter))
