"""Siblings: what the draft ranks next where it drew a token, which a tree verifies beside it and no pass drafts."""

import heapq

import torch

MOST = 4  # of a drafted token
SCALE = 1000  # integers travel to the host together: costs are in thousandths of a nat


def beside(scores: torch.Tensor, noise: torch.Tensor | None, drawn: torch.LongTensor) -> torch.LongTensor:
    """
    Ranks the M best tokens beside the `drawn` ones `(batch_size, N)` as the target will draw them. Returns them, their
    costs, and that of the drawn token `(batch_size, N, 2 * M + 1)`: negative logarithms of probabilities.
    """
    ranking = (scores if noise is None else scores - noise.log()).log_softmax(dim=-1)
    of_drawn = ranking.gather(2, drawn[:, :, None])
    values, tokens = ranking.scatter(2, drawn[:, :, None], -torch.inf).topk(min(MOST, scores.shape[2] - 1), dim=2)
    costs = torch.cat([values, of_drawn], dim=2).neg().clamp(0, 100).nan_to_num(100.0)
    return torch.cat([tokens, (SCALE * costs).long()], dim=2)


def best(of_tokens: list[list[int]], count: int) -> list[tuple[int, int]]:
    """Returns the `count` siblings `(depth, token)` that a row reaches with the largest products of probabilities."""
    reached, found = 0, []
    for depth, (*values, of_drawn) in enumerate(of_tokens):
        half = len(values) // 2
        found += [(reached + cost, depth, token) for token, cost in zip(values[:half], values[half:])]
        reached += of_drawn
    return [(depth, token) for _, depth, token in heapq.nsmallest(count, found)]
