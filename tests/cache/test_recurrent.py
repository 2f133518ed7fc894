"""Rows that verify, reject, feed again and commit: their logits and states are those of a fresh forward pass."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_ssd.cache import recurrent
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.recurrent import RecurrentLayer, RecurrentModel, cached_model, ragged_copy

from ..helpers.families import sharp_model, tiny_config
from ..helpers.tiny import VOCAB, padded_batch

KINDS = {"gated delta rule": "qwen3_next", "Mamba-2": "bamba", "convolution": "lfm2", "both in one layer": "falcon_h1"}
ROWS, WORTH_A_PASS = 3, 6
EXACT = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    model = sharp_model(tiny_config(KINDS[request.param]))
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(0.3)  # logits below 1, whose rounding stays below 1e-5
    return model


@pytest.fixture(autouse=True)
def short_refeeds(monkeypatch):
    monkeypatch.setattr(recurrent, "WORTH_A_PASS", WORTH_A_PASS)


def prefilled(model, inputs):
    """The model behind prompts that are padded on the left, as the loop reads them."""
    mask = inputs["attention_mask"]
    cache = ragged_copy(DynamicCache(config=model.config))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(**inputs, position_ids=positions, **{CACHE: cache}, use_cache=True)
    last = mask.shape[1] - 1
    first = [int(position) - last for position in positions[:, -1]]
    return cached_model(model, cache, valid=mask.bool(), first_positions=first)


def follow(model, rounds, seed=0):
    """
    Plays rounds, each with as many new tokens for all rows, how many of them each row keeps, and whether a row ends.
    Returns how many checkpoints moved without a pass of their own, and how many passes only moved checkpoints.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = padded_batch(ROWS)
    texts = [row[kept.bool()] for row, kept in zip(inputs["input_ids"], inputs["attention_mask"])]
    before = [inputs["input_ids"].shape[1] - len(text) for text in texts]  # columns of padding
    decoder, finished, passes = prefilled(model, inputs), [False] * ROWS, []
    feed = RecurrentModel._feed
    decoder._feed = lambda *arguments: passes.append(1) or feed(decoder, *arguments)
    for count, kept, end in rounds:
        new = torch.randint(2, VOCAB, (ROWS, count), generator=generator)
        logits = decoder.extend(new, [len(text) + padding for text, padding in zip(texts, before)])
        for row in [row for row in range(ROWS) if not finished[row]]:
            text = torch.cat([texts[row], new[row]])
            expected = model(text[None], use_cache=False).logits[0, -count:]
            torch.testing.assert_close(logits[row], expected, **EXACT)
            texts[row] = text[: len(texts[row]) + 1 + min(kept[row], count - 1)]
        finished = [one or row == end for row, one in enumerate(finished)]
        if all(finished):
            break
        decoder.leave_out(finished)
    check_states(model, decoder, texts, before)
    return len(passes) - len(rounds)


def check_states(model, decoder, texts, before):
    """What a call returns has seen the rows and the padding behind those that ended early."""
    length = max(len(text) + padding for text, padding in zip(texts, before))
    output = torch.zeros(ROWS, length, dtype=torch.long)
    for row, (text, padding) in enumerate(zip(texts, before)):
        output[row, padding : padding + len(text)] = text
    verified = [len(text) + padding - 1 for text, padding in zip(texts, before)]
    decoder.finish(output, verified, 0)
    theirs = decoder.cache.copy_to(DynamicCache(config=model.config), length - 1)
    for row, padding in enumerate(before):
        fresh = DynamicCache(config=model.config)
        model(output[row : row + 1, padding : length - 1], **{CACHE: fresh}, use_cache=True)
        for ours, expected in zip(theirs.layers, fresh.layers):
            for name in ("conv_states", "recurrent_states"):
                for index, state in getattr(expected, name, {}).items():
                    if state is not None:
                        torch.testing.assert_close(getattr(ours, name)[index][row], state[0], **EXACT)
            if getattr(expected, "keys", None) is not None:
                torch.testing.assert_close(ours.keys[row, :, padding:], expected.keys[0], **EXACT)


COUNTS = st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS)
ROUNDS = st.lists(st.tuples(st.integers(1, 5), COUNTS, st.integers(0, 4 * ROWS)), min_size=2, max_size=7)


