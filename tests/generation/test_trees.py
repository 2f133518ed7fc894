"""Token trees: what their nodes see, which path is decided, and where its columns go."""

import copy

import numpy as np
import pytest
import torch

import hf_ssd
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.distributed import wire
from hf_ssd.drafting import siblings
from hf_ssd.drafting.speculation_cache import SpeculationCache
from hf_ssd.generation import trees
from hf_ssd.generation.proposers.ngrams import NgramIndex
from hf_ssd.generation.trees import NO_TOKEN, Tree
from hf_ssd.generation.verification import Chance, verify_coupled
from hf_ssd.noise import Noise
from hf_ssd.rounds import NGRAM, PREPARED, RoundRecord, Speculation
from hf_ssd.timeline import intervals

from ..helpers import comparing
from ..helpers.families import sharp_model, tiny_config
from ..helpers.preparing import preparing
from ..helpers.tiny import VOCAB, speculated, tiny_model


def texts_of(row: int, length: int) -> torch.LongTensor:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(row))


def test_a_speculation_with_siblings_is_a_tree_of_its_trunk_and_them():
    tree = Tree(Speculation([[5, 6], [7, 8]], siblings=[[(1, 9), (0, 4)], [(1, 3)]]))
    assert tree.tokens == [[5, 6, 9, 4], [7, 8, 3, 7]] and tree.parents == [[-1, 0, 0, -1], [-1, 0, 0, -1]]
    assert tree.paths([[4, 0, 0, 0, 0], [7, 3, 0, 0, 0]]) == [[3], [0, 2]]
    assert tree.paths([[0] * 5] * 2) == [[0, 1]] * 2


def test_siblings_are_the_next_best_where_the_draft_is_least_certain():
    sure, unsure = [0.0, 8.0, 0.0, -1.0, -2.0, -3.0], [2.0, -1.0, 1.9, 1.0, -2.0, -3.0]
    found = siblings.beside(torch.tensor([[sure, unsure]]), None, torch.tensor([[1, 0]]))
    assert found[0, 1, : siblings.MOST].tolist() == [2, 3, 1, 4]
    assert siblings.best(found[0].tolist(), 2) == [(1, 2), (1, 3)]
    assert [depth for depth, _ in siblings.best(found[0].tolist(), 6)].count(0) > 0
    noise = torch.ones(1, 2, 6)
    noise[0, 1, 5] = 1e-6  # the target is going to draw it
    assert siblings.beside(torch.tensor([[sure, unsure]]), noise, torch.tensor([[1, 0]]))[0, 1, 0] == 5


def test_a_branch_goes_on_behind_a_sibling_that_was_accepted():
    cache = SpeculationCache([[0, 1]], [[4, 5]], None, None)
    cache.append([[[6, 7], [8, 9]]], None, None, [[[[1], [2]], [[3], [4]]]])
    assert not cache.go_on(0, 0, 5) and cache.tokens[0][0] == [6, 7]
    assert cache.go_on(0, 0, 6) and cache.tokens[0] == [[7], [8, 9]] and cache.beside[0][0] == [[2]]


def call(pair, max_new_tokens=40, vocabulary=VOCAB, **settings):
    inputs = {"input_ids": torch.stack([texts_of(row, 9) for row in range(2)]) % vocabulary}
    config = {"tree_nodes": 8, **settings}
    return speculated(*pair, inputs, config, least=0.9, max_new_tokens=max_new_tokens).ssd_stats


def sees_siblings(tree, ancestors=Tree.ancestors):
    return np.tril(np.ones_like(ancestors(tree)))


