"""What the rounds of a call teach the planner and the cache shape."""

from dataclasses import dataclass

from .fallback import NGramBackup
from .forks import Forks
from .outcomes import CacheShape
from .planner import BACKUPS, Planner, Round
from .trunk import Trunk

ROUNDS_PER_LESSON_OF_MISSES = 4  # for one of which it is seen what n-grams would have given: that takes a while


@dataclass
class Lesson:
    """
    Args:
        round ([`~hf_ssd.speculation.planner.Round`]): What happened.
        bonus (`list[int]`): The bonus token of each row.
        forks ([`~hf_ssd.speculation.forks.Forks`], *optional*): What it had been prepared for.
    """

    round: Round
    bonus: list[int]
    forks: Forks | None


class Lessons:
    """
    Keeps the last round until there is time to learn from it: the planner when the answer is on its way, because it
    plans next, and the cache shape when the branches have grown.

    Args:
        planner ([`~hf_ssd.speculation.planner.Planner`]), shape ([`~hf_ssd.speculation.outcomes.CacheShape`]): Who is
            to learn.
        trunk ([`~hf_ssd.speculation.trunk.Trunk`]): The verified tokens.
        ngrams ([`~hf_ssd.speculation.fallback.NGramBackup`]): What might have been proposed after a miss.
    """

    def __init__(self, planner: Planner, shape: CacheShape, trunk: Trunk, ngrams: NGramBackup):
        self.planner, self.shape, self.trunk, self.ngrams = planner, shape, trunk, ngrams
        self.last: Lesson | None = None
        self.for_shape: Lesson | None = None
        self.count = 0

    def teach_shape(self) -> None:
        """Lets the cache shape learn from the last round that the planner has seen, if that was not done yet."""
        if self.for_shape is not None:
            lesson, self.for_shape = self.for_shape, None
            self.shape.learn(lesson.forks, lesson.round.accepted, lesson.bonus)

    def teach_planner(self) -> None:
        """Lets the planner learn from the last round, if that was not done yet."""
        if self.last is None:
            return
        self.teach_shape()  # there was no time
        lesson, self.last = self.last, None
        round_ = lesson.round
        if lesson.forks is not None:
            ranked = lesson.forks.tokens.tolist()
            for row, (k, token) in enumerate(zip(round_.accepted, lesson.bonus)):
                guesses = ranked[row][k] if k >= 0 else []
                round_.ranks.append(guesses.index(token) if token in guesses else None)
            self.for_shape = lesson
        self.planner.observe(round_)
        self.count += 1
        if self.planner.compares_backups and self.count % ROUNDS_PER_LESSON_OF_MISSES == 0:
            self._learn_of_misses(round_)

    def _learn_of_misses(self, round_: Round) -> None:
        """What rows gained that had missed, and what the n-gram backup would have given them."""
        rows = [row for row, k in enumerate(round_.accepted) if k >= 0]
        for row in rows:
            if round_.sources[row] in BACKUPS:
                self.planner.observe_miss(round_.sources[row], round_.accepted[row] + 1)
        rows = [row for row in rows if round_.sources[row] == "primary"]
        if not rows:
            return
        ids, lengths = self.trunk.ids, self.trunk.lengths
        before = [n - k - 1 for n, k in zip(lengths, round_.accepted)]
        proposal = self.ngrams.propose(ids, before, rows, max(round_.accepted) + 1)
        for place, row in enumerate(rows):
            new = ids[row, before[row] : lengths[row]].tolist()
            proposed = proposal.tokens[place, : proposal.counts[place]].tolist()
            matches = [a == b for a, b in zip(proposed, new)] + [False]
            self.planner.observe_miss("ngram", 1 + matches.index(False))
