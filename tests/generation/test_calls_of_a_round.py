"""How many functions of the package a round calls in the target's process, and an answer in the draft's."""

import contextlib
import sys
from collections import Counter
from pathlib import Path

import pytest

import hf_ssd
from hf_ssd.distributed.draft_server import DraftServer
from hf_ssd.distributed.transport import Channel
from hf_ssd.distributed.wire import Kind
from hf_ssd.rounds import AHEAD

from ..helpers import comparing
from ..helpers.loopback import PackingChannel, assistant_of
from ..helpers.tiny import padded_batch

PACKAGE = Path(hf_ssd.__file__).parent
MOST, MOST_OF_AN_ANSWER = 75, 15
POLLS = ("_let_others_run",)
OF_EACH_LAYER = ("update", "_reserve", "_view", "for_groups", "aligned", "_layer")
FILES_OF_LAYERS = ("attention", "packed", "packed_linear", "packed_experts")


@pytest.fixture
def rounds():
    """Counts the calls of each round, from one outcome to the next. Comprehensions and lambdas are not counted."""
    counted, before = [Counter()], sys.getprofile()

    def count(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)) or code.co_name.startswith("<"):
            return
        if code.co_name in (*POLLS, *OF_EACH_LAYER) or Path(code.co_filename).stem in FILES_OF_LAYERS:
            return
        if code.co_name == "decide":
            counted.append(Counter())
        counted[-1][f"{Path(code.co_filename).stem}.{code.co_name}"] += 1

    sys.setprofile(count)
    yield counted
    sys.setprofile(before)


def generate(target, assistant):
    inputs = {name: value[:1, -5:] for name, value in padded_batch(rows=1).items()}
    return comparing.generate(target, assistant, inputs, {"budget": 6}, max_new_tokens=40)


def test_an_outcome_passes_at_most_six_frames_from_the_loop_to_the_transport(target, assistant, monkeypatch):
    depths, send = [], Channel.send

    def sends(channel, message):
        frame, depth = sys._getframe(), 1
        while message.kind == Kind.OUTCOME and frame.f_code.co_name != "decode":
            frame, depth = frame.f_back, depth + 1
        depths.append(depth)
        send(channel, message)

    monkeypatch.setattr(Channel, "send", sends)
    assert generate(target, assistant).ssd_stats.hit_rate > 0
    assert len(depths) > 5 and max(depths) <= 6


def test_a_greedy_round_with_a_fixed_plan_calls_few_functions(target, assistant, rounds):
    output = generate(target, assistant)
    records = output.ssd_stats.records
    assert len(records) > 5 and {record.mode for record in records} == {AHEAD} and output.ssd_stats.hit_rate > 0
    of_whole_rounds = rounds[2:-1]  # between the first outcome, of the prefill, and the last
    assert len(of_whole_rounds) > 3 and max(map(Counter.total, of_whole_rounds)) <= MOST, dict(of_whole_rounds[-1])


def test_few_functions_lie_between_an_outcome_and_the_answer_of_a_draft_that_has_prepared_it(
    target, draft, monkeypatch
):
    """Reading and writing the message are not counted."""
    answers, before = [], sys.getprofile()
    handle, send = DraftServer.handle, PackingChannel.send

    def count(frame, event, _):
        code, place = frame.f_code, Path(frame.f_code.co_filename)
        if event == "call" and place.is_relative_to(PACKAGE) and place.stem != "wire" and code.co_name[0] != "<":
            answers[-1].add(f"{place.stem}.{code.co_name}")

    def handles(server, message):
        if message.kind == Kind.OUTCOME:
            answers.append(set())
            sys.setprofile(count)
        handle(server, message)

    def sends(channel, message):
        if message.kind == Kind.SPECULATION:
            sys.setprofile(before)
        send(channel, message)

    monkeypatch.setattr(DraftServer, "handle", handles)
    monkeypatch.setattr(PackingChannel, "send", sends)
    stats = generate(target, assistant_of(draft, contextlib.nullcontext)).ssd_stats
    hits = [seen for seen, (hit,) in zip(answers, stats.column("hits")) if hit]
    assert len(hits) > 5 and max(map(len, hits[1:])) <= MOST_OF_AN_ANSWER, hits[-1]
