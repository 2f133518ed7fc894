"""Candidate outcomes of a verification: the bonus tokens that the draft ranks after each accepted count."""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from .calibration import log_odds

UNUSED = -2  # an accepted count for unused places in the speculation cache, which no outcome matches


@dataclass(frozen=True)
class OutcomeCandidates:
    """
    The possible outcomes of a speculation, as the draft ranks them while the target verifies it.

    Args:
        guesses (`np.ndarray` of shape `(batch_size, lookahead + 1, guesses)`): The draft's most likely bonus tokens
            after each accepted count, the best guess first. The drafted token itself is no guess: the target would have
            accepted it.
        probabilities (`np.ndarray` of the same shape): The draft's probability of each guess.
        drafted_probabilities (`np.ndarray` of shape `(batch_size, lookahead)`): The draft's probability of each drafted
            token.
        from_fallback (`list[bool]`): Whether the speculation of each row came from a fallback, not the draft model.
        limits (`list[int]`): How many bonus tokens can be guessed after each accepted count.
    """

    guesses: np.ndarray
    probabilities: np.ndarray
    drafted_probabilities: np.ndarray
    from_fallback: list[bool]
    limits: list[int]

    @functools.cached_property
    def drafted_log_odds(self) -> np.ndarray:
        """The log of the odds that the draft gives each drafted token, of shape `(batch_size, lookahead)`."""
        return log_odds(self.drafted_probabilities)

    @functools.cached_property
    def log_chances(self) -> np.ndarray:
        """
        The log of the probability of each guess among the tokens that remain possible, of shape `(batch_size, lookahead
        + 1, guesses)`. After a rejection, the drafted token is no longer possible.
        """
        remaining = self.probabilities.copy()
        remaining[:, :-1] /= np.maximum(1 - self.drafted_probabilities, 1e-6)[:, :, None]
        return np.log(np.minimum(np.maximum(remaining, 1e-9), 1))

    @classmethod
    def of(
        cls, scores, logits, drafted, from_fallback: list[bool], guesses: int, possible: int | None = None
    ) -> "OutcomeCandidates":
        """
        Args:
            scores (`torch.FloatTensor` of shape `(batch_size, lookahead + 1, vocab_size)`): The draft's scores after 0
                to K accepted tokens, as its warpers left them.
            logits (`torch.FloatTensor` of the same shape): The draft's raw logits, which rank the tokens that its
                warpers ruled out: when a drafted token is rejected, the bonus token is often among these.
            drafted (`torch.LongTensor` of shape `(batch_size, lookahead)`): The speculation that is being verified.
            from_fallback (`list[bool]`): See above.
            guesses (`int`): How many bonus tokens to rank, at most.
            possible (`int`, *optional*): How many tokens the draft can propose, all by default. Logits of other tokens
                are -inf.
        """
        lookahead, possible = drafted.shape[1], possible or scores.shape[2]
        ranking = torch.where(scores.isneginf(), logits - 1e6, scores)
        if lookahead:
            ranking = ranking.clone()
            ranking[:, :lookahead].scatter_(2, drafted[:, :, None], -math.inf)
        tokens = ranking.topk(min(guesses, possible), dim=2).indices
        asked = torch.cat([tokens, torch.nn.functional.pad(drafted, (0, 1))[:, :, None]], dim=2)
        # A single transfer, because the host waits for the GPU in each. Tokens are below 2^24, so float32 holds them.
        found = torch.stack([asked.float(), scores.softmax(dim=-1).gather(2, asked)]).cpu().numpy()
        ranked, probabilities = found[0, :, :, :-1].astype(np.int64), found[1]
        return cls(
            ranked,
            probabilities[:, :, :-1],
            probabilities[:, :lookahead, -1],
            from_fallback,
            [min(guesses, possible - (k < lookahead)) for k in range(lookahead + 1)],
        )

    def ranks(self, accepted: list[int], bonus: list[int]) -> list[int]:
        """Returns the rank of each row's bonus token among the guesses, from 0; -1 for no rank or a finished row."""
        ranks = []
        for row, (k, token) in enumerate(zip(accepted, bonus)):
            places = np.flatnonzero(self.guesses[row, k] == token) if 0 <= k < len(self.limits) else ()
            ranks.append(int(places[0]) if len(places) else -1)
        return ranks

    def outcomes(
        self, fan_outs: list[list[int]], worker_index: int = 0, num_workers: int = 1, fewest: int = 1
    ) -> tuple[list[list[int]], list[list[int]]]:
        """
        Turns fan-outs into outcomes.

        Args:
            fan_outs (`list[list[int]]`): Guesses after each accepted count, for each row.
            worker_index, num_workers (`int`, *optional*): The outcomes are split into `num_workers` equal shares, and
                share `worker_index` is returned. Outcomes are dealt by the rank of their bonus token, so every share
                has some of the best guesses.
            fewest (`int`, *optional*): Lower bound of N.

        Returns:
            Accepted counts and bonus tokens of the outcomes, both of shape `(batch_size, N)`. A row with fewer than N
            outcomes is filled with `UNUSED` accepted counts.
        """
        rows = [
            [(k, rank) for k, count in enumerate(counts) for rank in range(min(count, self.limits[k]))]
            for counts in fan_outs
        ]
        if num_workers > 1:
            rows = [sorted(row, key=lambda place: place[1])[worker_index::num_workers] for row in rows]
        width = max(fewest, *map(len, rows))
        rows = [row + [(UNUSED, 0)] * (width - len(row)) for row in rows]
        bonus = [[guesses[max(0, k)][rank] for k, rank in row] for row, guesses in zip(rows, self.guesses.tolist())]
        return [[k for k, _ in row] for row in rows], bonus
