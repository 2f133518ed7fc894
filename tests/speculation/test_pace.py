"""The machine's pace, and what is particular to kinds of rounds, are told apart."""

import math
import random

import pytest

from hf_ssd.speculation.pace import LASTING, MOST_KINDS, Pace

SECONDS = LASTING / 64  # of a round


def slow_at_times(number):
    return 1.5 if number // 40 % 2 else 1.0


def test_a_kind_that_was_seen_in_a_slow_moment_is_not_slow():
    chance, pace, even, naive = random.Random(0), Pace(), {"usual": [], "rare": []}, {"usual": [], "rare": []}
    for number in range(400):
        kind = "rare" if number % 80 in (70, 71, 72, 73) else "usual"  # always while the machine is slow
        seconds = (0.02 if kind == "rare" else 0.01) * slow_at_times(number) * math.exp(chance.gauss(0, 0.1))
        pace.advance(SECONDS)
        pace.observe(kind, seconds)
        if number > 100:
            even[kind].append(seconds / pace.factor)
            naive[kind].append(seconds)

    def ratio(durations):
        return sum(durations["rare"]) / len(durations["rare"]) / (sum(durations["usual"]) / len(durations["usual"]))

    assert ratio(even) == pytest.approx(2.0, rel=0.1)
    assert ratio(naive) > 2.3  # the mutant: durations as they are


def test_the_pace_follows_the_machine():
    pace = Pace()
    factors = []
    for number in range(240):
        pace.advance(SECONDS)
        pace.observe("usual", 0.01 * slow_at_times(number))
        factors.append(pace.factor)
    slow, quick = factors[50:60] + factors[130:140] + factors[210:220], factors[90:100] + factors[170:180]
    assert min(slow) / max(quick) > 1.3


def settled():
    """Returns a pace that has been usual for long, in the round after, and what it was."""
    pace = Pace()
    for _ in range(50):
        pace.advance(SECONDS)
        pace.observe("usual", 0.01)
    before = pace.factor
    pace.advance(SECONDS)
    return pace, before


def test_a_hiccup_counts_for_little():
    pace, before = settled()
    pace.observe("usual", 10.0)
    assert pace.factor < 1.4 * before


def test_a_kind_never_seen_tells_nothing_of_the_pace():
    pace, before = settled()
    pace.observe("new", 10.0)
    assert pace.factor == pytest.approx(before, rel=0.02)
    pace.advance(SECONDS)
    pace.observe("usual", 10.0)  # the mutant: the same of a kind that is known
    assert pace.factor > 1.1 * before


def test_what_is_not_seen_goes_back_to_usual(monkeypatch):
    """A draft that was slow when a rest began need not be slow when it ends."""

    def after_a_rest():
        pace = Pace()
        for number in range(210):
            pace.advance(SECONDS)
            pace.observe("step", 0.01 * (1.5 if number >= 200 else 1.0))
        slow = pace.factor
        for _ in range(300):
            pace.advance(SECONDS)
        return slow, pace.factor

    slow, later = after_a_rest()
    assert slow > 1.25 and later < 1.1
    monkeypatch.setattr("hf_ssd.speculation.pace.LASTING", 1e9)  # the mutant
    slow, later = after_a_rest()
    assert later > 0.9 * slow


def test_rounds_may_go_by_unseen():
    """Then they are taken in at once, to the same effect as one by one."""
    at_once, one_by_one = Pace(), Pace()
    for pace in (at_once, one_by_one):
        for number in range(60):
            pace.advance(SECONDS)
            pace.observe("abc"[number % 3], 0.01 * (1.5 if number > 30 else 1.0))
    for _ in range(20):
        at_once.advance(SECONDS)
        one_by_one.advance(SECONDS)
        one_by_one._catch_up()
        assert at_once.factor == pytest.approx(one_by_one.factor)
    for pace in (at_once, one_by_one):
        pace.observe("b", 0.02)
    assert at_once.mean.tolist() == pytest.approx(one_by_one.mean.tolist())
    assert at_once.covariance.tolist() == [pytest.approx(row) for row in one_by_one.covariance.tolist()]


def test_only_so_many_kinds_are_known_and_the_last_seen_stay():
    pace, without = Pace(), Pace()
    for number in range(4 * MOST_KINDS):
        for one in (pace, without):
            one.advance(SECONDS)
            one.observe("usual", 0.01 * (1.4 if number % 40 < 20 else 1.0))
        pace.observe(number, 0.01 * (number + 1))  # never seen again
    assert len(pace.places) == MOST_KINDS and len(pace.mean) == len(pace.covariance) == MOST_KINDS + 1
    assert sorted(pace.places.values()) == list(range(1, MOST_KINDS + 1))
    assert pace.factor == pytest.approx(without.factor)
    level = [one.mean[one.places["usual"]] for one in (pace, without)]
    assert level[0] == pytest.approx(level[1])


def test_a_slow_spell_is_not_what_a_kind_takes(monkeypatch):
    """However many rounds it has. The mutant: the pace soon goes back to what it was at first."""

    def after_a_spell():
        """Returns what a kind takes after 300 rounds that were slow, over what the other one takes."""
        chance, pace, seen = random.Random(0), Pace(), {"one": [], "other": []}
        for number in range(600):
            is_spell = number >= 300  # of 4.5 s, in which only one kind is seen
            kind = "other" if number % 2 and not is_spell else "one"
            duration = 0.01 * (1.4 if is_spell else 1.0) * math.exp(chance.gauss(0, 0.1))
            pace.advance(0.015)
            pace.observe(kind, duration)
            seen[kind].append(duration / pace.factor)
        return sum(seen["one"][-100:]) / sum(seen["other"][-100:])

    assert after_a_spell() < 1.04
    monkeypatch.setattr(Pace, "_observe_usual", lambda self: None)
    monkeypatch.setattr("hf_ssd.speculation.pace.LASTING", 1.0)
    assert after_a_spell() > 1.06


def test_what_is_usual_is_an_average():
    pace = Pace()
    for number in range(600):
        pace.advance(SECONDS)
        pace.observe("one", 0.01 if number < 10 else 0.02)  # quick at first
    assert 1.8 < pace.usual < 2.05
    for _ in range(10):
        pace.advance(SECONDS)
        pace.observe("one", 0.01)
    assert pace.factor < 1.3 and pace.usual > 1.7
