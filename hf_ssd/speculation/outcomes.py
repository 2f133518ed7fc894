"""Cache shapes: which verification outcomes to prepare in a round."""

import math

import torch

from ..config import SSDConfig
from ..theory import geometric_fan_out


def allocate(weights: list[float], budget: int) -> list[int]:
    """
    Shares whole numbers in proportion to the weights, by largest remainder.

    Args:
        weights (`list[float]`): Not negative, not all zero.
        budget (`int`): What the result sums to, exactly.
    """
    total = math.fsum(weights)
    shares = [budget * weight / total for weight in weights]
    result = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (result[k] - shares[k], k))
    for k in by_remainder[: budget - sum(result)]:
        result[k] += 1
    return result


def fan_out(config: SSDConfig, lookahead: int) -> list[int]:
    """
    Plans how many bonus tokens to guess for each accepted count.

    Args:
        config (`SSDConfig`): Gives the shape, the budget and the priors.
        lookahead (`int`): Drafted tokens in the speculation that is being verified. 0 during the target's prefill,
            when the only outcome is the first token.

    Returns:
        `list[int]` of length `lookahead + 1`, which sums to the budget.
    """
    if not isinstance(config.fan_out, str):
        return (
            list(config.fan_out) if lookahead == config.lookahead else allocate([1.0] * (lookahead + 1), config.budget)
        )
    if config.fan_out == "uniform":
        return allocate([1.0] * (lookahead + 1), config.budget)
    shares = geometric_fan_out(lookahead, config.budget, config.acceptance_rate, config.power_law_exponent)
    return allocate(shares, config.budget)


def choose(
    scores: torch.Tensor, logits: torch.Tensor, drafted: torch.LongTensor, fan_outs: list[int]
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """
    Guesses the bonus tokens: the draft's most likely tokens after each accepted count, except the drafted token itself,
    which as a bonus token would mean that it had been accepted.

    Args:
        scores (`torch.FloatTensor` of shape `(batch_size, lookahead + 1, vocab_size)`): The draft's scores after 0 to
            K accepted tokens, as its warpers left them.
        logits (`torch.FloatTensor` of the same shape): Its raw logits, which rank what the warpers ruled out: when a
            drafted token is rejected, the bonus token often comes from there.
        drafted (`torch.LongTensor` of shape `(batch_size, lookahead)`): The speculation that is being verified.
        fan_outs (`list[int]` of length `lookahead + 1`): Guesses for each accepted count.

    Returns:
        Two `torch.LongTensor`, of shapes `(N,)` and `(batch_size, N)`: accepted count and bonus token of each outcome.
    """
    lookahead, vocab_size = drafted.shape[1], scores.shape[2]
    fan_outs = [min(count, vocab_size - (k < lookahead)) for k, count in enumerate(fan_outs)]
    ranking = torch.where(scores.isneginf(), logits - 1e6, scores)
    if lookahead:
        ranking = ranking.clone()
        ranking[:, :lookahead].scatter_(2, drafted[:, :, None], -math.inf)
    best = ranking.topk(max(fan_outs), dim=2).indices
    accepted = [k for k, count in enumerate(fan_outs) for _ in range(count)]
    ranks = [rank for count in fan_outs for rank in range(count)]
    return torch.tensor(accepted, device=scores.device), best[:, accepted, ranks]
