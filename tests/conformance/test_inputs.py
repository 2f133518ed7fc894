"""What a target is fed with beside the tokens: positions, token types, and rotary embeddings that change."""

import pytest
import torch
from transformers import DynamicCache, MaxLengthCriteria, StoppingCriteriaList

import hf_ssd
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.cached_model import CachedModel

from ..helpers.comparing import as_plain, settings
from ..helpers.families import sharp_model, tiny_config
from ..helpers.mutants import instead_of
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

GREEDY = {"do_sample": False, "return_dict_in_generate": True}


@instead_of(CachedModel, "positions")
def ignoring_the_limit(positions, self, columns):
    """The mutant of the tests below: what `max_length` counts is taken for positions."""
    return positions(self, columns).clamp(max=9 + 20 - 1)


def continued(target, **ssd):
    """Goes on from a cache with nothing but new tokens, in plain generation or not."""
    inputs, cache = padded_batch(1, length=24), DynamicCache(config=target.config)
    options = {"max_new_tokens": 20, CACHE: cache, **GREEDY}
    first = target.generate(**inputs, **{**options, "max_new_tokens": 8})
    new = torch.tensor([[5, 6, 7, 8, 9]])
    mask = torch.ones(1, first[CACHE].get_seq_length() + new.shape[1], dtype=torch.long)
    return target.generate(new, attention_mask=mask, **options, **ssd)


def longer_than_by_default(target, **ssd):
    """The user's criterion takes the place of the 20 tokens that transformers would generate."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(64)])
    return target.generate(**padded_batch(3), stopping_criteria=criteria, **GREEDY, **ssd)


def positions_of_ones_own(target, **ssd):
    inputs = padded_batch(1)
    inputs["position_ids"] = torch.arange(40, 49)[None]
    return target.generate(**inputs, max_new_tokens=20, **GREEDY, **ssd)


def padding_behind_the_prompt(target, **ssd):
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 6:] = mask[2, 8:] = False
    ids = padded_batch(3)["input_ids"].clamp(min=2)
    return target.generate(ids, attention_mask=mask, max_new_tokens=20, **GREEDY, **ssd)


CASES = [continued, longer_than_by_default, positions_of_ones_own]


@pytest.mark.parametrize("case", [*CASES, padding_behind_the_prompt])
def test_positions_are_those_of_plain_generation(target, case):
    output = case(target, **settings(tiny_draft()))
    assert torch.equal(output.sequences, case(target).sequences)
    assert output.ssd_stats.draft_failure is None and any(output.ssd_stats.column("lookahead"))


@pytest.mark.parametrize("case", CASES)
def test_a_limit_of_another_kind_is_noticed(target, monkeypatch, case):
    plain = case(target).sequences
    ignoring_the_limit(monkeypatch)
    assert not torch.equal(case(target, **settings(tiny_draft())).sequences, plain)


def learned_positions(count):
    config = tiny_config("gpt2")
    config.n_positions = count
    return hf_ssd.enable(sharp_model(config))


def test_a_model_may_have_no_positions_beyond_the_limit():
    target = learned_positions(29)
    as_plain(target, target, padded_batch(2), max_new_tokens=20)


# ---------------------------------------------------------------- token types


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_token_types_go_on_as_in_plain_generation(monkeypatch, is_forgotten):
    """Of a model that adds an embedding for the type of each token; and the mutant that forgets them."""
    target = learned_positions(64)
    options = {**padded_batch(3), "token_type_ids": torch.arange(3)[:, None].expand(-1, 9), **GREEDY, "pad_token_id": 0}
    options |= {"max_new_tokens": 20}
    options["eos_token_id"] = int(target.generate(**options).sequences[1, 9 + 7])  # so that a row is left out
    plain = target.generate(**options).sequences
    if is_forgotten:
        init = CachedModel.__init__
        monkeypatch.setattr(CachedModel, "__init__", lambda *a, token_type_ids=None, **k: init(*a, **k))
    output = target.generate(**options, **settings(target))
    assert torch.equal(plain, output.sequences) != is_forgotten and any(output.ssd_stats.column("lookahead"))


# ---------------------------------------------------------------- rotary embeddings that change


def longrope():
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 24}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = tiny_config("phi3")
    config.update({"max_position_embeddings": 64, "original_max_position_embeddings": 24, "rope_parameters": rope})
    return sharp_model(config)


def dynamic():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    return tiny_model(max_position_embeddings=24, rope_parameters=rope)


@pytest.mark.parametrize("model, length, limit", [(longrope, 9, 24), (longrope, 25, 40), (dynamic, 9, 24)])
def test_rotary_embeddings_where_they_do_not_change(model, length, limit):
    prompts = torch.randint(2, 97, (3, length), generator=torch.Generator().manual_seed(1))
    as_plain(hf_ssd.enable(model()), model(), {"input_ids": prompts}, max_new_tokens=limit - length)


@pytest.mark.parametrize("model, length", [(longrope, 9), (dynamic, 9), (dynamic, 25)])
def test_rotary_embeddings_that_would_change_are_refused(model, length):
    prompts = torch.full((2, length), 5)
    with pytest.raises(ValueError, match="changes when the text becomes longer than 24 tokens"):
        hf_ssd.enable(model()).generate(prompts, max_length=40, **settings(model()))


def test_a_cache_from_before_the_change_is_refused():
    target = hf_ssd.enable(longrope())
    first = target.generate(torch.full((1, 9), 5), max_length=20, **GREEDY)
    longer = torch.cat([first.sequences, torch.full((1, 10), 6)], dim=1)
    with pytest.raises(ValueError, match="changes when the text becomes longer than 24 tokens"):
        target.generate(longer, **{CACHE: first[CACHE]}, max_length=40, **GREEDY, **settings(longrope()))


def test_experts_take_the_path_that_plain_decoding_takes(target, draft, monkeypatch):
    """transformers changes how experts are computed between prefill and decoding, on devices other than the CPU."""
    events = []

    class Decoding:
        def __enter__(self):
            events.append("decoding")

        def __exit__(self, *_):
            events.append("restored")

    def positions(_, args, inputs):
        events.append(len(inputs["position_ids"][0]))

    monkeypatch.setattr(target, "_optimize_model_for_decode", Decoding)
    with target.register_forward_pre_hook(positions, with_kwargs=True):
        target.generate(torch.tensor([[3, 5, 7, 9, 11]]), max_new_tokens=12, **settings(draft, lookahead=3))
    start = events.index("decoding")  # behind the prefill, and the trial that the hook brings
    assert events[start - 1] == 5 and events[-1] == "restored"
    assert set(events[start + 1 : -1]) <= {1, 2, 3, 4}
