import pytest

from hf_ssd.speculation.corrections import ALIKE_KINDS, MOST, Corrections


def test_a_plan_that_was_not_tried_is_like_others_of_its_kind():
    corrections = Corrections()
    assert corrections((4, 8)) == 1.0
    for _ in range(300):
        corrections.observe((4, 8), 1.5, 1)
    assert corrections((7, 12)) == pytest.approx(1.5, rel=0.02)  # ahead too
    assert corrections((7, 0)) == 1.0  # in turn


def test_a_plan_that_was_tried_often_stands_for_itself():
    corrections = Corrections()
    for _ in range(300):
        corrections.observe((4, 8), 1.5, 1)
        corrections.observe((7, 12), 0.8, 1)
    others = corrections((2, 8))
    assert others == pytest.approx(1.15, abs=0.05)
    assert corrections((4, 8)) > 1.1 * others and corrections((7, 12)) < 0.9 * others


@pytest.mark.parametrize("given_up, like_it", [((4, 8), (4, 8)), ((3, 2), (3, 4))])
def test_what_was_given_up_long_ago_is_like_others_again(given_up, like_it, monkeypatch):
    """A plan, and all plans for few outcomes of which only one was tried."""

    def apart():
        corrections = Corrections()
        for _ in range(50):
            corrections.observe(given_up, 2.0, 1)  # the machine was busy
        for _ in range(300):
            corrections.observe((7, 12), 1.0, 1)
        return corrections(like_it) - corrections((2, 8))

    assert apart() < 0.1
    monkeypatch.setattr("hf_ssd.speculation.corrections.FADING", 1.0)  # the mutant
    assert apart() > 0.2


def test_a_way_of_drafting_that_was_given_up_long_ago_is_as_good_as_predicted_again(monkeypatch):
    """The draft's core was slow just then, which costs drafting ahead the most: in turn would go on for ever."""

    def left():
        corrections = Corrections()
        corrections.observe((2, 24), 1.15, 100)
        corrections.observe((3, 0), 1.0, 500)
        return corrections((2, 24)) - 1

    assert left() < 0.03
    monkeypatch.setattr("hf_ssd.speculation.corrections.FADING", 1.0)  # the mutant
    assert left() > 0.1


def test_hope_fades_with_trials_and_one_hiccup_condemns_nothing():
    corrections = Corrections()
    hopes = [corrections.hope((4, 8))]
    for _ in range(ALIKE_KINDS):
        corrections.observe((4, 8), 1.0, 1)
        hopes.append(corrections.hope((4, 8)))
    assert hopes == sorted(hopes, reverse=True) and hopes[0] > hopes[-1] > 1.0
    before = corrections((4, 8))
    corrections.observe((4, 8), 1e6, 1)
    assert corrections((4, 8)) - before < MOST / ALIKE_KINDS


def test_many_rounds_count_like_each_of_them():
    together, apart = Corrections(), Corrections()
    together.observe((4, 8), 1.5, 12)
    for _ in range(12):
        apart.observe((4, 8), 1.5, 1)
    assert together((4, 8)) == pytest.approx(apart((4, 8)))
    assert together((4, 8)) > 1.1
