import json

import pytest
import torch

from hf_ssd import SSDConfig, SSDStats
from hf_ssd.rounds import AHEAD, NGRAM, PLAIN, PREPARED, PRIMARY, RoundRecord


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


def test_ngrams_that_rows_preferred_are_no_tokens_of_the_draft():
    ngram = RoundRecord(PLAIN, 4, sources=[NGRAM], accepted=[4], early=16)
    assert SSDStats(records=[ngram, *records(1, accepted=0, hit=False)]).acceptance_rate == 0
    assert SSDStats(records=[ngram]).acceptance_rate == 1  # nothing was drafted


def stats_like(lookahead=7, accepted=5, hit=True, wait=0.0, budget=8, rounds=30, **fields):
    fields = {"adjustable": ["lookahead", "budget", "saguaro_c"], **fields}
    return SSDStats(records=records(rounds, accepted, lookahead, hit, budget, wait_seconds=wait), **fields)


SLOW = "wait is 29% of a round, because the draft is slow: choose "


@pytest.mark.parametrize(
    "stats, words",
    [
        (stats_like(), None),
        (stats_like(accepted=0, lookahead=2), "acceptance 0.00: this draft does not pay; choose one that agrees more"),
        (stats_like(accepted=7, wait=0.04), SLOW + "a smaller `lookahead` than 7, a smaller `budget` than 8, "),
        (stats_like(lookahead=1, accepted=1, wait=0.04, budget=1), SLOW + "a smaller draft or a faster device for it"),
        (stats_like(wait=0.04, adjustable=["lookahead"]), SLOW + "a smaller `lookahead` than 7, a smaller draft"),
        (stats_like(wait=0.04, hit=False), "hits are rare (0.00): a larger `budget` or a lower temperature, or"),
        (stats_like(wait=0.04, hit=False, adjustable=["lookahead", "budget"]), "(0.00): a larger `budget` makes more"),
        (stats_like(wait=0.04, budget=0), "in turn with the target"),
        (stats_like(unlikely_tokens=1), "1 accepted tokens had less than a millionth of the target's probability"),
        (stats_like(unlikely_tokens=2000), "were not drawn from what the draft or the fallback says"),
        (stats_like(unlikely_tokens=9, rounds=20_000), "9 accepted tokens had less than a millionth"),
        (stats_like(unlikely_tokens=1, rounds=20_000), None),  # which chance explains
        (stats_like(draft_failure="it ended"), "finished without the draft, by plain decoding: it ended"),
        # too little was drafted to tell, as where the planner rests
        (stats_like(accepted=0, lookahead=2, rounds=20), None),
        (stats_like(accepted=0, lookahead=0), None),
        (SSDStats(records=records(60, 0, lookahead=0) + records(8, 7)), None),
        (stats_like(wait=0.04, rounds=20), None),
        # what "auto" decides
        (stats_like(wait=0.04, adjustable=[]), None),
        (stats_like(wait=0.04, hit=False, adjustable=["budget", "saguaro_c"]), None),
        (stats_like(wait=0.04, hit=False, adjustable=["lookahead"]), None),
        (stats_like(wait=0.04, budget=0, adjustable=[]), None),
    ],
)
def test_advice_says_what_was_seen(stats, words):
    assert stats.advice == [] if words is None else any(words in sentence for sentence in stats.advice)
    assert all(sentence in str(stats) for sentence in stats.advice)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("chosen", [{}, {"lookahead": 3}, {"lookahead": 3, "budget": 4, "saguaro_c": 0.5}])
def test_advice_names_only_settings_that_are_the_users_own_and_matter(target, draft, chosen, do_sample):
    options = {"max_new_tokens": 3, "do_sample": do_sample, "return_dict_in_generate": True, "assistant_model": draft}
    output = target.generate(torch.tensor([[3, 5, 7]]), **options, ssd_config=SSDConfig(asynchronous=False, **chosen))
    own = [name for name in ("lookahead", "budget") if name in chosen]
    assert output.ssd_stats.adjustable == own + ["saguaro_c"] * do_sample


def test_a_notebook_shows_one_line():
    stats = stats_like(generated_tokens=180)
    assert repr(stats) == (
        "SSDStats(180 tokens, 30 rounds, 6.00 tokens per round, acceptance 0.83, hit rate 1.00; print() it for more)"
    )
    assert "verification 100.0 ms" in str(stats) and "0 rounds" in repr(SSDStats())
