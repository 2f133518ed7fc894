"""Captured passes of sizes that are rounded up, of masks that cannot be captured, and of heads."""

import pytest
import torch
from transformers import GenerationConfig

import hf_ssd
from hf_ssd.cache import passes
from hf_ssd.cache.graphs import Graphs
from hf_ssd.cache.passes import cached_model
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.drafting.autoregressive_drafter import AutoregressiveDrafter
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.rounds import AHEAD, Plan, Speculation

from ..helpers.comparing import generate
from ..helpers.families import sharp_model, tiny_config
from ..helpers.heads import tiny_head, tiny_mtp_head
from ..helpers.tape import use_tapes
from ..helpers.tiny import VOCAB, padded_batch, tiny_draft


@pytest.fixture(autouse=True)
def taped(monkeypatch):
    use_tapes(monkeypatch)


@torch.inference_mode()
def test_chunks_begin_after_the_padding_of_the_call_that_is_running():
    """The padding of the call in which the pass was captured was used for all later calls."""
    model = sharp_model(tiny_config("llama4_text"))
    ids = torch.randint(2, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))

    def logits(graphs, padding):
        valid = torch.arange(20)[None] >= torch.tensor(padding)[:, None]
        decoder = cached_model(
            model, RaggedCache(), graphs, valid=valid, first_positions=[-n for n in padding], column_limit=60
        )
        decoder.extend(ids, [0, 0])
        found = [decoder.extend(ids[:, i : i + 3], [20 + i, 20 + i]) for i in range(6)]
        decoder.close()
        return torch.cat(found, dim=1)

    for padding in ([0, 3], [5, 0], [2, 7]):
        torch.testing.assert_close(logits("auto", padding), logits(False, padding), atol=1e-4, rtol=1e-4)
    assert Graphs.of(model).failure is None and Graphs.of(model).passes


def drafted(draft, graphs, budget, vocab_size=VOCAB, **sampling):
    config = hf_ssd.SSDConfig(lookahead=3, budget=budget, cuda_graphs=graphs)
    generation = GenerationConfig(max_length=100, do_sample=bool(sampling), **sampling)
    prompts, plan = [torch.arange(2, 9), torch.arange(2, 12)], Plan(AHEAD, 3, 3, budget)
    drafter = AutoregressiveDrafter(draft, SessionRequest(config, generation, prompts, 0, vocab_size))
    drafter.begin()
    found, _ = drafter.complete(Speculation.empty(2), 3, plan)
    candidates = drafter.candidates([False] * 2, budget)
    outcomes = candidates.outcomes([[budget - 3, 1, 1, 1]] * 2)
    grown = [passed[0] for passed in drafter.grow(*outcomes, plan) if passed is not None]
    drafter.prefix.decoder.close()
    return found.tokens, grown


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [9, 11])
@torch.inference_mode()
def test_branches_whose_number_is_rounded_up_keep_their_places(budget, sampling):
    draft = tiny_draft()
    for _ in range(2):
        assert drafted(draft, "auto", budget, **sampling) == drafted(draft, False, budget, **sampling)
    graphs = Graphs.of(draft)
    assert graphs.failure is None and graphs.passes


@torch.inference_mode()
def test_tokens_that_the_draft_lacks_do_not_turn_graphs_off():
    draft = tiny_draft()
    for _ in range(3):
        drafted(draft, "auto", 4, VOCAB + 3)
    assert Graphs.of(draft).failure is None and Graphs.of(draft).passes


@pytest.mark.parametrize("kind", [tiny_head, tiny_mtp_head])
def test_heads_run_captured(target, kind):
    head = kind(target)
    generate(target, head, {"input_ids": torch.arange(2, 9)[None]}, max_new_tokens=12)
    assert Graphs.of(head).failure is None and Graphs.of(head).passes


@pytest.mark.slow
def test_passes_that_are_kept_are_bounded(target, monkeypatch):
    monkeypatch.setattr(passes, "MOST_PASSES", 6)
    draft = tiny_draft()
    for rows in range(2, 10):
        generate(target, draft, padded_batch(rows), max_new_tokens=8, do_sample=True)
    assert Graphs.of(draft).failure is None and len(Graphs.of(draft).passes) <= 6
