import torch
from hf_ssd.cache.speculation import SpeculationCache


def test_lookup_finds_each_outcome_and_nothing_else():
    accepted = torch.tensor([0, 0, 1, 2])
    bonus = torch.tensor([[5, 6, 5, 7], [1, 2, 3, 4]])
    cache = SpeculationCache(accepted, bonus)
    for depth in range(3):
        tokens = torch.arange(8).view(2, 4) * 10 + depth
        cache.append(tokens, torch.nn.functional.one_hot(tokens, 80).float())
    for i in range(4):
        found = cache.lookup(accepted[[i, i]], bonus[:, i])
        assert found.hits.all()
        assert found.tokens.tolist() == [[i * 10 + d for d in range(3)], [(4 + i) * 10 + d for d in range(3)]]
        assert torch.equal(found.probabilities.argmax(-1), found.tokens)
    assert cache.lookup(torch.tensor([1, 2]), torch.tensor([6, 4])).hits.tolist() == [False, True]
    assert cache.lookup(torch.tensor([3, 0]), torch.tensor([5, 1])).hits.tolist() == [False, True]
