"""Accepting drafted tokens without changing the target's distribution. Pure tensor functions.

The rule is that of speculative sampling (Leviathan et al., 2023; Chen et al., 2023): accept a token x drawn from q with
probability min(1, p(x) / q(x)), otherwise draw from max(p - q, 0), normalized. Whatever q is, the result is distributed
as p, so it does not matter how a speculation came about.
"""

import torch

from ..argmax import argmax


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
        `torch.FloatTensor` of shape `(batch_size, lookahead)`: p(x) / q(x), which may exceed 1.
    """
    ratio = p[:, :-1].gather(2, drafted[:, :, None]).squeeze(2)
    if q is None:
        return ratio
    of_token = q.gather(2, drafted[:, :, None]).squeeze(2)
    # A token cannot have been drawn with a probability of 0, or with none: nothing is known of it, and it never passes.
    return torch.where((of_token > 0) & of_token.isfinite(), ratio / of_token, 0)


def residual_distribution(
    p: torch.Tensor, q: torch.Tensor | None, drafted: torch.LongTensor, accepted: torch.LongTensor
) -> torch.Tensor:
    """
    The distribution of the bonus token: max(p - q, 0) where the first token was rejected, p where all were accepted.

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
        residual = (bonus - q[rows, place]).clamp(min=0)
    # Where p equals q nothing is left of it; a rejection is then a matter of rounding, and p is the right answer.
    residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, bonus)
    return torch.where(rejected[:, None], residual, bonus)


def uniform_numbers(drafted: torch.LongTensor) -> torch.DoubleTensor:
    """
    Returns random numbers from 0 to below 1 of the shape of `drafted`, from torch's default generator. They are float64
    because of float32 numbers one in 2^24 is 0, with which any token passes that is possible at all.
    """
    return torch.rand(drafted.shape, dtype=torch.float64, device=drafted.device)


def verify_sampled(
    scores: torch.Tensor, q: torch.Tensor | None, drafted: torch.LongTensor, uniform: torch.DoubleTensor
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """
    Accepts or rejects by chance, so that every token is distributed as the target's own samples. Draws bonus tokens
    from torch's default generator.

    Args:
        scores (`torch.FloatTensor` of shape `(batch_size, lookahead + 1, vocab_size)`): The target's processed scores.
        q, drafted: As in [`acceptance_probabilities`].
        uniform (`torch.DoubleTensor` of shape `(batch_size, lookahead)`): See [`uniform_numbers`].

    Returns:
        The outcome of each row, two `torch.LongTensor` of shape `(batch_size,)`: accepted count and bonus token.
    """
    p = scores.softmax(dim=-1)
    if not drafted.shape[1]:
        return drafted.new_zeros(len(drafted)), torch.multinomial(p[:, 0], num_samples=1).squeeze(1)
    # `<`, not `<=`: the random number can be 0, and a token of probability 0 must never pass.
    accepted = accepted_counts(uniform < acceptance_probabilities(p, q, drafted))
    residual = residual_distribution(p, q, drafted, accepted)
    # Where the scores are not numbers the row is verified again, and what is drawn here does not count.
    residual = torch.where(residual.isnan().any(dim=1, keepdim=True), 1.0, residual)
    return accepted, torch.multinomial(residual, num_samples=1).squeeze(1)
