"""EAGLE-3 heads: the formats they are published in, and what they propose, against passes without any cache."""

import json

import pytest
import torch
from safetensors.torch import load_file
from train_eagle3 import save_head
from transformers import GenerationConfig

import hf_ssd
from hf_ssd.drafting.drafts import Drafts
from hf_ssd.drafting.head_drafter import HeadDrafter, HeadPrefix
from hf_ssd.drafting.heads.loading import head_for
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.rounds import AHEAD, Outcome, Plan

from ..helpers.assistants import agreement, keep_rejected_tokens, read_the_token_before
from ..helpers.heads import expected_features, tiny_head
from ..helpers.tiny import VOCAB, tiny_model

PROMPTS = [[2, 3, 1], [3, 1, 2, 2, 0, 1]]
PLAN = Plan(AHEAD, 3, 3, budget=8)
EXACT = {"atol": 1e-5, "rtol": 0}


@pytest.fixture(scope="module")
def pair():
    target = hf_ssd.enable(tiny_model())
    return target, tiny_head(target)


# ---------------------------------------------------------------- proposals


@torch.no_grad()
def logits_after(target, head, text: torch.LongTensor, follow: list[int]) -> torch.Tensor:
    """
    Returns the logits after a text and some tokens that follow it, without any cache. The head reads the target's
    features of all tokens of the text but the last, and its own states from there on.
    """
    states, tokens = head.fuse(expected_features(target, text)[:-1]), text[1:].tolist()
    for token in [*follow, None]:
        output = head(head.inputs(torch.tensor(tokens), states)[None]).last_hidden_state[0]
        tokens, states = [*tokens, token], torch.cat([states, output[-1:]])
    return head.logits(output[-1]).float()


def drafted(target, head, text: torch.LongTensor, count: int) -> list[int]:
    tokens = []
    while len(tokens) < count:
        tokens.append(int(logits_after(target, head, text, tokens).argmax()))
    return tokens


def agrees(pair, **options) -> list[bool]:
    return agreement(pair, drafted, **{"asynchronous": False, **options})


@pytest.mark.parametrize("prepares", [False, True])
def test_the_head_drafts_from_the_features_of_its_target(pair, prepares):
    assert all(agrees(pair, prepares=prepares))


@pytest.mark.slow
def test_a_head_with_a_sliding_window_keeps_to_it(pair):
    window = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    head = tiny_head(pair[0], norm_output=True, fc_norm=True, norm_before_residual=True, **window)
    assert head.config.layer_types == ["sliding_attention"] and all(agrees((pair[0], head)))


def tokens_of_another_vocabulary(monkeypatch):
    logits = HeadDrafter._logits
    monkeypatch.setattr(HeadDrafter, "_logits", lambda self, states: logits(self, states).roll(1, -1))


@pytest.mark.parametrize("mutant", [read_the_token_before, keep_rejected_tokens, tokens_of_another_vocabulary])
def test_mistakes_are_noticed(mutant, pair, monkeypatch):
    mutant(monkeypatch)
    assert not all(agrees(pair))


@torch.inference_mode()
def check_prepared(target, head):
    """What is prepared for an outcome goes on with the head's own states after the text that is verified."""
    config, texts = hf_ssd.SSDConfig(lookahead=3, budget=8), [torch.tensor(prompt) for prompt in PROMPTS]
    generation = GenerationConfig(max_length=80, eos_token_id=None, pad_token_id=0, do_sample=True, top_k=0)
    speculator = Drafts().speculator(head, SessionRequest(config, generation, texts, 5, VOCAB))
    speculator.drafter.begin()
    features = torch.cat([expected_features(target, text) for text in texts])
    verified = speculator.answer(Outcome([[4], [7]], states=features), PLAN).tokens
    speculator.prepare(PLAN)
    cache, count = speculator.prepared, 0
    told = torch.cat(cache.probabilities, dim=2)
    for row, (text, bonus) in enumerate(zip(texts, (4, 7))):
        for place, (k, token) in enumerate(zip(cache.accepted[row], cache.bonus[row])):
            follow = [*verified[row][:k], token, *cache.tokens[row][place]]
            for depth in range(3) if k >= 0 else ():
                own = logits_after(target, head, torch.cat([text, torch.tensor([bonus])]), follow[: k + 1 + depth])
                torch.testing.assert_close(told[row, place, depth], own.softmax(-1), **EXACT)
                count += 1
    assert count >= 24


def test_what_is_prepared_goes_on_with_the_heads_own_states(pair, monkeypatch):
    check_prepared(*pair)
    write_states = HeadPrefix.write_states  # the mutant: those of the token after
    monkeypatch.setattr(HeadPrefix, "write_states", lambda self, states, n: write_states(self, states.roll(1, 0), n))
    with pytest.raises(AssertionError):
        check_prepared(*pair)


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
            hf_ssd.generate(model, ids, assistant_model=draft, ssd_config=hf_ssd.SSDConfig(drafter=drafter))
