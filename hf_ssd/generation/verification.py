"""Accepts drafted tokens without changing the target's distribution. Pure tensor functions.

The rule is that of speculative sampling (Leviathan et al., 2023; Chen et al., 2023): accept a token x drawn from q with
probability min(1, p(x) / q(x)), otherwise draw from max(p - q, 0), normalized. Whatever q is, the result is distributed
as p, so it does not matter how a speculation came about.
"""

from typing import NamedTuple

import torch

from ..argmax import argmax
from ..noise import ACCEPTANCE, BONUS, Noise, places

# A draft draws a token with q(x) < p(x) / 10^6 with a chance below 10^-6, because the p(x) sum to 1.
UNLIKELY = 1e-6


def accepted_counts(accept: torch.BoolTensor) -> torch.LongTensor:
    """Counts the tokens before the first rejection in each row of `accept`, of shape `(batch_size, lookahead)`."""
    return accept.long().cumprod(dim=1).sum(dim=1)


def verify_greedy(scores: torch.Tensor, drafted: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Returns accepted counts and bonus tokens by processed scores `(batch_size, lookahead + 1, vocab_size)`."""
    choice = argmax(scores)
    accepted = accepted_counts(choice[:, :-1] == drafted)
    return accepted, choice.gather(1, accepted[:, None]).squeeze(1)


def acceptance_probabilities(p: torch.Tensor, q: torch.Tensor | None, drafted: torch.LongTensor) -> torch.Tensor:
    """
    Returns p(x) / q(x) of each drafted token `(batch_size, lookahead)`, 0 where q(x) is not positive and finite.
    `p` has one place more than `q`, which is `None` if each token was certain.
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
    Returns each bonus token's distribution `(batch_size, vocab_size)`, not normalized: max(p - q, 0) after a
    rejection, p if all tokens were accepted or q(x) is not a positive finite number.
    """
    rows = torch.arange(len(accepted), device=p.device)
    bonus, lookahead = p[rows, accepted], drafted.shape[1]
    if lookahead == 0:
        return bonus
    place = accepted.clamp(max=lookahead - 1)
    token = drafted[rows, place][:, None]
    if q is None:
        residual = bonus.scatter(1, token, 0.0)
    else:
        q = q[rows, place]
        residual = torch.where(is_possible(q.gather(1, token)), (bonus - q).clamp(min=0), bonus)
    # Where p equals q the residual is 0: the rejection was a rounding error, and p is the right distribution.
    is_rejected = (accepted < lookahead)[:, None] & (residual.sum(1, keepdim=True) > 0)
    return torch.where(is_rejected, residual, bonus)


class Chance(NamedTuple):
    """The random numbers of a verification: those of rows and of the starts of what is verified in them."""

    noise: Noise
    rows: torch.LongTensor  # (batch_size,)
    starts: torch.LongTensor  # (batch_size,)
    depth: int = 0  # of the first position that is verified here

    def of_acceptance(self, lookahead: int) -> torch.Tensor:
        """Returns numbers `(batch_size, lookahead)`. They are never 0, which would accept every possible token."""
        depths = self.depth + torch.arange(lookahead, device=self.rows.device)
        return self.noise.uniform(places(ACCEPTANCE, self.rows[:, None], self.starts[:, None], depths))

    def of_draws(self, depths: torch.LongTensor) -> torch.FloatTensor:
        """Returns the noise `(batch_size, N, vocab_size)` of the target's draws at depths `(batch_size or 1, N)`."""
        where = self.noise.drawn_at(BONUS, self.rows[:, None], self.starts[:, None], self.depth + depths)
        return self.noise.exponential(places(*where))


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Returns the target's probabilities by its processed scores."""
    p = scores.softmax(dim=-1)
    if torch.finfo(p.dtype).bits < 32:  # returned by a processor of the user; plain generation draws in proportion
        p = p.float() / p.float().sum(dim=-1, keepdim=True)
    return p


def verify_coupled(
    scores: torch.Tensor, drafted: torch.LongTensor, chance: Chance
) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """
    Accepts the drafted tokens that the target draws itself (Daliri et al., 2024: Gumbel coupling). The noise of a
    position is independent of the tokens before it, and so is the target's own draw of what was drafted.
    """
    noise = chance.of_draws(torch.arange(scores.shape[1], device=drafted.device)[None])
    choice = coupled_choices(scores, noise)
    # No drafted token is -1, and no such draw is accepted.
    accepted = accepted_counts((choice[:, :-1] == drafted) & (drafted >= 0))
    return accepted, choice.gather(1, accepted[:, None]).squeeze(1), torch.zeros_like(accepted)


def coupled_choices(scores: torch.Tensor, noise: torch.FloatTensor) -> torch.LongTensor:
    """Returns the target's own draws `(batch_size, N)` by scores of N positions with noise of the same shape."""
    p = probabilities(scores)
    return drawn(p.flatten(0, 1), noise.flatten(0, 1)).view(p.shape[:2])


def verify_sampled(
    scores: torch.Tensor, q: torch.Tensor | None, drafted: torch.LongTensor, chance: Chance
) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """
    Accepts or rejects by chance, so that every token is distributed as the target's own samples by processed scores
    `(batch_size, lookahead + 1, vocab_size)`. Returns accepted counts, bonus tokens, -1 where there is no distribution
    to draw from, and how many accepted tokens are `UNLIKELY`.
    """
    p = probabilities(scores)
    ratios = acceptance_probabilities(p, q, drafted)
    accepted = accepted_counts(chance.of_acceptance(drafted.shape[1]) < ratios)
    is_accepted = torch.arange(drafted.shape[1], device=drafted.device) < accepted[:, None]
    unlikely = (is_accepted & (ratios * UNLIKELY > 1)).sum(dim=1)
    return (
        accepted,
        drawn(residual_distribution(p, q, drafted, accepted), chance.of_draws(accepted[:, None])[:, 0]),
        unlikely,
    )


def drawn(weights: torch.Tensor, noise: torch.FloatTensor) -> torch.LongTensor:
    """
    Draws an index from each row of `weights` `(batch_size, vocab_size)` with exponential noise of the same shape, as
    `torch.multinomial` does, which would let the host wait for the device. Where that would raise, the index is -1.
    """
    is_possible = (weights.amax(dim=1) < torch.inf) & (weights.amin(dim=1) >= 0) & (weights.sum(dim=1) > 0)
    return torch.where(is_possible, argmax(weights / noise), -1)
