"""
Siblings: the tokens that a token tree verifies beside drafted ones. The drafted tokens stay the trunk of the tree, and
the siblings are its other leaves: what the draft ranks next where it drew a token, so they take no pass of their own.
"""

import heapq

import torch

MOST = 4  # of a drafted token
SCALE = 1000  # integers travel to the host together: costs are in thousandths of a nat


def beside(scores: torch.Tensor, noise: torch.Tensor | None, drawn: torch.LongTensor) -> torch.LongTensor:
    """
    Ranks the tokens beside those that were `drawn` `(batch_size, N)` by scores `(batch_size, N, vocab_size)` with the
    noise of the same shape, as the target will draw them. Returns `(batch_size, N, 2 * M + 1)`: the M best tokens, up
    to `MOST`, their costs, and the cost of the drawn token. A cost is the negative logarithm of a probability.
    """
    ranking = (scores if noise is None else scores - noise.log()).log_softmax(dim=-1)
    of_drawn = ranking.gather(2, drawn[:, :, None])
    values, tokens = ranking.scatter(2, drawn[:, :, None], -torch.inf).topk(min(MOST, scores.shape[2] - 1), dim=2)
    costs = torch.cat([values, of_drawn], dim=2).neg().clamp(0, 100).nan_to_num(100.0)
    return torch.cat([tokens, (SCALE * costs).long()], dim=2)


def best(of_tokens: list[list[int]], count: int) -> list[tuple[int, int]]:
    """
    Returns `count` siblings `(depth, token)` of the drafted tokens of a row, of which [`beside`] has told: those that
    the row reaches with the largest products of probabilities. They stand where the draft is least certain.
    """
    reached, found = 0, []
    for depth, (*values, of_drawn) in enumerate(of_tokens):
        half = len(values) // 2
        found += [(reached + cost, depth, token) for token, cost in zip(values[:half], values[half:])]
        reached += of_drawn
    return [(depth, token) for _, depth, token in heapq.nsmallest(count, found)]