MUTANTS = {
    "a sibling sees a sibling": (Tree, "ancestors", sees_siblings),
    "the positions of a chain": (CachedModel, "extend_tree", lambda self, tokens, at, sees: self.extend(tokens, at)),
    "the columns of a path stay": (RaggedCache, "move_columns", lambda self, moves: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_in_a_pass_over_trees_change_the_text(mutant, target, draft, monkeypatch):
    """The mutants for the trees of `tests/matrix.py`."""
    call((target, draft))
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        call((target, draft))


def test_trees_give_more_tokens_a_round_than_the_chain_in_them(target, draft):
    tree, chain = call((target, draft)), call((target, draft), tree_nodes=3)
    taken = [one.details["rows that took a sibling"] for one in intervals(tree) if "nodes" in one.details]
    assert sum(taken) > 0 and not any("nodes" in one.details for one in intervals(chain))
    assert {*chain.column("nodes")} == {0} and 8 in tree.column("nodes")
    assert tree.tokens_per_round > chain.tokens_per_round and tree.rounds < chain.rounds


def test_siblings_of_ngrams_gain_tokens_too(monkeypatch):
    """Where a text has gone on in several ways after the same tokens, the others are siblings."""
    pair = hf_ssd.enable(tiny_model(vocab_size=12)), None
    settings = {"vocabulary": 12, "drafter": "ngram", "lookahead": 4, "budget": "auto", "tree_nodes": 8}
    tree = call(pair, 80, **settings)
    taken = [record.took_sibling(row) for record in tree.records for row in record.live]
    assert sum(taken) > 3 and 8 in tree.column("nodes")
    monkeypatch.setattr(NgramIndex, "siblings", lambda self, tokens: [])  # the mutant
    chain = call(pair, 80, **settings)
    assert {*chain.column("nodes")} == {0} and chain.tokens_per_round < tree.tokens_per_round


def behind_siblings(pair) -> list[int]:
    """Returns the accepted counts of hits of rows that took a sibling in the round before."""
    with preparing():
        records = call(pair, max_new_tokens=120).records
    rounds = zip(records, records[1:])
    return [two.accepted[row] for one, two in rounds for row in two.live if one.took_sibling(row) and two.hits[row]]


@pytest.mark.slow
def test_an_outcome_of_another_node_is_noticed(target, draft, monkeypatch):
    """The text would be the same, but what was prepared for another token is hardly ever right."""
    right = behind_siblings((target, draft))
    monkeypatch.setattr(SpeculationCache, "go_on", lambda self, row, branch, token: True)
    wrong = behind_siblings((target, draft))
    assert len(right) > 5 and sum(right) / len(right) > 2 * sum(wrong) / len(wrong)


@pytest.mark.slow
def test_siblings_are_known_where_a_fallback_proposes_for_another_row(target, draft):
    """Otherwise all rows would miss after one has taken a sibling."""
    with preparing():
        records = call((target, draft), max_new_tokens=120, budget=5, fallback="ngram").records
    rounds = [pair for pair in zip(records, records[1:]) if NGRAM in pair[0].sources]
    after = [two for one, two in rounds if any(map(one.took_sibling, one.live))]
    assert sum(any(record.hits) for record in after) > len(after) / 4 > 0


def test_nan_of_a_drafted_token_does_not_reach_the_last_token_of_a_row(draft):
    """A pass for a token alone has no drafted tokens beside it, since nothing would look for NaN then."""
    target, draft, token = hf_ssd.enable(tiny_model()), copy.deepcopy(draft), 50
    with torch.no_grad():
        target.model.embed_tokens.weight[token], target.lm_head.weight[token] = torch.nan, 0
        draft.lm_head.weight[token] *= 2
    prompts = torch.stack([texts_of(row, 9) for row in range(8)])
    inputs = {"input_ids": prompts.masked_fill(prompts == token, 1), "attention_mask": torch.ones_like(prompts)}
    settings = {"tree_nodes": 9, "lookahead": 3}
    for count in (2, 20):
        speculated(target, draft, inputs, settings, max_new_tokens=count, least=0.9)


def test_any_path_gives_the_same_text(target, draft, monkeypatch):
    """What is accepted depends on the path, and what is decided does not."""
    best = call((target, draft)).tokens_per_round
    paths = Tree.paths
    wrong = lambda self, choices: paths(self, [[0] * len(row) for row in choices])  # noqa: E731
    monkeypatch.setattr(Tree, "paths", wrong)
    assert call((target, draft)).tokens_per_round < best


def test_a_place_without_a_node_is_never_accepted():
    """Where there is no distribution to draw from, the draw is -1 too."""
    chance = Chance(Noise(1, VOCAB, coupled=True), torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    scores = torch.full((1, 2, VOCAB), -torch.inf)
    accepted, bonus, _ = verify_coupled(scores, torch.tensor([[NO_TOKEN]]), chance)
    assert (accepted.tolist(), bonus.tolist()) == ([0], [-1])


def test_chains_are_verified_where_no_tree_can_be_and_the_sentence_says_why(target, draft, monkeypatch):
    said, inputs = [], {"input_ids": texts_of(0, 9)[None]}
    monkeypatch.setattr(trees.logger, "warning_once", said.append)
    stats = comparing.generate(target, draft, inputs, {"tree_nodes": 9}, do_sample=True).ssd_stats
    assert {*stats.column("nodes")} == {0} and 'verification="coupled"' in said[0]
    stats = comparing.generate(target, draft, inputs, {"tree_nodes": 9}).ssd_stats
    assert 9 in stats.column("nodes") and len(said) == 1


def test_a_sibling_may_stand_deeper_than_there_are_tokens_in_the_vocabulary():
    sent = Speculation([[1] * 5], None, RoundRecord(sources=[PREPARED]), siblings=[[(4, 2)]])
    assert wire.read_speculation(wire.write_speculation(sent), 1, vocab_size=4).siblings == sent.siblings


def test_texts_are_refused_whose_trees_have_columns_at_which_llama_4_scales_its_attention(draft):
    """It counts all columns, also those of nodes that are not accepted."""
    config = tiny_config("llama4_text")
    config.floor_scale = 600
    settings = {"lookahead": 3, "tree_nodes": 256, "asynchronous": False}
    target, options = hf_ssd.enable(sharp_model(config)), {"assistant_model": draft, "ssd_config": settings}
    with pytest.raises(ValueError, match="scales attention .* `max_length=86` or less"):
        target.generate(texts_of(0, 9)[None], do_sample=False, max_new_tokens=78, **options)
