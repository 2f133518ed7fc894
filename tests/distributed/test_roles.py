"""Targets that several ranks share, and draft ranks: real torchrun, real processes, real kills."""

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig

import hf_ssd
from hf_ssd.distributed import Roles, init_roles
from hf_ssd.distributed.target_ranks import TargetRanks

from ..helpers.calls import call
from ..helpers.processes import ends_within
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

PROGRAM = Path(__file__).parent / "programs" / "roles.py"
BIN = Path(sys.executable).parent
GOOD = ("greedy", "sampled", "sampled_plain_afterwards", "a_clock")
BAD_FOR_TWO = ("killed", "stopped_between_calls")
BAD = (*BAD_FOR_TWO, "raising")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folder of a target and a draft."""
    folder = tmp_path_factory.mktemp("pair")
    tiny_model().save_pretrained(folder / "target")
    tiny_draft().save_pretrained(folder / "draft")
    return folder


def run(pair, folder, num_draft_ranks, scenarios, *commands):
    """Runs the program by each command at once, and returns the exit codes, the output, and what each rank saw."""
    arguments = [str(PROGRAM), str(pair), str(folder), str(num_draft_ranks), *scenarios]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [subprocess.Popen([*map(str, one), *arguments], env=environment, **streams) for one in commands]
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    seen = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    return [node.returncode for node in nodes], "".join(outputs), seen


def torchrun(ranks):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]


LAYOUTS = {"2+1": (2, 1, BAD), "2+2": (2, 2, BAD_FOR_TWO)}
PARAMETERS = [pytest.param(name, marks=[pytest.mark.slow] * (name != "2+1")) for name in LAYOUTS]


@pytest.fixture(scope="module", params=PARAMETERS)
def layout(request, pair, tmp_path_factory):
    """Everything that the ranks of one layout saw."""
    ranks, drafts, bad = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("run")
    codes, output, seen = run(pair, folder, drafts, GOOD + bad, torchrun(ranks + drafts))
    assert codes == [0], output
    assert len(list(folder.glob("served-*"))) == drafts
    return seen, drafts, output


@pytest.fixture(scope="module")
def expected():
    """What one process gives: plain generate(), and sampled the synchronous oracle."""
    target, draft, settings = hf_ssd.enable(tiny_model()), tiny_draft(), {"budget": 6, "asynchronous": False}

    def tokens(rows, **options):
        inputs = {name: values[-rows:] for name, values in padded_batch(3).items()}
        options |= {"max_new_tokens": 20, "inputs": inputs, "settings": settings, "seed": 7}
        return call(target, draft, **options).sequences.tolist()

    return {
        "greedy": {rows: tokens(rows) for rows in (1, 2, 3)},
        "sampled": {rows: tokens(rows, do_sample=True, temperature=0.7) for rows in (1, 3)},
    }


@pytest.mark.parametrize("scenario", ["greedy", "sampled"])
def test_a_divided_target_gives_the_tokens_of_one_process(layout, expected, scenario):
    seen, _, _ = layout
    for rank in seen:
        for rows, seen_of in zip((1, 3), rank[scenario]):
            assert seen_of["tokens"] == expected[scenario][rows]
            assert seen_of["failure"] is None and any(any(hits) for hits in seen_of["hits"])
    assert all(rank[scenario] == seen[0][scenario] for rank in seen)  # statistics too


def test_the_ranks_stay_in_step(layout):
    """The same random numbers after a sampled call, and the same end by the leader's clock."""
    seen, _, _ = layout
    for scenario in ("sampled_plain_afterwards", "a_clock"):
        assert seen[0][scenario] == seen[1][scenario]
    assert len(seen[0]["a_clock"]["tokens"][0]) < 9 + 100


def test_a_killed_worker_costs_no_tokens_and_its_supervisor_starts_another(layout, expected):
    seen, drafts, output = layout
    for rank in seen:
        first, second, before, after = rank["killed"]
        assert first["tokens"] == second["tokens"] == expected["greedy"][2]
        assert second["failure"] is None and any(any(hits) for hits in second["hits"])
        assert ("has ended" in (first["failure"] or "")) == (drafts == 1)  # with two, the other one carries on
        assert len(before) == len(after) and before[1:] == after[1:]
        assert not before or before[0] != after[0]
    assert output.count("starting another one") >= 2


def test_a_stopped_worker_is_given_up_after_the_timeout(layout, expected):
    seen, drafts, _ = layout
    for rank in seen:
        first, second = rank["stopped_between_calls"]
        assert first["tokens"] == second["tokens"] == expected["greedy"][2] and second["failure"] is None
        assert ("did not answer within 1 s" in (first["failure"] or "")) == (drafts == 1)


def test_errors_reach_all_ranks_and_the_next_call_works(layout, expected):
    seen, drafts, _ = layout
    if drafts == 2:
        return  # the same code: tried with one draft
    assert "has ended" in seen[0]["raising"][0] and seen[0]["raising"][1] == 'KeyError "the leader\'s own"'
    for rank in seen[1:]:
        assert rank["raising"][0].startswith("Rank 0 of the target has broken off: DraftError")
        assert rank["raising"][1].startswith("RuntimeError Rank 0 of the target has broken off: KeyError")
    for rank in seen:
        assert rank["raising"][2]["tokens"] == expected["greedy"][2] and rank["raising"][2]["failure"] is None


def gone(pids):
    return all(ends_within(pid, 5.0) for pid in pids)


def test_no_worker_is_left(layout):
    pids = layout[0][0]["workers"]
    assert len(set(pids)) >= 3 and gone(pids)


