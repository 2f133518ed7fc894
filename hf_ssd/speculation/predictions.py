"""What a round of each plan is predicted to give and to take: the cost model of Theorem 7, with measured parts."""

import functools
import math

from .. import theory
from ..config import SSDConfig
from .hit_rates import LARGEST_BUDGET
from .measurements import LONGEST_LOOKAHEAD, Measurements, busy_share

LOOKAHEADS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, LONGEST_LOOKAHEAD)
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, LARGEST_BUDGET)
TOO_LONG = 2  # lookaheads that look too long, before longer ones are left out: a round takes more than is predicted
MOST_MEMORY = 2**29  # bytes for the distributions of prepared tokens


class Moment:
    """What is known just now, looked up once for all the plans that are compared."""

    def __init__(self, measured: Measurements):
        self.measured = measured
        self.verification, self.drafting = functools.cache(measured.verification), functools.cache(measured.drafting)
        self.choice = functools.cache(measured.choice)
        self.hit_rates: dict[int, list[float]] = {}  # by lookahead, as far as they were asked for

    def hit_rate(self, lookahead: int, budget: int) -> float:
        """Returns the hit rate of one row if so many outcomes of a speculation of that length are prepared."""
        rates = self.measured.hit_rates
        if lookahead not in self.hit_rates:
            self.hit_rates[lookahead] = rates.predicted(self.measured.acceptance(lookahead))
        return rates.corrected(budget, self.hit_rates[lookahead])


