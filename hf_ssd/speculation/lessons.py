"""What the rounds of a call teach the planner and the cache shape."""

from collections.abc import Callable
from dataclasses import dataclass, field

from .fallback import NGramBackup
from .forks import Forks
from .outcomes import CacheShape
from .planner import BACKUPS, Planner, Round
from .trunk import Trunk

ROUNDS_AT_ONCE = 4  # that are learned when there is time
ROUNDS_PER_LESSON_OF_SHAPES = 2  # where a lesson may be left out: it takes longer than the planner's, and tells less
ROUNDS_PER_LESSON_OF_MISSES = 4  # for one of which it is seen what n-grams would have given: that takes a while


@dataclass
class Lesson:
    """
    Args:
        round ([`~hf_ssd.speculation.planner.Round`]): What happened.
        bonus (`list[int]`): The bonus token of each row.
        lengths (`list[int]`): How many tokens of each row had been verified before.
        forks ([`~hf_ssd.speculation.forks.Forks`], *optional*): What it had been prepared for.
        durations (`list[tuple]`): What was measured meanwhile: methods of the planner's, and what to tell them.
    """

    round: Round
    bonus: list[int]
    lengths: list[int]
    forks: Forks | None
    durations: list[tuple] = field(default_factory=list)


class Lessons:
    """
    Keeps rounds until there is time to learn from them, which is when the branches have grown; for as many rounds as
    the planner has patience for. Several are learned all at once: a forward pass pushes everything else out of the
    processor's caches, so that a lesson after each takes several times as long, and an outcome that comes meanwhile has
    to wait.

    Args:
        planner ([`~hf_ssd.speculation.planner.Planner`]), shape ([`~hf_ssd.speculation.outcomes.CacheShape`]): Who is
            to learn.
        trunk ([`~hf_ssd.speculation.trunk.Trunk`]): The verified tokens.
        ngrams ([`~hf_ssd.speculation.fallback.NGramBackup`]): What might have been proposed after a miss.
    """

    def __init__(self, planner: Planner, shape: CacheShape, trunk: Trunk, ngrams: NGramBackup):
        self.planner, self.shape, self.trunk, self.ngrams = planner, shape, trunk, ngrams
        self.waiting: list[Lesson] = []
        self.durations: list[tuple] = []
        self.count, self.live = 0, len(trunk.lengths)

    def note(self, observe: Callable, *what: float) -> None:
        """Keeps what was measured: `observe` is the planner's method that is to be told."""
        self.durations.append((observe, *what))

    def add(self, lesson: Lesson) -> None:
        """Keeps a round, with what was measured until now."""
        lesson.durations, self.durations = self.durations, []
        self.waiting.append(lesson)

    def teach_what_is_due(self) -> None:
        """Lets both learn from rounds that can wait no longer: there was no time for as long as there was patience."""
        late = len(self.waiting) - self.planner.patience
        if self.planner.is_repeatable:
            self.teach(max(0, late))  # what outcomes are chosen by must not depend on whether there was time
        elif self.waiting and (late >= 0 or self._live(self.waiting[-1]) != self.live):
            self.teach()  # all at once; and plans are for as many rows as are not finished

    def teach_at_leisure(self, is_due: Callable[[], bool]) -> None:
        """Lets both learn until there is something else to do, if enough has come together, or must be known soon."""
        if self.planner.is_repeatable or len(self.waiting) >= min(ROUNDS_AT_ONCE, self.planner.patience):
            while self.waiting and not is_due():
                self.teach(1)

    def teach(self, rounds: int | None = None) -> None:
        """Lets planner and cache shape learn from the first of the rounds that wait, or from all of them."""
        rounds = len(self.waiting) if rounds is None else rounds
        lessons, self.waiting = self.waiting[:rounds], self.waiting[rounds:]
        for lesson in lessons:
            self._teach(lesson)

    @staticmethod
    def _live(lesson: Lesson) -> int:
        return sum(k >= 0 for k in lesson.round.accepted)

    def _teach(self, lesson: Lesson) -> None:
        round_ = lesson.round
        self.live = self._live(lesson)
        for observe, *what in lesson.durations:
            observe(*what)
        if lesson.forks is not None:
            ranked = lesson.forks.guesses.tolist()
            for row, (k, token) in enumerate(zip(round_.accepted, lesson.bonus)):
                guesses = ranked[row][k] if k >= 0 else []
                round_.ranks.append(guesses.index(token) if token in guesses else None)
            if self.planner.is_repeatable or self.count % ROUNDS_PER_LESSON_OF_SHAPES == 0:
                self.shape.learn(lesson.forks, round_.accepted, lesson.bonus)
        self.planner.observe(round_)
        self.count += 1
        if self.planner.compares_backups and self.count % ROUNDS_PER_LESSON_OF_MISSES == 0:
            self._learn_of_misses(lesson)

    def _learn_of_misses(self, lesson: Lesson) -> None:
        """What rows gained that had missed, and what the n-gram backup would have given them."""
        round_, before = lesson.round, lesson.lengths
        rows = [row for row, k in enumerate(round_.accepted) if k >= 0]
        for row in rows:
            if round_.sources[row] in BACKUPS:
                self.planner.observe_miss(round_.sources[row], round_.accepted[row] + 1)
        rows = [row for row in rows if round_.sources[row] == "primary"]
        if not rows:
            return
        ids = self.trunk.ids
        proposal = self.ngrams.propose(ids, before, rows, max(round_.accepted) + 1)
        for place, row in enumerate(rows):
            new = ids[row, before[row] : before[row] + round_.accepted[row] + 1].tolist()
            proposed = proposal.tokens[place, : proposal.counts[place]].tolist()
            matches = [a == b for a, b in zip(proposed, new)] + [False]
            self.planner.observe_miss("ngram", 1 + matches.index(False))
