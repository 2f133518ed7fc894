"""Accepting drafted tokens without changing the target's distribution. Pure tensor functions.

The rule is that of speculative sampling (Leviathan et al., 2023; Chen et al., 2023): accept a token x drawn from q with
probability min(1, p(x) / q(x)), otherwise draw from max(p - q, 0), normalized. Whatever q is, the result is distributed
as p, so it does not matter how a speculation came about.
"""

import torch

from ..argmax import argmax
from ..devices import from_host, has_float64

# Whoever draws from q draws a token with q(x) < p(x) / 10^6 with a chance below 10^-6, since the p(x) sum to 1.
UNLIKELY = 1e-6


def accepted_counts(accept: torch.BoolTensor) -> torch.LongTensor:
    """
    Counts the tokens before the first rejection.

    Args:
        accept (`torch.BoolTensor` of shape `(batch_size, lookahead)`): Whether each token would be accepted.

    Returns:
        `torch.LongTensor` of shape `(batch_size,)`.
    """
    return accept.long().cumprod(dim=1).sum(dim=1)


def verify_greedy(scores: torch.Tensor, drafted: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
    """
    Accepts the drafted tokens that the target would have chosen itself.

    Args:
        scores (`torch.FloatTensor` of shape `(batch_size, lookahead + 1, vocab_size)`): The target's processed scores
            after 0 to `lookahead` drafted tokens.
        drafted (`torch.LongTensor` of shape `(batch_size, lookahead)`): The speculation.

    Returns:
        The outcome of each row, two `torch.LongTensor` of shape `(batch_size,)`: accepted count and bonus token.
    """
    choice = argmax(scores)
    accepted = accepted_counts(choice[:, :-1] == drafted)
    return accepted, choice.gather(1, accepted[:, None]).squeeze(1)


def acceptance_probabilities(p: torch.Tensor, q: torch.Tensor | None, drafted: torch.LongTensor) -> torch.Tensor:
    """
    Args:
        p (`torch.FloatTensor` of shape `(batch_size, lookahead + 1, vocab_size)`): The target's probabilities.
        q (`torch.FloatTensor` of shape `(batch_size, lookahead, vocab_size)`, *optional*): The draft's. `None`: each
            token was certain, a point mass.
        drafted (`torch.LongTensor` of shape `(batch_size, lookahead)`): The speculation, drawn from `q`.

    Returns:
        `torch.FloatTensor` of shape `(batch_size, lookahead)`: p(x) / q(x), which may exceed 1. 0 where q(x) is no
        positive finite number: nothing can have been drawn from that.
    """
    ratio = p[:, :-1].gather(2, drafted[:, :, None]).squeeze(2)
    if q is None:
        return ratio
    q = q.gather(2, drafted[:, :, None]).squeeze(2)
    return torch.where(is_possible(q), ratio / q, 0.0)


def is_possible(q: torch.Tensor) -> torch.BoolTensor:
    """Whether each number can be the probability of a token that was drawn. False for NaN."""
    return (q > 0) & (q < torch.inf)


def residual_distribution(
    p: torch.Tensor, q: torch.Tensor | None, drafted: torch.LongTensor, accepted: torch.LongTensor
) -> torch.Tensor:
    """
    The distribution of the bonus token: max(p - q, 0) where the first token was rejected, p where all were accepted, or
    where the token was rejected because its q(x) is no positive finite number, whatever p says.

    Args:
        p, q, drafted: As in [`acceptance_probabilities`].
        accepted (`torch.LongTensor` of shape `(batch_size,)`): Accepted count of each row.

    Returns:
        `torch.FloatTensor` of shape `(batch_size, vocab_size)`, not normalized.
    """
    rows = torch.arange(len(accepted), device=p.device)
    bonus = p[rows, accepted]
    lookahead = drafted.shape[1]
    if lookahead == 0:
        return bonus
    rejected = accepted < lookahead
    place = accepted.clamp(max=lookahead - 1)
    if q is None:
        residual = bonus.scatter(1, drafted[rows, place][:, None], 0.0)
    else:
        q = q[rows, place]
        residual = (bonus - q).clamp(min=0)
        residual = torch.where(is_possible(q.gather(1, drafted[rows, place][:, None])), residual, bonus)
    # Where p equals q nothing is left of it; a rejection is then a matter of rounding, and p is the right answer.
    residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, bonus)
    return torch.where(rejected[:, None], residual, bonus)


def uniform_numbers(drafted: torch.LongTensor) -> torch.Tensor:
    """
    Returns random numbers from 0 to below 1 of the shape of `drafted`, from torch's default generator. They are drawn
    in float64 because of float32 numbers one in 2^24 is 0, with which any token passes that is possible at all.
    """
    if has_float64(drafted.device):
        return torch.rand(drafted.shape, dtype=torch.float64, device=drafted.device)
    numbers = torch.rand(drafted.shape, dtype=torch.float64).float()
    return from_host(numbers.clamp_(max=1 - 2**-24), drafted.device)  # which rounding may have made 1


def verify_sampled(
    scores: torch.Tensor, q: torch.Tensor | None, drafted: torch.LongTensor, uniform: torch.Tensor
) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """
    Accepts or rejects by chance, so that every token is distributed as the target's own samples. Draws bonus tokens
    from torch's default generator.

    Args:
        scores (`torch.FloatTensor` of shape `(batch_size, lookahead + 1, vocab_size)`): The target's processed scores.
        q, drafted: As in [`acceptance_probabilities`].
        uniform (`torch.FloatTensor` of shape `(batch_size, lookahead)`): See [`uniform_numbers`].

    Returns:
        Three `torch.LongTensor` of shape `(batch_size,)`: the outcome of each row, accepted count and bonus token; and
        how many of the accepted tokens are `UNLIKELY`.
    """
    p = scores.softmax(dim=-1)
    if not drafted.shape[1]:
        none = drafted.new_zeros(len(drafted))
        return none, torch.multinomial(p[:, 0], num_samples=1).squeeze(1), none
    # `<`, not `<=`: the random number can be 0, and a token of probability 0 must never pass.
    ratios = acceptance_probabilities(p, q, drafted)
    accepted = accepted_counts(uniform < ratios)
    is_accepted = torch.arange(drafted.shape[1], device=drafted.device) < accepted[:, None]
    unlikely = (is_accepted & (ratios * UNLIKELY > 1)).sum(dim=1)
    residual = residual_distribution(p, q, drafted, accepted)
    # Where the scores are not numbers the row is verified again, and what is drawn here does not count.
    residual = torch.where(residual.isnan().any(dim=1, keepdim=True), 1.0, residual)
    return accepted, torch.multinomial(residual, num_samples=1).squeeze(1), unlikely