class Predictions:
    """
    Args:
        config (`SSDConfig`): Numbers in it stay as they are.
        measured ([`Measurements`]): What predictions are made of.
        vocab_size (`int`): Of both models.
        sampled (`bool`): Whether tokens are sampled, so that what they are drawn from is kept.
        drafts (`int`): How many share the work; each prepares a budget of its own.
    """

    def __init__(self, config: SSDConfig, measured: Measurements, vocab_size: int, sampled: bool, drafts: int):
        self.config, self.measured, self.vocab_size, self.drafts = config, measured, vocab_size, drafts
        self.adapts_tokens = config.lookahead == "auto"
        # What prepared tokens are drawn from takes 4 bytes a token of the vocabulary.
        self.largest_product = MOST_MEMORY // (4 * measured.rows * vocab_size) if sampled else 10**9

    def of_all_plans(self) -> dict[tuple[int, int], tuple[float, float]]:
        """
        Returns the predicted tokens and seconds of a round of the batch, by lookahead and budget, of all plans that may
        be the fastest.
        """
        measured, moment, in_turn_before, too_long = self.measured, Moment(self.measured), 0.0, 0
        rounds = {(0, 0): (measured.live, measured.plain_decoding())} if self.adapts_tokens else {}
        for lookahead in LOOKAHEADS if self.adapts_tokens else [self.config.lookahead]:
            of_these = self.of_lookahead(lookahead, moment)
            rounds |= {(lookahead, budget): round_ for budget, round_ in of_these.items()}
            # So many tokens are not worth verifying even where they are ready, nor drafting in turn: nor are more.
            tokens, seconds = of_these.get(0, (0.0, 1.0))
            too_long += lookahead not in moment.hit_rates and tokens / seconds <= in_turn_before
            if too_long == TOO_LONG:
                break
            in_turn_before = tokens / seconds
        return rounds

    def largest_budget(self, lookahead: int) -> int:
        """How many outcomes of each row fit the memory, at least one."""
        return max(1, self.largest_product // max(1, lookahead))

    def of_lookahead(
        self, lookahead: int, moment: Moment, hit_rate: float | None = None
    ) -> dict[int, tuple[float, float]]:
        """
        Predicted tokens and seconds of a round of the batch for each budget, misses being drafted just in time; with
        the hit rate to be expected, or where it is known how often all rows hit.
        """
        measured, rows = self.measured, self.measured.live
        tokens = measured.expected_tokens(lookahead)
        rounds = {}
        if (self.adapts_tokens and self.config.budget == "auto") or not self.config.asynchronous:
            drafting = lookahead * moment.drafting(rows, "in turn")
            rounds[0] = rows * tokens[lookahead], moment.verification(lookahead, True) + drafting
        if not self.config.asynchronous:
            return rounds
        verification = [moment.verification(k, False) for k in range(lookahead + 1)]
        step, fixed = moment.drafting(rows, "step"), self.config.budget
        for budget in [fixed] if isinstance(fixed, int) else BUDGETS:
            if budget > self.largest_budget(lookahead) and budget != fixed:
                break
            growth, choice = moment.drafting(rows * budget, "branches"), moment.choice(rows * budget)
            lateness = measured.lateness(busy_share(lookahead, choice, growth, verification[lookahead]))
            width, seen = lookahead, set()
            while width not in seen:  # what can grow depends on how long verification takes, and that on what had grown
                seen.add(width)
                # A step that is under way when the outcome comes is finished first. Then the branch that was hit is
                # finished alone, as far as that is worth it.
                window = verification[width] - choice
                grown = min(lookahead, max(0, math.ceil(window / growth)))
                # How far a step is by then is chance after some of them: half of it, less where all are nearly grown.
                late = max(0.0, grown * growth - window)
                if grown > 1:
                    late = min(growth / 2, max(0.0, lookahead * growth - window))
                late += lateness
                width, tokens_on_hit, after_hit = self.best_answer(verification, tokens, late, grown, step)
            _, tokens_on_miss, after_miss = self.best_answer(verification, tokens, late, 0, step)
            all_hit = hit_rate
            if all_hit is None:
                of_one = moment.hit_rate(width, budget * self.drafts)
                all_hit = of_one**rows if grown else 0.0
            gain = all_hit * tokens_on_hit + (1 - all_hit) * tokens_on_miss
            rounds[budget] = rows * gain, all_hit * after_hit + (1 - all_hit) * after_miss
        return rounds

    def best_answer(
        self, verification: list[float], tokens: list[float], late: float, ready: int, step: float
    ) -> tuple[int, float, float]:
        """
        Args:
            verification (`list[float]`): Seconds, by lookahead.
            tokens (`list[float]`): Expected tokens, by lookahead.
            late (`float`): Seconds from the outcome until the draft looks.
            ready (`int`): How many tokens are drafted by then.
            step (`float`): Seconds that each further token takes.

        Returns:
            Lookahead, expected tokens and seconds of the round that is worth most.
        """
        seconds = [v + late + (k - ready) * step if k > ready else v + late for k, v in enumerate(verification)]
        best = len(tokens) - 1
        if self.adapts_tokens:
            speeds = [gained / taken for gained, taken in zip(tokens, seconds)]
            best = speeds.index(max(speeds))
        return best, tokens[best], seconds[best]

    def of_fallbacks(self, lookahead: int) -> dict[str, float]:
        """Predicted speedup with each kind of fallback: Corollary 16, with what each gains in rounds after a miss."""
        measured = self.measured
        verification = [measured.verification(k, alone=False) for k in range(lookahead + 1)]
        tokens, step = measured.expected_tokens(lookahead), measured.drafting(measured.live, "step")
        # What the primary gained after misses so far says little: it was asked for as many tokens as other plans took.
        _, gained, in_time = self.best_answer(verification, tokens, 0.0, 0, step)
        after_miss = {
            "primary": (gained, max(0.0, in_time / verification[lookahead] - 1)),
            "ngram": (measured.tokens_after_miss["ngram"].value, 0.0),
            "random": (1 + 1 / self.vocab_size, 0.0),
        }
        after_backup = min(0.999, measured.hit_rates.after_backup.value)
        speeds = {}
        for kind, (expected, backup_time) in after_miss.items():
            hit_rate = min(0.999, measured.hit_rates.overall.value)
            if kind != "primary":
                hit_rate = theory.overall_hit_rate(hit_rate, after_backup)
            speeds[kind] = theory.ssd_speedup(hit_rate, tokens[lookahead], expected, 0.0, backup_time, measured.live)
        return speeds
