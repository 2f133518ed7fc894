import pytest

from hf_ssd import SSDConfig
from hf_ssd.speculation import agenda as module
from hf_ssd.speculation.agenda import ENOUGH_DRAFTED, FIRST_LOOK, NEARLY, ROUNDS_AFTER_A_REST, WORTH_A_LOOK, Agenda
from hf_ssd.speculation.corrections import Corrections
from hf_ssd.speculation.measurements import Measurements

AHEAD, IN_TURN, REST = (3, 4), (2, 0), (0, 0)


def new_agenda(rounds, plain_seconds=0.01, drafted=ENOUGH_DRAFTED):
    """In the middle of a call, when plain decoding was measured long ago."""
    measured = Measurements(SSDConfig(), 1)
    measured.plain.observe(plain_seconds)
    measured.rounds = rounds
    agenda = Agenda(measured, Corrections())
    agenda.drafted, agenda.has_rested, agenda.look_at = drafted, True, rounds + FIRST_LOOK
    return agenda


def test_plain_decoding_is_measured_anew_before_a_rest(monkeypatch):
    """What it took long ago is enough for a short look, not for a rest."""

    def rounds_of_plain_decoding():
        agenda = new_agenda(500)
        assert agenda.next(AHEAD, {AHEAD: 0.5}, 1.0) == REST
        return agenda.due - 500

    assert rounds_of_plain_decoding() < 20
    monkeypatch.setattr(Measurements, "plain_is_old", False)  # the mutant
    assert rounds_of_plain_decoding() >= 64


def test_a_look_at_plain_decoding_is_shorter_where_rounds_are_long(monkeypatch):
    def length():
        agenda = new_agenda(100, plain_seconds=0.06)
        agenda.has_rested = False
        assert agenda.next(AHEAD, {AHEAD: 1.0}, 1.0) == REST
        return agenda.due - 100

    assert length() == 5
    monkeypatch.setattr(module, "SECONDS_OF_A_LOOK", 1.0)  # the mutant
    assert length() == 8


@pytest.mark.parametrize("share, is_close", [(NEARLY + 0.01, True), (NEARLY - 0.01, False)])
def test_a_try_goes_on_only_while_it_is_close(share, is_close):
    agenda = new_agenda(500)
    assert agenda.next(REST, {AHEAD: share}, 1.0) == AHEAD
    agenda.measured.rounds = agenda.due
    assert agenda.next(AHEAD, {AHEAD: share}, 1.0) == (AHEAD if is_close else REST)
    agenda.measured.rounds += ROUNDS_AFTER_A_REST
    assert agenda.next(AHEAD, {AHEAD: share}, 1.0) == REST


def test_drafting_that_is_as_good_as_plain_decoding_goes_on():
    """Who rests learns nothing. A rest begins where it is clearly better."""
    assert new_agenda(500).next(AHEAD, {AHEAD: 0.98}, 1.0) == AHEAD
    assert new_agenda(500).next(AHEAD, {AHEAD: 0.96}, 1.0) == REST


def test_drafting_ahead_is_seen_for_a_while_before_it_is_given_up(monkeypatch):
    def choice(drafted, share):
        """Returns what is done where drafting is predicted to have this share of plain decoding's speed."""
        return new_agenda(20, drafted=drafted).next(AHEAD, {AHEAD: share}, 1.0)

    assert choice(drafted=5, share=0.8) == AHEAD
    assert choice(drafted=16, share=0.8) == choice(drafted=5, share=0.7) == REST
    monkeypatch.setattr(module, "ENOUGH_DRAFTED", 0)  # the mutant
    assert choice(drafted=5, share=0.8) == REST


def test_after_every_other_rest_the_other_way_of_drafting_is_tried():
    """Otherwise one that looked bad in a slow moment is never seen again."""

    def tried(speeds, rests):
        agenda, plans = new_agenda(500), []
        for _ in range(rests):
            plans.append(agenda.next(REST, speeds, 100.0))
            agenda.measured.rounds = agenda.due + 1
        return plans

    assert tried({IN_TURN: 9.0, AHEAD: 10.0, (4, 8): 8.0}, 4) == [IN_TURN, AHEAD] * 2
    assert tried({IN_TURN: 5.0, AHEAD: 10.0}, 2) == [AHEAD] * 2  # the mutant: out of the question
    assert tried({IN_TURN: 9.0}, 2) == [IN_TURN] * 2  # there is no other way


@pytest.mark.parametrize("share, is_seen", [(WORTH_A_LOOK + 0.01, True), (WORTH_A_LOOK - 0.01, False)])
def test_what_is_not_done_is_looked_at_in_turn_if_it_is_not_out_of_the_question(share, is_seen):
    agenda, seen = new_agenda(500), []
    speeds = {AHEAD: 1.0, IN_TURN: share, (4, 8): 0.95}  # the last may be better than it looks
    for _ in range(3):
        agenda.measured.rounds = agenda.look_at
        seen.append(agenda.next(AHEAD, speeds, share))
        assert agenda.is_look == (seen[-1] != AHEAD)
    assert seen == ([REST, IN_TURN] if is_seen else [AHEAD, AHEAD]) + [(4, 8)]
    agenda.measured.rounds += 1
    assert agenda.next(AHEAD, speeds, share) == AHEAD  # in between, nothing else is done


def test_a_plan_stays_as_it_is_for_next_to_nothing():
    assert new_agenda(500).next(AHEAD, {AHEAD: 1.0, (4, 8): 1.01}, 0.5) == AHEAD
    assert new_agenda(500).next(AHEAD, {AHEAD: 1.0, (4, 8): 1.03}, 0.5) == (4, 8)
