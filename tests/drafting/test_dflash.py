"""DFlash drafts read their target's hidden states; they draft the tokens that transformers drafts."""

import copy

import pytest
import torch
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import hf_ssd
from hf_ssd.drafting.block_drafter import BlockDrafter, BlockPrefix
from hf_ssd.rounds import IN_TURN

from ..helpers.assistants import (
    dflash_draft,
    gemma4_target,
    keep_rejected_tokens,
    muse_glimmer_target,
    read_the_token_before,
)
from ..helpers.tape import use_tapes
from ..helpers.tiny import padded_batch, tiny_model

OPTIONS = {"max_new_tokens": 12, "pad_token_id": 0, "return_dict_in_generate": True, "do_sample": False}
CONFIG = hf_ssd.SSDConfig(lookahead=4, on_draft_failure="raise")
TARGETS = {"llama": tiny_model, "muse_glimmer": muse_glimmer_target}
LONG = 80  # tokens of a prompt whose tokens are fed without queries


@pytest.fixture(scope="module", params=["llama", pytest.param("muse_glimmer", marks=pytest.mark.slow)])
def pair(request):
    target = hf_ssd.enable(TARGETS[request.param]())
    return target, dflash_draft(target)


def drafted_by_transformers(target, draft, text: torch.LongTensor, count: int) -> list[int]:
    """Returns the tokens that transformers drafts after a text whose tokens but the last the target has read."""
    config = copy.deepcopy(target.generation_config)
    config.max_length = len(text) + count + 1
    embeddings = target.get_input_embeddings(), target.get_output_embeddings()
    generator = DFlashTokenCandidateGenerator(draft, *embeddings, config)
    inputs = {"position_ids": torch.arange(len(text))[None], "attention_mask": torch.ones(1, len(text))}
    with torch.no_grad():
        outputs = target(text[None, :-1], **generator.model_kwargs_overrides)
        tokens, _ = generator.get_candidates(text[None], inputs, outputs, False, 0)
    return tokens[0, len(text) :][:count].tolist()


