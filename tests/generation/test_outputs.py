import json

import pytest

from hf_ssd import SSDStats
from hf_ssd.rounds import AHEAD, FILLER, PLAIN, PREPARED, PRIMARY, RoundRecord


def records(count, accepted, lookahead=7, hit=True, budget=8, **fields):
    """Rounds of one row, all alike."""
    source = PREPARED if hit else PRIMARY
    values = {"verify_seconds": 0.1, "grow_seconds": 0.05, **fields}
    return [RoundRecord(AHEAD, lookahead, budget, [source], accepted=[accepted], **values) for _ in range(count)]


def test_figures_by_hand():
    hit, miss = PREPARED, PRIMARY
    rounds = [
        RoundRecord(AHEAD, 3, 8, [hit, miss], accepted=[3, 0], verify_seconds=0.2, wait_seconds=0.1, grow_seconds=0.5),
        RoundRecord(AHEAD, 3, 8, [hit, hit], accepted=[1, -1], verify_seconds=0.3, grow_seconds=0.1),  # row 1 had ended
        RoundRecord(AHEAD, 2, 8, [miss, hit], accepted=[2, -1], verify_seconds=0.1, wait_seconds=0.1),
    ]
    stats = SSDStats(2, rounds, generated_tokens=12, prefill_seconds=0.4, total_seconds=1.5)
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
    stats = SSDStats(records=records(1, accepted=0, lookahead=0, hit=False), draft_failure="it ended")
    assert stats.hit_rate == stats.acceptance_rate == 0 and str(stats).count("it ended") == 1


def test_fillers_count_as_plain_decoding():
    filler = RoundRecord(PLAIN, 7, sources=[FILLER], accepted=[2])
    stats = SSDStats(records=[filler, *records(1, accepted=7)])
    assert stats.acceptance_rate == stats.hit_rate == 1.0 and stats.tokens_per_round == (3 + 8) / 2


def stats_like(lookahead=7, accepted=5, hit=True, wait=0.0, budget=8, **fields):
    return SSDStats(records=records(10, accepted, lookahead, hit, budget, wait_seconds=wait), **fields)


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
    rounds = records(10**5, accepted=5)
    assert SSDStats(records=rounds, unlikely_tokens=1).advice == []
    assert SSDStats(records=rounds, unlikely_tokens=9).advice != []
