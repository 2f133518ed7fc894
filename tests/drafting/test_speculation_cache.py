import torch

from hf_ssd.drafting.speculation_cache import SpeculationCache


def test_lookup_finds_each_outcome_and_nothing_else():
    accepted, bonus = [[0, 0, 1, 2]] * 2, [[5, 6, 5, 7], [1, 2, 3, 4]]
    cache = SpeculationCache(accepted, bonus)
    assert cache.grown == 0 and cache.lookup([0, 0], [6, 2]) == [1, 1]  # before any of them has grown
    for depths in ([0], [1, 2]):  # any number of tokens may grow at once
        tokens = torch.arange(8).view(2, 4, 1) * 10 + torch.tensor(depths)
        q = torch.nn.functional.one_hot(tokens, 80).float()
        cache.append(tokens.tolist(), q, (1 + tokens // 10).tolist())
    for i in range(4):
        branches = cache.lookup([row[i] for row in accepted], [row[i] for row in bonus])
        assert branches == [i, i] and cache.support(branches) == 5 + i
        assert cache.tokens[0][i] == [i * 10 + depth for depth in range(3)]
        q = cache.distributions(branches, 2)
        assert q.argmax(-1).tolist() == [[i * 10, i * 10 + 1], [(4 + i) * 10, (4 + i) * 10 + 1]]
    for other in ([1, 2], [6, 4]), ([3, 0], [5, 1]):
        branches = cache.lookup(*other)
        assert branches[0] == -1 and branches[1] >= 0 and cache.support(branches) == 5 + branches[1]


def test_certain_tokens_were_drawn_from_nothing():
    cache = SpeculationCache([[0]], [[5]])
    cache.append([[[7, 8]]], None, None)
    assert cache.tokens == [[[7, 8]]] and cache.distributions([0], 2) is None
