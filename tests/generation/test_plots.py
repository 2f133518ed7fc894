"""Pictures of a call, and its figures as a table."""

import matplotlib.image
import pytest

from hf_ssd import SSDStats

from .test_timeline import two_rounds


def test_a_timeline(tmp_path):
    stats = two_rounds()
    stats.plot_timeline(tmp_path / "timeline.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "timeline.png").shape
    assert width > 3 * height
    with pytest.raises(ValueError, match="none of them in range"):
        stats.plot_timeline(tmp_path / "none.png", rounds=range(5, 9))


def test_acceptance(tmp_path):
    two_rounds().plot_acceptance(tmp_path / "acceptance.png")
    image = matplotlib.image.imread(tmp_path / "acceptance.png")
    assert image.shape[1] > 2 * image.shape[0] and image.std() > 0.05
    with pytest.raises(ValueError, match="Nothing was drafted"):
        SSDStats().plot_acceptance(tmp_path / "none.png")


def test_a_table():
    table = two_rounds().to_pandas()
    assert list(table.index) == [0, 1] and table.index.name == "round"
    assert table["rows"].tolist() == [2, 1] and table["hits"].tolist() == [1, 1]
    assert table["accepted"].tolist() == [1.0, 1.0] and table["verify_seconds"].tolist() == [0.2, 0.3]
    cut = two_rounds()
    cut.records[-1].accepted = []  # a call that was broken off
    assert cut.to_pandas()["rows"].tolist() == [2, 0]
