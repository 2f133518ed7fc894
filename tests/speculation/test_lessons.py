import dataclasses

import numpy as np
import pytest
import torch

from hf_ssd import SSDConfig
from hf_ssd.speculation.fallback import NGramBackup
from hf_ssd.speculation.forks import Forks
from hf_ssd.speculation.lessons import (
    ROUNDS_AT_ONCE,
    ROUNDS_PER_LESSON_OF_MISSES,
    ROUNDS_PER_LESSON_OF_SHAPES,
    Lesson,
    Lessons,
)
from hf_ssd.speculation.planner import FixedPlanner, Round
from hf_ssd.speculation.trunk import SKIPPED


class Pupil(FixedPlanner):
    """Writes down what it is told."""

    compares_backups = True

    def __init__(self, patience, is_repeatable=False):
        super().__init__(SSDConfig(lookahead=2, budget=4))
        self.patience, self.is_repeatable, self.told = patience, is_repeatable, []

    def observe(self, round_):
        self.told.append(round_)

    def observe_choice(self, seconds):
        self.told.append(seconds)

    def observe_miss(self, kind, tokens):
        self.told.append((kind, tokens))

    @property
    def rounds(self):
        return [told.seconds for told in self.told if isinstance(told, Round)]


@dataclasses.dataclass
class Text:
    """As much of a trunk as lessons need."""

    ids: torch.Tensor
    lengths: list[int]


def lessons_of(planner, rows=1):
    ids = torch.tensor([[5, 6, 7, 8] * 20] * rows)
    return Lessons(planner, None, Text(ids, [10] * rows), NGramBackup())


def rounds(lessons, count, first=0, accepted=(1,)):
    """Rounds whose verification took 0, 1, 2, ... seconds, so that they can be told apart."""
    for number in range(first, first + count):
        lessons.note(lessons.planner.observe_choice, 100.0 + number)
        round_ = Round(2, list(accepted), [False] * len(accepted), ["primary"] * len(accepted), seconds=float(number))
        lessons.add(Lesson(round_, [0] * len(accepted), list(lessons.trunk.lengths), None))
        lessons.trunk.lengths = [n + k + 1 for n, k in zip(lessons.trunk.lengths, accepted)]
        lessons.teach_what_is_due()


def test_rounds_wait_as_long_as_there_is_patience_and_are_then_learned_in_their_order():
    lessons = lessons_of(Pupil(patience=4))
    lessons.planner.compares_backups = False
    rounds(lessons, 3)
    assert lessons.planner.told == []
    rounds(lessons, 1, first=3)
    told = [told.seconds if isinstance(told, Round) else told for told in lessons.planner.told]
    assert told == [100, 0, 101, 1, 102, 2, 103, 3]  # each with what was measured meanwhile
    rounds(lessons, 3, first=4)
    lessons.teach()  # there was time
    assert lessons.planner.rounds == [*range(7)]


@pytest.mark.parametrize(
    "patience, is_repeatable, at_once", [(50, False, ROUNDS_AT_ONCE), (3, False, 3), (0, False, 1), (50, True, 1)]
)
def test_at_leisure_several_rounds_are_learned_at_once(patience, is_repeatable, at_once):
    """But each by itself where it must be known soon, or where what is known must not depend on time."""
    lessons, known = lessons_of(Pupil(patience, is_repeatable)), []
    for number in range(2 * at_once):
        rounds(lessons, 1, first=number)
        lessons.teach_at_leisure(lambda: False)
        known.append(len(lessons.planner.rounds))
    assert known == [n // at_once * at_once for n in range(1, 2 * at_once + 1)]


def test_who_learns_at_leisure_stops_when_the_outcome_comes():
    lessons = lessons_of(Pupil(patience=50))
    rounds(lessons, ROUNDS_AT_ONCE)
    lessons.teach_at_leisure(lambda: len(lessons.planner.rounds) == 2)
    assert lessons.planner.rounds == [0, 1]
    assert [lesson.round.seconds for lesson in lessons.waiting] == [*range(2, ROUNDS_AT_ONCE)]  # nothing is lost


@pytest.mark.parametrize("is_repeatable, learned", [(True, 8), (False, 8 // ROUNDS_PER_LESSON_OF_SHAPES)])
def test_a_cache_shape_learns_every_round_only_where_that_is_promised(is_repeatable, learned):
    class Shape:
        rounds = 0

        def learn(self, forks, accepted, bonus):
            self.rounds += 1

    lessons = lessons_of(Pupil(0, is_repeatable))
    lessons.shape = Shape()
    forks = Forks(torch.zeros(1, 3, 4, dtype=torch.long), np.ones((1, 3, 4)), np.ones((1, 2)), [False], [4, 4, 4])
    for _ in range(8):
        lessons.add(Lesson(Round(2, [1], [False], ["primary"]), [0], [10], forks))
        lessons.teach()
    assert (lessons.shape.rounds, len(lessons.planner.rounds)) == (learned, 8)


def test_a_planner_without_patience_learns_each_round_before_the_next_one():
    lessons = lessons_of(Pupil(patience=0))
    for number in range(3):
        rounds(lessons, 1, first=number)
        assert lessons.planner.rounds == [*range(number + 1)]


def test_a_row_that_is_finished_is_known_at_once():
    lessons = lessons_of(Pupil(patience=50), rows=2)
    rounds(lessons, 3, accepted=(1, 1))
    assert lessons.planner.rounds == []
    rounds(lessons, 1, first=3, accepted=(1, SKIPPED))
    assert lessons.planner.rounds == [0, 1, 2, 3]
    rounds(lessons, 1, first=4, accepted=(1, SKIPPED))
    assert lessons.planner.rounds == [0, 1, 2, 3]


@pytest.mark.parametrize("is_repeatable", [True, False])  # the second is the mutant
def test_what_is_known_by_a_repeatable_planner_does_not_depend_on_whether_there_was_time(is_repeatable):
    known = []
    for has_time in (True, False):
        lessons = lessons_of(Pupil(1 if is_repeatable else 2, is_repeatable))
        known.append([])
        for number in range(6):
            rounds(lessons, 1, first=number)
            known[-1].append(len(lessons.planner.rounds))  # now outcomes are chosen
            if has_time:
                lessons.teach()
    assert known[0] == [0, 1, 2, 3, 4, 5] if is_repeatable else known[0] != known[1]
    assert (known[0] == known[1]) == is_repeatable


@pytest.mark.parametrize("as_it_was", [True, False])  # the second is the mutant: the text that there is by now
def test_what_ngrams_would_have_given_is_seen_as_it_was_then(as_it_was):
    """However late it is learned, of the text that there was when the row missed: it repeats itself at first only."""
    told = []
    for patience in (0, 2 * ROUNDS_PER_LESSON_OF_MISSES + 1):
        lessons = lessons_of(Pupil(patience))
        lessons.trunk.ids[:, 20:] = torch.arange(100, 160)
        rounds(lessons, 2 * ROUNDS_PER_LESSON_OF_MISSES)
        for lesson in lessons.waiting if not as_it_was else []:
            lesson.lengths = [n - 2 for n in lessons.trunk.lengths]
        lessons.teach()
        told.append([what for what in lessons.planner.told if isinstance(what, tuple)])
    assert told[0] == [("ngram", 3), ("ngram", 1)]  # both tokens and one more; only one
    assert (told[0] == told[1]) == as_it_was