@pytest.mark.slow
def test_when_a_rank_of_the_target_dies_everything_ends(pair, tmp_path):
    codes, output, seen = run(pair, tmp_path, 1, ["a_rank_dies"], torchrun(3))
    assert codes != [0] and "SIGKILL" in output
    assert seen[0]["workers"] and gone(seen[0]["workers"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["accelerate", "two nodes"])
def test_two_ranks(pair, tmp_path, expected, how):
    """Two agents are as on two machines: then the ranks do not count on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    commands = {
        "accelerate": "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
        "--dynamo_backend no --main_process_port 0",
        "two nodes": f"torchrun --nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {port} --node-rank",
    }
    program, *words = commands[how].split()
    numbers = [[0], [1]] if how == "two nodes" else [[]]
    nodes = [[BIN / program, *words, *number] for number in numbers]
    codes, output, seen = run(pair, tmp_path, 1, ["greedy", "killed"], *nodes)
    assert not any(codes), output
    seen = seen[0]
    assert [call["tokens"] for call in seen["greedy"]] == [expected["greedy"][rows] for rows in (1, 3)]
    assert seen["killed"][1]["tokens"] == expected["greedy"][2] and seen["killed"][1]["failure"] is None
    assert (tmp_path / "served-1").exists() and gone(seen["workers"])


# ---------------------------------------------------------------- errors before work


def is_rank(monkeypatch, rank, ranks):
    """The environment that torchrun gives to a rank."""
    for name, value in {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(name, str(value))


def roles_of(**known):
    """Roles of which no more is known."""
    roles = object.__new__(Roles)
    vars(roles).update(known)
    return roles


def test_without_torchrun_and_with_too_few_ranks(monkeypatch):
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node 2"):
        init_roles()
    is_rank(monkeypatch, 0, 2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    for drafts in (0, 2, 3):
        with pytest.raises(ValueError, match="at least one must draft and at least one hold the target"):
            init_roles(drafts)


def test_heads_that_cannot_be_shared_are_refused_before_loading_and_each_rank_has_its_part():
    for heads, kv_heads, ranks, words in [(4, 4, 3, "4 attention heads"), (8, 2, 4, "2 key-value heads")]:
        config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=kv_heads)
        with pytest.raises(ValueError, match=f"{words}, which {ranks} ranks cannot share equally; use 1 or 2"):
            roles_of(tp_size=ranks).target_config(config)
    with pytest.raises(ValueError, match="only draft ranks serve"):
        roles_of(is_draft=False).serve("somewhere")
    with pytest.raises(ValueError, match="call `roles.serve"):
        roles_of(is_draft=True).draft  # noqa: B018


def test_draft_ranks_are_told_that_the_target_is_done_whatever_happens_to_the_draft(monkeypatch):
    class Broken:
        def close(self):
            raise KeyboardInterrupt

    parts = {"is_draft": False, "is_leader": True, "num_draft_ranks": 2, "tp_size": 1, "draft": Broken()}
    roles, told = roles_of(**parts, _is_done=False, _process=os.getpid()), []
    notes = SimpleNamespace(set=lambda key, _: told.append(key))
    monkeypatch.setattr(Roles, "_place", lambda self, index: {})
    monkeypatch.setattr("hf_ssd.distributed.roles.join", lambda place, timeout: notes)
    with pytest.raises(KeyboardInterrupt):
        roles.shutdown()
    assert told == ["done", "done"]


@pytest.fixture
def one_visible_accelerator(monkeypatch):
    """Rank 1 of 3, which is shown one accelerator, its own, and what torch is asked for."""
    asked = {}
    is_rank(monkeypatch, 1, 3)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: asked.update(current=device))
    monkeypatch.setattr(dist, "rendezvous", lambda _: iter([(dist.HashStore(), 1, 3)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **rest: asked.update(rest, backend=backend))
    monkeypatch.setattr(dist, "new_group", lambda backend: asked.update(outcomes=backend))
    monkeypatch.setattr("hf_ssd.distributed.roles.TargetRanks", lambda group: group)
    return asked


def test_the_group_of_the_ranks_waits_for_sharded_loading_and_knows_its_device(one_visible_accelerator):
    Roles(num_draft_ranks=1)
    asked, own = one_visible_accelerator, torch.device("cuda:0")
    assert asked["timeout"] == timedelta(hours=2) and asked["backend"] == "cpu:gloo,cuda:nccl"
    assert asked["device_id"] == asked["current"] == own and asked["outcomes"] == "gloo"
    assert os.environ["LOCAL_RANK"] == "0"  # where transformers takes the device's number from


def test_a_draft_rank_that_is_shown_only_its_own_accelerator_drafts_there(one_visible_accelerator, monkeypatch):
    is_rank(monkeypatch, 2, 3)
    roles = Roles(num_draft_ranks=1)
    assert roles.is_draft and (roles.device.type, roles.worker_device) == ("cpu", torch.device("cuda:0"))


def test_ranks_share_the_random_state_of_any_device(monkeypatch):
    states, device = [torch.arange(3, dtype=torch.uint8)], torch.device("xpu:1")
    module = SimpleNamespace(
        get_rng_state=lambda of: states[-1] if of == device else None,
        set_rng_state=lambda state, of: states.append(state if of == device else None),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda of: module)
    ranks = TargetRanks()
    ranks.group = "two ranks"
    ranks.share_values = lambda values: [value + 1 for value in values]
    ranks.share_random_state(device)
    assert states[-1].tolist() == [1, 2, 3]
