import pytest

from hf_ssd.speculation.corrections import ALIKE, MOST, Corrections


def test_a_plan_that_was_not_tried_is_like_others_of_its_kind():
    corrections = Corrections()
    assert corrections((4, 8)) == 1.0
    for _ in range(300):
        corrections.observe((4, 8), 1.5)
    assert corrections((7, 12)) == pytest.approx(1.5, rel=0.02)  # ahead too
    assert corrections((7, 0)) == 1.0  # in turn


def test_a_plan_that_was_tried_often_stands_for_itself():
    corrections = Corrections()
    for _ in range(300):
        corrections.observe((4, 8), 1.5)
        corrections.observe((7, 12), 0.8)
    assert corrections((4, 8)) > 1.3 and corrections((7, 12)) < 1.0 < corrections((2, 2)) < 1.3


def test_hope_fades_with_trials_and_one_hiccup_condemns_nothing():
    corrections = Corrections()
    hopes = [corrections.hope((4, 8))]
    for _ in range(ALIKE):
        corrections.observe((4, 8), 1.0)
        hopes.append(corrections.hope((4, 8)))
    assert hopes == sorted(hopes, reverse=True) and hopes[0] > hopes[-1] > 1.0
    before = corrections((4, 8))
    corrections.observe((4, 8), 1e6)
    assert corrections((4, 8)) - before < MOST / ALIKE
