"""The ablations as a user runs them, and the claim that matters most: confidence hits more often than geometric."""

import json
import math
from argparse import Namespace

import ablations
import pytest
import torch

import hf_ssd
from hf_ssd.drafting.cache_shapes import shape_for
from hf_ssd.rounds import RoundRecord

from .drafting.test_cache_shapes import candidates
from .helpers.programs import run


@pytest.fixture(scope="module")
def pair():
    return ablations.load_pair(ablations.PAIR)


@pytest.mark.slow
def test_tables_figures_and_numbers(tmp_path):
    words = ["--only", "shapes", "saguaro", "--max-new-tokens", 24, "--prompts", 2, "--output", tmp_path]
    output = run("examples/ablations.py", *words)
    numbers = json.loads((tmp_path / "ablations.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ablations.json", "saguaro.png", "shapes.png"]
    lines = [line.split() for line in output.splitlines()]
    for name, count in (("shapes", 10), ("saguaro", 6)):
        rows = numbers[name]["rows"]
        assert len(rows) == count and numbers[name]["new_tokens"] == 24 and numbers[name]["prompts"] == 2
        printed = lines.index(list(rows[0]))
        assert [float(cell) for cell in lines[printed + 1]] == pytest.approx([*rows[0].values()], abs=1e-3)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for row in numbers["shapes"]["rows"]:
        assert all(0 <= row[name] <= 1 for name in ablations.SHAPES) and row["rounds"] > 10
    assert 0 < numbers["saguaro"]["rows"][0]["hit_rate"] <= 1


@pytest.mark.slow
def test_trees_beside_a_head(tmp_path):
    words = ["--only", "trees", "--draft", ablations.PAIR / "eagle3", "--nodes", 8]
    run("examples/ablations.py", *words, "--max-new-tokens", 24, "--prompts", 2, "--output", tmp_path)
    rows = json.loads((tmp_path / "ablations.json").read_text())["trees"]["rows"]
    assert [row["nodes"] for row in rows] == [2, 8, 4, 8, 6, 8] * 4
    for row in rows:
        assert 0.5 < row["expected"] / row["tokens_per_round"] < 2


def test_expected_tokens_of_trees_by_hand():
    counts, ranks = [0, 1, 2, 0], [-1, 0, 2, 7]  # of each bonus token among the guesses, the one before these counts
    rounds = [{"accepted": [k], "ranks": [rank]} for k, rank in zip(counts, ranks)]
    records = [RoundRecord("ahead", lookahead=2, budget=3, sources=["prepared"], **of_round) for of_round in rounds]
    chains = [hf_ssd.SSDStats(records=records)]
    # Half of the tokens are accepted at each depth. After a rejection the first guess is right once, the third once.
    expected = {2: 1.75, 4: 1.75 + 0.5 * 0.75, 7: 1.75 + 0.75 * 0.75, 8: 1.75 + 0.75}
    assert {nodes: ablations.expected_tokens(chains, nodes) for nodes in expected} == pytest.approx(expected)
    for record in records:
        record.budget = 0
    assert math.isnan(ablations.expected_tokens(chains, 8))


def test_shapes_of_other_systems_by_hand():
    view, config = candidates(lookahead=3, vocab_size=12, guesses=12), hf_ssd.SSDConfig()
    shapes = ("all_accepted", "single_branch", "greedy_tree")
    all_accepted, branch, tree = (ablations.KINDS[name](config) for name in shapes)
    assert all_accepted.fan_outs(view, 5) == [[0, 0, 0, 5]] * 3
    for row, fan_out in enumerate(branch.fan_outs(view, 6)):
        assert fan_out[view.drafted_probabilities[row].argmin()] == 6 == sum(fan_out)
    for row, fan_out in enumerate(tree.fan_outs(view, 9)):
        reached = [1.0, *view.drafted_probabilities[row].cumprod()]
        ranks = [(k, rank) for k in range(4) for rank in range(view.limits[k])]
        reached = [chance * rest for chance, rest in zip(reached, [*(1 - view.drafted_probabilities[row]), 1.0])]
        paths = sorted(((float(reached[k] * view.chances[row, k, rank]), k) for k, rank in ranks), reverse=True)
        assert fan_out == [sum(k == place for _, k in paths[:9]) for place in range(4)]


@pytest.mark.slow
def test_a_replay_is_what_a_worker_does(pair):
    args = Namespace(max_new_tokens=28, texts=ablations.PROMPTS[:4])
    config = hf_ssd.SSDConfig(lookahead=4, budget=12, fan_out="confidence", fallback="primary")
    (rounds,), _ = ablations.record(pair, config, 0.7, args)
    replayed = ablations.replay([rounds], shape_for(config), 12)
    with hf_ssd.launch_draft(pair[1], num_threads=1) as worker:
        stats = ablations.generate(pair, worker, config, 0.7, args.texts, 0, args)
    assert 0.2 < sum(map(sum, replayed)) / sum(map(len, replayed)) < 0.95
    for row, hits in enumerate(replayed):
        of_worker = [hit[row] for hit in stats.column("hits")]
        count = min(len(hits), len(of_worker))  # a replay has the outcome with which the call ends, too
        assert count > 8 and len(hits) <= len(of_worker) + 1 and hits[:count] == of_worker[:count]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_confidence_beats_geometric(pair, temperature):
    """By more than two standard errors of the difference within a row, at an equal budget, on the same rounds."""
    args = Namespace(max_new_tokens=160, texts=ablations.PROMPTS)
    recorded = hf_ssd.SSDConfig(lookahead=4, budget=12, fallback="primary")
    calls, _ = ablations.record(pair, recorded, temperature, args)
    confidence, geometric = (
        ablations.replay(calls, shape_for(hf_ssd.SSDConfig(fan_out=name)), 12) for name in ("confidence", "geometric")
    )
    gains = torch.tensor([sum(a) / len(a) - sum(b) / len(b) for a, b in zip(confidence, geometric)])
    error = gains.std() / math.sqrt(len(gains))
    assert len(gains) == 64 and sum(map(len, geometric)) > 2500
    assert gains.mean() > 2 * error and gains.mean() > 0.01