@settings(max_examples=12, derandomize=True)
@given(rounds=ROUNDS, seed=st.integers(0, 99))
@torch.inference_mode()
def test_logits_and_states_equal_fresh_forward_passes(model, rounds, seed):
    follow(model, rounds, seed)


@pytest.mark.slow
@settings(max_examples=150)
@given(rounds=ROUNDS, seed=st.integers(0, 9999))
@torch.inference_mode()
def test_logits_and_states_equal_fresh_forward_passes_at_length(model, rounds, seed):
    follow(model, rounds, seed)


def many_rounds():
    chance = random.Random(3)
    return [(chance.randint(2, 5), [chance.randint(0, 4) for _ in range(ROWS)], None) for _ in range(12)]


@torch.inference_mode()
def test_refeeds_are_shortened_by_passes_of_their_own(model):
    assert 1 <= follow(model, many_rounds()) <= 11


def without_a_copy(monkeypatch):
    def shared(self, rows):
        for (states, index), kept in zip(self.places(), self.kept):
            states[index] = kept if rows is None else kept[rows]

    monkeypatch.setattr(RecurrentLayer, "copy_checkpoint", shared)


def with_a_lost_token(monkeypatch):
    take_in = RecurrentModel._take_in

    def loses(self, rows, verified):
        take_in(self, rows, verified)
        for row in rows:
            self.checkpoints[row] += verified[row] - self.checkpoints[row] > 1

    monkeypatch.setattr(RecurrentModel, "_take_in", loses)


def with_fillers(monkeypatch):
    feed = RecurrentModel._feed

    def keeps(self, ends, *arguments):
        logits = feed(self, ends, *arguments)
        self.reached = {row: ends[row] for row in self.passed}
        return logits

    monkeypatch.setattr(RecurrentModel, "_feed", keeps)


def with_a_neighbours_state(monkeypatch):
    keep = RecurrentLayer.keep
    monkeypatch.setattr(
        RecurrentLayer, "keep", lambda self, rows, places: keep(self, rows, [(p + 1) % 3 for p in places])
    )


@pytest.mark.parametrize("mutate", [without_a_copy, with_a_lost_token, with_fillers, with_a_neighbours_state])
@torch.inference_mode()
def test_a_wrong_state_is_noticed(model, mutate, monkeypatch):
    """The mutants for the tests above."""
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        follow(model, many_rounds())


@torch.inference_mode()
def test_no_padding_of_a_prompt_enters_a_state(model):
    inputs = padded_batch(ROWS)
    decoder = prefilled(model, inputs)
    for row, kept in enumerate(inputs["attention_mask"].bool()):
        alone = DynamicCache(config=model.config)
        model(inputs["input_ids"][row : row + 1, kept], **{CACHE: alone}, use_cache=True)
        expected = [layer for layer in ragged_copy(alone).layers if isinstance(layer, RecurrentLayer)]
        for ours, theirs in zip(decoder.cache.recurrent, expected):
            theirs.keep_all()
            for one, other in zip(ours.kept, theirs.kept):
                torch.testing.assert_close(one[row], other[0], **EXACT)


@torch.inference_mode()
def test_a_rejected_token_whose_values_are_not_finite_leaves_no_trace(model, monkeypatch):
    """A row that is fed fewer tokens than others is not fed this token in their place."""
    monkeypatch.setattr(recurrent, "WORTH_A_PASS", 1000)
    poison = VOCAB - 1
    inputs, embeddings = padded_batch(ROWS), model.get_input_embeddings().weight
    before, length = embeddings[poison].clone(), inputs["input_ids"].shape[1]
    try:
        embeddings[poison] = torch.nan
        decoder = prefilled(model, inputs)
        decoder.extend(torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]]), [length] * ROWS)
        decoder.extend(torch.tensor([[8, 9, 10, 11], [6, 7, 8, 9], [6, 7, 8, poison]]), [length + 2] * ROWS)
        decoder.cache.clear_behind([2], [length + 2] * ROWS)
        logits = decoder.extend(torch.tensor([[12], [8], [6]]), [length + 5, length + 3, length + 2])
    finally:
        embeddings[poison] = before
    text = torch.cat([inputs["input_ids"][2][inputs["attention_mask"][2].bool()], torch.tensor([5, 6, 6])])
    torch.testing.assert_close(logits[2, 0], model(text[None], use_cache=False).logits[0, -1], **EXACT)
