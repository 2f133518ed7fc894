"""How long a rest lasts."""

from hf_ssd.speculation.rests import FIRST_REST, LONGEST_IF_FAR, LONGEST_REST, LOSS, Rests


def lengths(is_close, count=12):
    rests = Rests()
    return [rests.next(0.01, is_close) for _ in range(count)]


def test_each_rest_is_twice_as_long_as_the_one_before():
    for is_close, longest in ((True, LONGEST_REST), (False, LONGEST_IF_FAR)):
        rests = lengths(is_close)
        assert rests[:3] == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST] and rests[-1] == longest


def test_a_draft_that_pays_makes_the_next_rest_a_first_one_again():
    rests = Rests()
    for _ in range(5):
        rests.next(0.01, is_close=True)
    rests.forget()
    assert rests.next(0.01, is_close=True) == FIRST_REST


def test_a_rest_lasts_until_it_has_paid_for_what_was_tried():
    rests = Rests()
    rests.drafted(0.2, 0.1)
    rounds = rests.next(0.01, is_close=False)
    assert abs(rounds - 0.1 / (LOSS * 0.01)) <= 1
    for _ in range(rounds + 1):
        rests.rested(0.01)
    assert rests.owed == 0
