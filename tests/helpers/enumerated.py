"""Next-token distributions after every prefix, and what they say of whole texts, exactly."""

import itertools

import torch

VOCAB = 5


def random_tree(depth, seed, sparse=0.0):
    """Next-token distributions for every prefix of up to `depth` tokens, some tokens impossible."""
    generator = torch.Generator().manual_seed(seed)
    tree = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            weights = torch.rand(VOCAB, generator=generator, dtype=torch.float64) ** 3
            weights[torch.rand(VOCAB, generator=generator) < sparse] = 0
            weights[int(torch.randint(VOCAB, (1,), generator=generator))] += 0.1
            tree[prefix] = weights / weights.sum()
    return tree


def add_continuations(joint, p, prefix, chance):
    """What comes after the bonus token is the target's own."""
    if chance == 0:
        return
    if len(prefix) == joint.dim():
        joint[prefix] += chance
        return
    for token in range(VOCAB):
        add_continuations(joint, p, (*prefix, token), chance * p[prefix][token].item())


def plain_distribution(p, length):
    joint = torch.zeros([VOCAB] * length, dtype=torch.float64)
    add_continuations(joint, p, (), 1.0)
    return joint
