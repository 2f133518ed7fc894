"""Expected tokens and seconds of a round of n-grams, which need no draft model."""

from ..rounds import IN_TURN, NGRAM, PLAIN, RoundRecord
from .cost_model import CostModel

RAREST = 0.05  # smallest share of rows with a match to expect


class NgramCosts(CostModel):
    """
    Estimates the speed of n-grams alone. A round in which no row has a match is a plain step, so the share of rows with
    a match is counted as well as the acceptance of their tokens. No draft is at work beside the target, so all rounds
    tell how long a verification takes.
    """

    seen_anyway = (PLAIN,)

    def knows(self, mode: str) -> bool:
        return self.durations.verification[IN_TURN].count > 0

    def observe(self, before: RoundRecord, now: RoundRecord) -> None:
        costs, seen = self.durations, self.experience
        costs.rounds, seen.rounds = costs.rounds + 1, seen.rounds + 1
        self.live = len(now.live) or self.live
        costs.verification[IN_TURN].observe(self.live * (now.lookahead + 1), now.verify_seconds)
        if now.mode == PLAIN:
            return
        costs.step[IN_TURN].observe(self.live, now.answer_seconds)
        for row in now.live:
            has_match = now.sources[row] == NGRAM
            seen.rates.alone.matches.observe(has_match)
            for rates in (self.rates, seen.rates) if has_match else ():
                rates.drafted.observe(now.accepted[row], now.proposed(row))

    def seconds_to_draft(self, mode: str, lookahead: int) -> float:
        """Returns the seconds to search the texts of all rows."""
        return max(0.0, self.durations.step[IN_TURN](self.live))

    def in_turn(self, lookahead: int, ngrams: int = 0) -> float:
        """Returns tokens per second of proposing up to `lookahead` tokens for each row that has a match."""
        share = max(RAREST, self.experience.rates.alone.matches.value)
        verify = self._seconds_to_verify_some(IN_TURN, 0, lookahead, share)
        tokens = 1 + share * (self.tokens(lookahead)[-1] - 1)
        return self._speed(tokens, verify, self.seconds_to_draft(IN_TURN, lookahead))

    def may_reach(self, speed: float) -> bool:
        return False  # nothing but rounds would measure n-grams again