def agreement(pair, monkeypatch, length: int = 9, reference=drafted_by_transformers, **settings) -> list[bool]:
    """Decodes with the draft, and returns for each round and row whether the reference drafts the same tokens."""
    (target, draft), drafted, complete = pair, [], BlockDrafter.complete

    def spy(self, ready, width, plan):
        lengths, (speculation, steps) = list(self.prefix.lengths), complete(self, ready, width, plan)
        drafted.append((lengths, speculation.tokens))
        assert steps == 1
        return speculation, steps

    monkeypatch.setattr(BlockDrafter, "complete", spy)
    inputs = padded_batch(3, length)
    plain = target.generate(**inputs, **OPTIONS).sequences
    config = hf_ssd.SSDConfig(**{"lookahead": 4, "on_draft_failure": "raise", **settings})
    output = target.generate(**inputs, **OPTIONS, assistant_model=draft, ssd_config=config)
    assert torch.equal(output.sequences, plain)
    records = output.ssd_stats.records
    assert records and all(record.mode == IN_TURN for record in records)
    assert {r.lookahead for r in records} >= {config.lookahead}
    texts = [row[mask.bool()] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
    texts = [torch.cat([text, row[inputs["input_ids"].shape[1] :]]) for text, row in zip(texts, plain)]
    return [
        of_row == reference(target, draft, text[:length], len(of_row))
        for lengths, tokens in drafted[::3]
        for text, length, of_row in zip(texts, lengths, tokens)
        if of_row and length < len(text)
    ]


@pytest.mark.parametrize("length", [9, pytest.param(LONG, marks=pytest.mark.slow)])
def test_the_draft_drafts_what_transformers_drafts(pair, length, monkeypatch):
    agrees = agreement(pair, monkeypatch, length)
    assert len(agrees) > 5 and all(agrees)


@pytest.mark.slow
def test_fewer_tokens_than_the_block_has_are_the_first_of_the_block(pair, monkeypatch):
    agrees = agreement(pair, monkeypatch, lookahead=2)
    assert len(agrees) > 5 and all(agrees)


@pytest.mark.slow
def test_more_tokens_than_the_block_has_are_drafted_with_a_larger_block(pair, monkeypatch):
    longer = copy.deepcopy(pair[1])
    longer.config.block_size = 8
    agrees = agreement(pair, monkeypatch, lookahead=7)
    assert len(agrees) > 5 and not all(agrees)  # transformers has 4 tokens alone
    assert all(agreement((pair[0], longer), monkeypatch, lookahead=7))


def test_features_of_the_token_before_are_noticed(pair, monkeypatch):
    """The mutant: hidden states are those of the token before."""
    read_the_token_before(monkeypatch)
    assert not all(agreement(pair, monkeypatch))


def test_features_of_rejected_tokens_are_noticed(pair, monkeypatch):
    """The mutant: the features of accepted tokens are those of the end of the speculation."""
    keep_rejected_tokens(monkeypatch)
    assert not all(agreement(pair, monkeypatch))


def test_a_block_that_is_read_one_place_off_is_noticed(pair, monkeypatch):
    """The mutant: the token at a place is that of the place before, as in a parallel draft."""
    feed = BlockPrefix.feed
    monkeypatch.setattr(BlockPrefix, "feed", lambda *arguments, **options: feed(*arguments, **options).roll(1, dims=1))
    assert not all(agreement(pair, monkeypatch))


@pytest.mark.slow
def test_a_block_whose_tokens_see_only_tokens_before_them_is_noticed(pair, monkeypatch):
    """The mutant: a block with causal attention."""
    at = BlockPrefix._at

    def causal(self, columns):
        inputs = at(self, columns)
        inputs[..., -1] = 0
        return inputs

    monkeypatch.setattr(BlockPrefix, "_at", causal)
    assert not all(agreement(pair, monkeypatch))


@pytest.mark.slow
def test_captured_passes_draft_the_same_tokens(pair, monkeypatch):
    tapes = use_tapes(monkeypatch)
    assert all(agreement(pair, monkeypatch, cuda_graphs=True)) and sum(tape.replayed for tape in tapes.made) > 5


@pytest.mark.slow
def test_mask_tokens_that_stay_in_the_cache_are_noticed(pair, monkeypatch):
    """The mutant: tokens that were read as a block are not read again with their features."""
    take = BlockPrefix.read_target

    def stay(self, states):
        fed = list(self.fed)
        take(self, states)
        self.fed = fed

    monkeypatch.setattr(BlockPrefix, "read_target", stay)
    assert not all(agreement(pair, monkeypatch))


def test_rounds_accept_as_many_tokens_as_in_transformers(monkeypatch):
    target = hf_ssd.enable(tiny_model(vocab_size=8, initializer_range=0.12))
    draft, theirs, candidates = dflash_draft(target), [], DFlashTokenCandidateGenerator.get_candidates

    def spy(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **options):
        theirs.append(n_last_matches)
        return candidates(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **options)

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", spy)
    inputs, options = torch.tensor([[2, 3, 5, 2, 3]]), {**OPTIONS, "max_new_tokens": 45}
    plain = target.generate(inputs, **options, assistant_model=draft, speculation_type="dflash").sequences
    output = target.generate(inputs, **options, assistant_model=draft, ssd_config=CONFIG)
    assert torch.equal(output.sequences, plain) and output.ssd_stats.tokens_per_round > 1.3
    rounds = theirs[2:]  # transformers asks once before the prefill, once after it, and not after the last round
    assert len(rounds) > 20 and [record.accepted[0] for record in output.ssd_stats.records][:-1] == rounds


def test_a_draft_for_another_target_is_refused(pair):
    target, draft = pair
    other = gemma4_target(hidden_size=64)
    with pytest.raises(ValueError, match="made for another target"):
        hf_ssd.enable(other).generate(**padded_batch(1), assistant_model=draft, ssd_config=CONFIG)
    with pytest.raises(ValueError, match=r"reads the hidden states \[1, 9\]"):
        far = dflash_draft(target, target_layer_ids=[0, 8])
        target.generate(**padded_batch(1), assistant_model=far, ssd_config=CONFIG)
    with pytest.raises(ValueError, match="mask token 97 is not in the vocabulary"):
        outside = dflash_draft(target, mask_token_id=97)
        target.generate(**padded_batch(1), assistant_model=outside, ssd_config=CONFIG)


@pytest.mark.parametrize("drafter", ["eagle3", "mtp", "parallel"])
def test_another_drafter_is_refused(pair, drafter):
    config = hf_ssd.SSDConfig(drafter=drafter)
    with pytest.raises(ValueError, match="leave out"):
        pair[0].generate(**padded_batch(1), assistant_model=pair[1], ssd_config=config)


@pytest.mark.slow
def test_a_draft_of_another_type_than_the_target_drafts(pair):
    draft = copy.deepcopy(pair[1]).to(torch.bfloat16)
    plain = pair[0].generate(**padded_batch(3), **OPTIONS).sequences
    output = pair[0].generate(**padded_batch(3), **OPTIONS, assistant_model=draft, ssd_config=CONFIG)
    assert torch.equal(output.sequences, plain) and {r.lookahead for r in output.ssd_stats.records} >= {4}


def test_flash_attention_is_refused(pair):
    with_flash = copy.deepcopy(pair[1])
    with_flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="uses flash attention, which takes no 4D masks"):
        pair[0].generate(**padded_batch(1), assistant_model=with_flash, ssd_config=CONFIG)


def test_a_worker_for_the_draft_is_refused(pair, tmp_path):
    with pytest.raises(ValueError, match="drafts in the target's process: load it"):
        hf_ssd.launch_draft(pair[1])
    pair[1].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="drafts in the target's process: load it"):
        pair[0].generate(**padded_batch(1), assistant_model=str(tmp_path), ssd_config=CONFIG)
