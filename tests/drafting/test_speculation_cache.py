import torch

from hf_ssd.drafting.speculation_cache import SpeculationCache


def test_lookup_finds_each_outcome_and_nothing_else():
    accepted = torch.tensor([0, 0, 1, 2])
    bonus = torch.tensor([[5, 6, 5, 7], [1, 2, 3, 4]])
    cache = SpeculationCache(accepted, bonus)
    tokens, probabilities, places = cache.lookup(accepted[[1, 1]], bonus[:, 1])  # before any of them has grown
    assert places == [1, 1] and tokens.shape == (2, 0) and probabilities is None
    for depths in ([0], [1, 2]):  # any number of tokens may grow at once
        tokens = torch.arange(8).view(2, 4, 1) * 10 + torch.tensor(depths)
        cache.append(tokens, torch.nn.functional.one_hot(tokens, 80).float())
    for i in range(4):
        tokens, probabilities, places = cache.lookup(accepted[[i, i]], bonus[:, i])
        assert places == [i, i]
        assert tokens.tolist() == [[i * 10 + d for d in range(3)], [(4 + i) * 10 + d for d in range(3)]]
        assert torch.equal(probabilities.argmax(-1), tokens)
    for other in ([1, 2], [6, 4]), ([3, 0], [5, 1]):
        found = cache.lookup(*map(torch.tensor, other))[2]
        assert found[0] == -1 and found[1] >= 0
