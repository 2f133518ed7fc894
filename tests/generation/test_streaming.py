"""Streaming every row of a batch."""

import pytest
import torch

import hf_ssd

from ..conftest import padded_batch, tiny_draft

CONFIG = hf_ssd.SSDConfig(lookahead=3, budget=8, asynchronous=False)


def streamed(target, rows, **options):
    """Returns what each row was streamed, how often, and the output."""
    parts, ended = [[] for _ in range(rows)], []
    streamer = hf_ssd.BatchStreamer(lambda row, tokens: parts[row].append(tokens), lambda: ended.append(True))
    output = target.generate(**padded_batch(rows), max_new_tokens=25, do_sample=False, streamer=streamer, **options)
    assert ended == [True]
    return [torch.cat(part).tolist() for part in parts], [len(part) for part in parts], output


@pytest.mark.parametrize("rows", [1, 3])
def test_each_row_is_streamed_as_it_grows(target, rows):
    rows_streamed, calls, output = streamed(target, rows, assistant_model=tiny_draft(), ssd_config=CONFIG)
    assert rows_streamed == output[:, 9:].tolist()
    assert all(1 < count < 25 for count in calls)  # some tokens at a time


def test_rows_end_with_their_text(target):
    plain = target.generate(**padded_batch(3), max_new_tokens=25, do_sample=False)
    end = int(plain[1, 14])
    ends = {"eos_token_id": end, "pad_token_id": 0}
    rows_streamed, _, output = streamed(target, 3, assistant_model=tiny_draft(), ssd_config=CONFIG, **ends)
    for row, tokens in zip(output[:, 9:].tolist(), rows_streamed):
        length = row.index(end) + 1 if end in row else len(row)
        assert tokens == row[:length]  # and no padding
    assert len({len(tokens) for tokens in rows_streamed}) > 1


def test_plain_generate_streams_the_same(target):
    rows_streamed, calls, output = streamed(target, 3)
    assert rows_streamed == output[:, 9:].tolist() and calls == [25] * 3
