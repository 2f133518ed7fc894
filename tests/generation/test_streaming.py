"""Streaming every row of a batch."""

import pytest
import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_ssd
from hf_ssd.generation.sequences import Sequences

from ..helpers.comparing import generate
from ..helpers.tiny import padded_batch, tiny_draft

CONFIG = hf_ssd.SSDConfig(lookahead=3, budget=8, asynchronous=False)


def streamed(target, rows, **options):
    """Returns what each row was streamed, how often, and the output."""
    parts, ended = [[] for _ in range(rows)], []
    streamer = hf_ssd.BatchStreamer(lambda row, tokens: parts[row].append(tokens), lambda: ended.append(True))
    output = target.generate(**padded_batch(rows), max_new_tokens=25, do_sample=False, streamer=streamer, **options)
    assert ended == [True]
    return [torch.cat(part).tolist() for part in parts], [len(part) for part in parts], output


@pytest.mark.parametrize("has_end", [False, True])
def test_each_row_is_streamed_as_it_grows_and_to_its_end_without_padding(target, has_end):
    end = int(target.generate(**padded_batch(3), max_new_tokens=25, do_sample=False)[1, 14])
    ends = {"eos_token_id": end, "pad_token_id": 0} if has_end else {}
    rows_streamed, calls, output = streamed(target, 3, assistant_model=tiny_draft(), ssd_config=CONFIG, **ends)
    for row, tokens in zip(output[:, 9:].tolist(), rows_streamed):
        assert tokens == row[: row.index(end) + 1 if has_end and end in row else len(row)]
    assert (len({len(tokens) for tokens in rows_streamed}) > 1) == has_end
    assert all(1 < count < 25 for count in calls)  # some tokens at a time
    if not has_end:  # plain generate() streams the same
        assert streamed(target, 3)[:2] == (rows_streamed, [25] * 3)


class Columns(BaseStreamer):
    """
    A streamer of a user's own, as plain generate() feeds it: the prompts, then a token of each row at a time. It works
    on the tokens that it is given.
    """

    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())
        if value.dim() == 1:
            value.fill_(3)

    def end(self):
        self.seen.append("end")


class Alike(StoppingCriteria):
    """Compares rows: all of them stop where any two end alike."""

    def __call__(self, input_ids, scores, **kwargs):
        last = input_ids[:, -1].tolist()
        return torch.full((len(last),), len(set(last)) < len(last))


@pytest.mark.parametrize("rows, stopping", [(1, "length"), (3, "length"), (3, "eos"), (3, "criterion")])
def test_a_streamer_of_ones_own_gets_what_plain_generate_gives_it(target, rows, stopping):
    options = {"max_new_tokens": 25, "do_sample": False, "pad_token_id": 0}
    if stopping == "eos":
        options["eos_token_id"] = int(target.generate(**padded_batch(3), **options)[1, 14])
    if stopping == "criterion":
        options["stopping_criteria"] = [Alike()]
    seen, texts = [], []
    for ssd in ({}, {"assistant_model": tiny_draft(), "ssd_config": CONFIG}):
        streamer = Columns()
        texts.append(target.generate(**padded_batch(rows), **options, **ssd, streamer=streamer))
        seen.append(streamer.seen)
    assert seen[0] == seen[1] and len(seen[0]) > 3 and torch.equal(*texts)


def test_tokens_that_come_too_early_are_noticed(target, monkeypatch):
    """The mutant for the test above: as far as the longest row has come."""
    monkeypatch.setattr(Sequences, "settled_columns", property(lambda self: max(self.lengths)))
    with pytest.raises(AssertionError):
        test_a_streamer_of_ones_own_gets_what_plain_generate_gives_it(target, 3, "length")


def test_rows_are_streamed_no_further_than_a_criterion_that_compares_them_lets_them_go(target, monkeypatch):
    options = {"stopping_criteria": [Alike()], "assistant_model": tiny_draft(), "ssd_config": CONFIG}
    rows_streamed, _, output = streamed(target, 3, **options)
    assert rows_streamed == output[:, 9:].tolist() and output.shape[1] < 9 + 25
    monkeypatch.setattr(Sequences, "settled", lambda self, row: self.kept(row))  # the mutant: everything at once
    rows_streamed, _, output = streamed(target, 3, **options)
    assert rows_streamed != output[:, 9:].tolist()


def test_rounds_are_told_with_their_tokens(target):
    columns, told = Columns(), []
    streamer = hf_ssd.RoundStreamer(lambda stats: told.append((stats.rounds, len(columns.seen) - 1)), columns)
    output = generate(target, tiny_draft(), padded_batch(1), {"lookahead": 3}, max_new_tokens=25, streamer=streamer)
    *seen, end = columns.seen
    assert seen[0] == padded_batch(1)["input_ids"].tolist() and end == "end"
    assert sum(seen[1:], []) == output.sequences[0, 9:].tolist()
    records = output.ssd_stats.records
    assert [rounds for rounds, _ in told] == list(range(len(records) + 1))
    counts = [tokens for _, tokens in told]
    assert counts[0] == 1 and counts[-1] == 25  # the prefill gives one
    gained = [after - before for before, after in zip(counts, counts[1:])]
    assert gained[:-1] == [record.accepted[0] + 1 for record in records[:-1]]


def test_plain_generation_tells_of_no_rounds(target):
    columns, told = Columns(), []
    target.generate(**padded_batch(1), max_new_tokens=5, streamer=hf_ssd.RoundStreamer(told.append, columns))
    target.generate(**padded_batch(1), max_new_tokens=5, streamer=hf_ssd.RoundStreamer(told.append))
    assert not told and len(columns.seen) == 7 and columns.seen[-1] == "end"
