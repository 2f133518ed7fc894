"""Captured passes of sizes that are rounded up, of masks that cannot be captured, and of heads."""

import contextlib

import pytest
import torch
from transformers import set_seed

from hf_ssd.cache import passes
from hf_ssd.cache.graphs import Graphs
from hf_ssd.cache.passes import cached_model
from hf_ssd.cache.ragged import RaggedCache

from ..helpers.comparing import generate
from ..helpers.families import sharp_model, tiny_config
from ..helpers.heads import tiny_head, tiny_mtp_head
from ..helpers.loopback import assistant_of
from ..helpers.tape import use_tapes
from ..helpers.tiny import VOCAB, padded_batch, tiny_draft
from ..helpers.vocabularies import resized_draft


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


def ahead(target, draft, inputs, of_config, **options):
    """A call whose draft prepares, in this process, all that it can."""
    assistant = assistant_of(draft, contextlib.nullcontext)
    return generate(target, assistant, inputs, {"lookahead": 3, **of_config}, **options)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [9, 11])
def test_branches_whose_number_is_rounded_up_keep_their_places(budget, sampling, target, draft):
    found = []
    for cuda_graphs in (False, "auto", "auto"):
        set_seed(3)
        of_config = {"budget": budget, "cuda_graphs": cuda_graphs}
        output = ahead(target, draft, padded_batch(2), of_config, **sampling)
        stats = output.ssd_stats
        found.append((output.sequences.tolist(), stats.column("accepted"), stats.column("hits")))
    assert found[0] == found[1] == found[2] and stats.hit_rate > 0
    assert Graphs.of(draft).failure is None and Graphs.of(draft).passes


def test_tokens_that_the_draft_lacks_do_not_turn_graphs_off(target):
    draft = resized_draft(VOCAB - 7)
    for _ in range(3):
        ahead(target, draft, {"input_ids": torch.arange(2, 9)[None]}, {"budget": 4})
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
