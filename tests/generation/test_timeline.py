"""What each side did when, as intervals, a trace, pictures and a table."""

import json

import matplotlib.image
import pytest

from hf_ssd import SSDStats, timeline
from hf_ssd.rounds import AHEAD, NGRAM, NOTHING, PREPARED, PRIMARY, RoundRecord


def two_rounds():
    sources = [PREPARED, PRIMARY]
    first = RoundRecord(
        AHEAD, 2, 6, sources, accepted=[2, 0], choose_seconds=0.1, grow_seconds=0.3, answer_seconds=0.1,
        verify_seconds=0.2, wait_seconds=0.1, prepared_at=0.4, answered_at=0.85, received_at=1.0,
    )  # fmt: skip
    second = RoundRecord(
        AHEAD, 2, 6, sources, accepted=[1, -1], grow_seconds=0.1, answer_seconds=0.05, verify_seconds=0.3,
        prepared_at=0.95, answered_at=-7.0, received_at=1.25,
    )  # fmt: skip
    return SSDStats(2, [first, second], prefill_seconds=0.3)


def test_intervals_say_what_each_side_did():
    found = {(i.side, i.what, i.round): (i.start, i.end) for i in timeline.intervals(two_rounds())}
    assert found[("target", "prefill", 0)] == (0.0, 0.3)
    assert found[("target", "wait", 0)] == pytest.approx((0.9, 1.0))
    assert found[("target", "verify", 1)] == pytest.approx((1.25, 1.55))
    assert found[("draft", "prepare", 0)] == pytest.approx((0.4, 0.8))
    assert found[("draft", "answer", 0)] == pytest.approx((0.85, 0.95))
    assert ("draft", "answer", 1) not in found  # a time before the call means that there was none
    verify = [i for i in timeline.intervals(two_rounds()) if i.what == "verify"]
    assert [i.details["rows that hit"] for i in verify] == [1, 1] and verify[1].details["rows"] == 1


def test_a_trace_is_json_with_microseconds():
    trace = json.loads(json.dumps(timeline.perfetto(two_rounds())))
    names = {e["args"]["name"]: e["pid"] for e in trace["traceEvents"] if e["ph"] == "M"}
    answer = next(e for e in trace["traceEvents"] if e["name"] == "answer")
    assert answer["pid"] == names["draft"] and answer["ts"] == pytest.approx(850_000)
    assert answer["dur"] == pytest.approx(100_000)


@pytest.mark.parametrize(
    "sources, lookup, label, is_hit",
    [
        ([PREPARED, PREPARED], 4, "hit", True),
        ([PREPARED, NGRAM], 4, "hit", True),
        ([PREPARED, NGRAM], 0, "1 of 2", False),  # a fallback after a miss
        ([PRIMARY, NGRAM], 4, "miss", False),
        ([NGRAM, NGRAM], 4, "n-grams", False),
        ([NOTHING, NOTHING], 4, "miss", False),
    ],
)
def test_a_row_that_preferred_an_ngram_neither_hit_nor_missed(sources, lookup, label, is_hit):
    record = RoundRecord(AHEAD, 4, 6, [*sources, PRIMARY], accepted=[2, 0, -1], early=lookup)
    assert timeline.label(record) == label and record.is_hit == is_hit
    details, preferred = timeline.intervals(SSDStats(3, [record]))[-1].details, sources.count(NGRAM) if lookup else 0
    assert details["rows that hit"] == sources.count(PREPARED)
    assert details["rows with n-grams"] == preferred
    assert SSDStats(3, [record]).to_pandas()["early"].tolist() == [preferred]


def test_pictures_of_a_call(tmp_path):
    path, stats = tmp_path / "picture.png", two_rounds()
    stats.plot_timeline(path)
    height, width, _ = matplotlib.image.imread(path).shape
    assert width > 3 * height
    stats.plot_acceptance(path)
    image = matplotlib.image.imread(path)
    assert image.shape[1] > 2 * image.shape[0] and image.std() > 0.05
    with pytest.raises(ValueError, match="none of them in range"):
        stats.plot_timeline(path, rounds=range(5, 9))
    with pytest.raises(ValueError, match="Nothing was drafted"):
        SSDStats().plot_acceptance(path)


def test_a_table():
    table = two_rounds().to_pandas()
    assert list(table.index) == [0, 1] and table.index.name == "round"
    assert table["rows"].tolist() == [2, 1] and table["hits"].tolist() == [1, 1]
    assert table["accepted"].tolist() == [1.0, 1.0] and table["verify_seconds"].tolist() == [0.2, 0.3]
    cut = two_rounds()
    cut.records[-1].accepted = []  # a call that was broken off
    assert cut.to_pandas()["rows"].tolist() == [2, 0]
