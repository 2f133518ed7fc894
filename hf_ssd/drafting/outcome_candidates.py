"""Candidate outcomes of a verification: the bonus tokens that the draft ranks after each accepted count."""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

AFTER_REJECTION = 0.83  # weight of the noise there, because max(p - q, 0) is sharper than q (docs/ablations.md)
UNUSED = -2  # an accepted count for unused places in the speculation cache, which no outcome matches


def log_odds(probability: np.ndarray | float) -> np.ndarray:
    """Returns log(p / (1 - p)), finite at 0 and 1."""
    probability = np.minimum(np.maximum(probability, 1e-6), 1 - 1e-6)
    return np.log(probability / (1 - probability))


@dataclass(frozen=True)
class OutcomeCandidates:
    """The possible outcomes of a speculation, as the draft ranks them while the target verifies it."""

    # The draft's most likely bonus tokens (batch_size, lookahead + 1, guesses) after each accepted count, the best
    # first. The drafted token itself is no guess: the target would have accepted it.
    guesses: np.ndarray
    chances: np.ndarray  # the draft's, that each guess is the bonus token where this is no drafted token
    drafted_probabilities: np.ndarray  # the draft's, of each drafted token: (batch_size, lookahead)
    luck: np.ndarray  # -log u - 1 of the u that each drafted token is accepted with; 0 where none is known
    from_fallback: list[bool]  # whether each row's speculation came from a fallback, not the draft model
    limits: list[int]  # how many bonus tokens can be guessed after each accepted count

    @functools.cached_property
    def drafted_log_odds(self) -> np.ndarray:
        """The log of the odds that the draft gives each drafted token, of shape `(batch_size, lookahead)`."""
        return log_odds(self.drafted_probabilities)

    @functools.cached_property
    def log_odds(self) -> np.ndarray:
        """The log of the odds of `chances`, of shape `(batch_size, lookahead + 1, guesses)`."""
        return log_odds(self.chances)

    @classmethod
    def of(cls, scores, logits, drafted, from_fallback: list[bool], guesses: int, possible=None, noise=None, luck=None):
        """
        Ranks bonus tokens by processed scores `(batch_size, lookahead + 1, vocab_size)`, and what warpers ruled out by
        raw logits: the bonus token is often among these. Both sides draw with the `noise`, which has the shape of the
        scores, but drafted tokens with another score if their `luck` is given.
        """
        lookahead, possible = drafted.shape[1], possible or scores.shape[2]
        noisy = scores
        if noise is not None:
            log_noise = noise.log()
            if luck is not None:
                log_noise[:, :lookahead] *= AFTER_REJECTION
            noisy = scores - log_noise
        ranking = torch.where(scores.isneginf(), logits - 1e6, noisy)
        ranking[:, :lookahead].scatter_(2, drafted[:, :, None], -math.inf)
        tokens = ranking.topk(min(guesses, possible), dim=2).indices
        chances = ranking.softmax(dim=-1).gather(2, tokens)
        drawn_by = noisy if luck is None else scores
        of_drafted = drawn_by[:, :lookahead].softmax(dim=-1).gather(2, drafted[:, :, None])
        of_drafted = pad(of_drafted, (0, 0, 0, 1))
        # A single transfer, because the host waits for the GPU in each. Tokens are below 2^24, so float32 holds them.
        found = torch.cat([tokens.float(), chances, of_drafted], dim=2).cpu().numpy()
        ranked, chances, of_drafted = np.split(found, [tokens.shape[2], 2 * tokens.shape[2]], axis=2)
        limits = [min(guesses, possible - (k < lookahead)) for k in range(lookahead + 1)]
        luck = np.zeros(drafted.shape) if luck is None else luck
        return cls(ranked.astype(np.int64), chances, of_drafted[:, :lookahead, 0], luck, from_fallback, limits)

    def ranks(self, accepted: list[int], bonus: list[int]) -> list[int]:
        """Returns the rank of each row's bonus token among the guesses, from 0; -1 for no rank or a finished row."""
        ranks = []
        for row, (k, token) in enumerate(zip(accepted, bonus)):
            places = np.flatnonzero(self.guesses[row, k] == token) if 0 <= k < len(self.limits) else ()
            ranks.append(int(places[0]) if len(places) else -1)
        return ranks

    def outcomes(self, fan_outs: list[list[int]], worker_index: int = 0, num_workers: int = 1, fewest: int = 1):
        """Returns accepted counts, `UNUSED` for none, and bonus tokens of N outcomes of each row, at least `fewest`."""
        rows = []
        for counts in fan_outs:
            row = [(k, rank) for k, count in enumerate(counts) for rank in range(min(count, self.limits[k]))]
            if num_workers > 1:  # dealt by rank, so that every share has some of the best guesses
                row = sorted(row, key=lambda place: place[1])[worker_index::num_workers]
            rows.append(row)
        width = max(fewest, *map(len, rows))
        rows = [row + [(UNUSED, 0)] * (width - len(row)) for row in rows]
        bonus = [[guesses[max(0, k)][rank] for k, rank in row] for row, guesses in zip(rows, self.guesses.tolist())]
        return [[k for k, _ in row] for row in rows], bonus
