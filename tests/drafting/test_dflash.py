"""DFlash drafts read their target's hidden states; they draft the tokens that transformers drafts."""

import copy

import pytest
import torch
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import hf_ssd
from hf_ssd.drafting.parallel_drafter import BlockPrefix

from ..helpers.assistants import (
    agreement,
    dflash_draft,
    keep_rejected_tokens,
    muse_glimmer_target,
    read_the_token_before,
)
from ..helpers.tape import use_tapes
from ..helpers.tiny import padded_batch, speculated, tiny_model

TARGETS = {"llama": tiny_model, "muse_glimmer": muse_glimmer_target}
slowly = pytest.mark.slow


@pytest.fixture(scope="module", params=["llama", pytest.param("muse_glimmer", marks=slowly)])
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


def agrees(pair, reference=drafted_by_transformers, **options) -> list[bool]:
    return agreement(pair, reference, **{"lookahead": 4, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ends": True},
        pytest.param({"length": 80}, marks=slowly),  # whose tokens are fed without queries
        pytest.param({"lookahead": 2}, marks=slowly),  # the first tokens of a block
    ],
)
def test_the_draft_drafts_what_transformers_drafts(pair, options):
    assert all(agrees(pair, **options))


@slowly
def test_more_tokens_than_the_block_has_are_drafted_with_a_larger_block(pair):
    longer = copy.deepcopy(pair[1])
    longer.config.block_size = 8
    assert not all(agrees(pair, lookahead=7))  # transformers has 4 tokens alone
    assert all(agrees((pair[0], longer), lookahead=7))


@slowly
def test_captured_passes_draft_the_same_tokens(pair, monkeypatch):
    tapes = use_tapes(monkeypatch)
    assert all(agrees(pair, cuda_graphs=True)) and sum(tape.replayed for tape in tapes.made) > 5


def one_place_off(monkeypatch):
    """The token at a place is that of the place before, as in a parallel draft."""
    feed = BlockPrefix.feed
    monkeypatch.setattr(BlockPrefix, "feed", lambda *arguments, **options: feed(*arguments, **options).roll(1, dims=1))


def causal_blocks(monkeypatch):
    following = BlockPrefix._next

    def causal(self, *counts):
        inputs, *places = following(self, *counts)
        inputs[..., -1] = 0
        return inputs, *places

    monkeypatch.setattr(BlockPrefix, "_next", causal)


def mask_tokens_stay(monkeypatch):
    """Tokens that were read as a block are not read again with their features."""
    take = BlockPrefix.read_target

    def stay(self, outcome):
        fed = list(self.fed)
        take(self, outcome)
        self.fed = fed

    monkeypatch.setattr(BlockPrefix, "read_target", stay)


MUTANTS = [read_the_token_before, keep_rejected_tokens, one_place_off]
MUTANTS += [pytest.param(mutate, marks=slowly) for mutate in (causal_blocks, mask_tokens_stay)]


@pytest.mark.parametrize("mutate", MUTANTS)
def test_mistakes_are_noticed(pair, mutate, monkeypatch):
    mutate(monkeypatch)
    assert not all(agrees(pair))


@slowly
def test_a_draft_of_another_type_than_the_target_drafts(pair):
    draft = copy.deepcopy(pair[1]).to(torch.bfloat16)
    output = speculated(pair[0], draft, padded_batch(3), {"lookahead": 4}, least=0, max_new_tokens=12, pad_token_id=0)
    assert max(output.ssd_stats.column("lookahead")) >= 4


# ---------------------------------------------------------------- refused


def with_flash_attention(target):
    draft = dflash_draft(target)
    draft.config._attn_implementation = "flash_attention_2"
    return draft


REFUSED = {
    r"reads the hidden states \[1, 9\]": lambda target: dflash_draft(target, target_layer_ids=[0, 8]),
    "mask token 97 is not in the vocabulary": lambda target: dflash_draft(target, mask_token_id=97),
    "made for another target": lambda target: dflash_draft(target, hidden_size=64),
    "uses flash attention, which takes no 4D masks": with_flash_attention,
}


def refusal(pair, **settings):
    with pytest.raises(ValueError) as error:
        pair[0].generate(**padded_batch(1), assistant_model=pair[1], ssd_config=hf_ssd.SSDConfig(**settings))
    return str(error.value)


@pytest.mark.parametrize("reason", REFUSED)
def test_a_draft_that_does_not_fit_is_refused(target, reason):
    with pytest.raises(ValueError, match=reason):
        target.generate(**padded_batch(1), assistant_model=REFUSED[reason](target), ssd_config=hf_ssd.SSDConfig())


@pytest.mark.parametrize("drafter", ["eagle3", "mtp", "parallel"])
def test_another_drafter_is_refused(pair, drafter):
    assert "leave out" in refusal(pair, drafter=drafter)


def test_a_worker_for_the_draft_is_refused(pair, tmp_path):
    with pytest.raises(ValueError, match="drafts in the target's process: load it"):
        hf_ssd.launch_draft(pair[1])
    pair[1].save_pretrained(tmp_path)
    assert "drafts in the target's process: load it" in refusal((pair[0], str(tmp_path)))
