import json

import pytest

from hf_ssd import SSDStats


def test_figures_by_hand():
    stats = SSDStats(
        batch_size=2,
        lookahead=[3, 3, 2],
        accepted=[[3, 0], [1, -1], [2, -1]],  # row 1 was finished after the first round
        hits=[[True, False], [True, True], [False, True]],
        verify_seconds=[0.2, 0.3, 0.1],
        wait_seconds=[0.1, 0.0, 0.1],
        draft_seconds=[0.5, 0.1, 0.0],
        generated_tokens=12,
        prefill_seconds=0.4,
        total_seconds=1.5,
    )
    assert stats.rounds == 3
    assert stats.hit_rate == pytest.approx(2 / 4)
    assert stats.tokens_per_round == pytest.approx((4 + 1 + 2 + 3) / 4)
    assert stats.acceptance_rate == pytest.approx((3 + 0 + 1 + 2) / (3 + 1 + 2 + 2))
    plain = json.loads(json.dumps(stats.to_dict()))
    assert plain["total_verify_seconds"] == pytest.approx(0.6) and plain["rounds"] == 3
    text = str(stats)
    for part in ("12 tokens in 3 rounds", "2.50 tokens per round", "hit rate 0.50", "verification 200.0 ms"):
        assert part in text


def test_no_rounds_and_a_failure():
    assert "no rounds" in str(SSDStats(generated_tokens=1))
    stats = SSDStats(lookahead=[0], accepted=[[0]], hits=[[False]], verify_seconds=[0.1], wait_seconds=[0.0],
                     draft_seconds=[0.0], draft_failure="it ended")  # fmt: skip
    assert stats.hit_rate == stats.acceptance_rate == 0 and str(stats).count("it ended") == 1


def stats_like(lookahead=7, accepted=5, hit=True, wait=0.0, budget=8, **fields):
    """Ten rounds of one row, all alike."""
    ten = {"lookahead": lookahead, "accepted": [accepted], "hits": [hit], "wait_seconds": wait, "budget": budget}
    ten |= {"verify_seconds": 0.1, "draft_seconds": 0.05}
    return SSDStats(**{name: [value] * 10 for name, value in ten.items()}, **fields)


@pytest.mark.parametrize(
    "stats, words",
    [
        (stats_like(), None),
        (stats_like(accepted=0, lookahead=2), "acceptance 0.00: this draft does not pay"),
        (stats_like(accepted=0, lookahead=0), "100% of the rounds were plain decoding"),
        (stats_like(wait=0.04), "wait is 29% of a round: the draft is too slow for lookahead 7 and budget 8"),
        (stats_like(wait=0.04, hit=False), "hits are rare (0.00)"),
        (stats_like(wait=0.04, budget=0), "in turn with the target"),
        (stats_like(unlikely_tokens=1), "1 accepted tokens had less than a millionth of the target's probability"),
        (stats_like(unlikely_tokens=2000), "were not drawn from what the draft or the fallback says"),
        (stats_like(draft_failure="it ended"), "finished without the draft, by plain decoding: it ended"),
    ],
)
def test_advice_says_what_was_seen(stats, words):
    assert stats.advice == [] if words is None else any(words in sentence for sentence in stats.advice)
    assert all(sentence in str(stats) for sentence in stats.advice)


def test_what_chance_explains_is_no_reason_for_advice():
    rounds = 10**5
    fields = {"lookahead": [7] * rounds, "accepted": [[5]] * rounds, "hits": [[True]] * rounds, "budget": [8] * rounds}
    assert SSDStats(**fields, unlikely_tokens=1).advice == []
    assert SSDStats(**fields, unlikely_tokens=9).advice != []
