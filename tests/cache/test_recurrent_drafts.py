"""Hybrid drafts: whatever is verified, rejected, adopted and fed again, logits are those of a fresh forward pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ssd.cache.recurrent_draft import RecurrentBranches, RecurrentDraft
from hf_ssd.drafting.recurrent_prefix import RecurrentPrefix

from ..helpers.tiny import VOCAB, padded_batch
from .test_recurrent import EXACT, ROWS, model  # noqa: F401

BRANCHES = 3


def check(model, logits, texts):  # noqa: F811
    """Compares logits `(n, vocab_size)` with those after the last n tokens of a text."""
    for of_row, text in zip(logits, texts):
        expected = model(torch.tensor([text]), use_cache=False).logits[0, -len(of_row) :]
        torch.testing.assert_close(of_row, expected, **EXACT)


def follow(model, rounds, seed=0):  # noqa: F811
    """
    Plays rounds with a lookahead, a depth to which branches grow, how each row ends (the accepted count, and a branch,
    if that was prepared), tokens that are verified without the draft, and a row that ends.
    """
    generator = torch.Generator().manual_seed(seed)

    def new(*shape):
        return torch.randint(2, VOCAB, shape, generator=generator)

    inputs = padded_batch(ROWS)
    prompts = [row[kept.bool()] for row, kept in zip(inputs["input_ids"], inputs["attention_mask"])]
    texts, prefix, finished = [prompt.tolist() for prompt in prompts], RecurrentPrefix(model, prompts, None), []
    check(model, prefix.feed(0, wanted=1), texts)
    prepared, known = [[]] * ROWS, 1  # tokens that each row has from its branch, and logits after them
    for lookahead, depth, ends, later, end in rounds:
        live = prefix.rows
        # 1. Feed a speculation.
        lookahead = max(lookahead, known, *map(len, prepared))
        speculation = new(ROWS, lookahead)
        for row, tokens in enumerate(prepared):
            speculation[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        prefix.write(speculation)
        logits = prefix.feed(lookahead, wanted=lookahead + 1 - known)
        check(model, logits[live], [texts[row] + speculation[row].tolist() for row in live])

        # 2. Grow branches.
        forks = torch.randint(0, lookahead + 1, (ROWS, BRANCHES), generator=generator)
        branches, tokens = prefix.branches(forks, lookahead, depth), new(ROWS, BRANCHES, depth + 1)
        logits = torch.stack([branches.grow(tokens[:, :, step]) for step in range(depth)], dim=2)
        for row in live:
            taken = [speculation[row, :fork].tolist() for fork in forks[row].tolist()]
            check(model, logits[row], [texts[row] + of + tokens[row, i, :depth].tolist() for i, of in enumerate(taken)])

        # 3. Take in an outcome.
        finished = [row not in live or row == end for row in range(ROWS)]
        if all(finished):
            return
        chosen = [-1 if finished[row] or later else branch for row, (_, branch) in enumerate(ends)]
        accepted = [
            int(forks[row, one]) if one >= 0 else min(ends[row][0], lookahead) for row, one in enumerate(chosen)
        ]
        bonus = [int(tokens[row, one, 0]) if one >= 0 else 5 for row, one in enumerate(chosen)]
        for row in range(ROWS):
            if not finished[row]:
                texts[row] = texts[row] + speculation[row, : accepted[row]].tolist() + [bonus[row]]
        accepted = [-1 if finished[row] else count for row, count in enumerate(accepted)]
        prefix.decoder.leave_out(finished)
        prefix.grow(accepted, bonus)
        if later:
            gained = [[] if finished[row] else new(1 + (row + later) % 3).tolist() for row in range(ROWS)]
            prefix.append(gained)
            texts = [text + more for text, more in zip(texts, gained)]
        logits = prefix.adopt(branches, chosen)
        prepared = [tokens[row, one, 1:depth].tolist() if one >= 0 else [] for row, one in enumerate(chosen)]
        known = 0 if logits is None else depth
        if logits is not None:
            check(model, logits[prefix.rows], [texts[row] + prepared[row] for row in prefix.rows])


END = st.tuples(st.integers(0, 4), st.integers(-1, BRANCHES - 1))
ENDS = st.lists(END, min_size=ROWS, max_size=ROWS) | st.lists(
    st.tuples(st.just(0), st.integers(0, BRANCHES - 1)), min_size=ROWS, max_size=ROWS
)
ROUND = st.tuples(
    st.integers(1, 4), st.integers(1, 3), ENDS, st.sampled_from([0, 0, 0, 1, 2]), st.integers(0, 4 * ROWS)
)
ROUNDS = st.lists(ROUND, min_size=1, max_size=4)
HITS, MISSES = [(0, 1), (0, 2), (0, 0)], [(2, -1), (0, -1), (4, -1)]
LONG = [(3, 2, HITS, 0, None), (2, 3, MISSES, 0, None), (4, 2, HITS, 0, None), (3, 1, MISSES, 2, None)]
LONG += [(2, 2, HITS, 0, 1), (3, 3, [(3, -1), (0, 0), (1, 1)], 0, None), (4, 2, HITS, 0, None)]


@torch.inference_mode()
def test_hits_misses_and_plain_rounds_give_the_logits_of_fresh_forward_passes(model):  # noqa: F811
    follow(model, LONG)


@pytest.mark.slow
@settings(max_examples=25)
@given(rounds=ROUNDS, seed=st.integers(0, 9999))
@torch.inference_mode()
def test_any_rounds_give_the_logits_of_fresh_forward_passes(model, rounds, seed):  # noqa: F811
    follow(model, rounds, seed)


@torch.inference_mode()
def test_a_call_that_continues_the_text_of_the_last_one_starts_from_its_states(model):  # noqa: F811
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(2, VOCAB, (length,), generator=generator) for length in (70, 75)]
    more = torch.randint(2, VOCAB, (2, 9), generator=generator)
    earlier = RecurrentPrefix(model, texts, None)
    earlier.feed(0, wanted=1)
    earlier.write(more[:, :3])
    earlier.feed(3, wanted=1)
    earlier.decoder.leave_out([False, True])
    earlier.grow([2, -1], [int(more[0, 2]), 0])
    longer = [torch.cat([text, new]) for text, new in zip(texts, more)]
    prefix = RecurrentPrefix(model, longer, None, earlier)
    assert prefix.fed == [72, 75]
    check(model, prefix.feed(0, wanted=1), [text.tolist() for text in longer])
    other = RecurrentPrefix(model, [text.flip(0) for text in longer], None, prefix)
    assert other.fed == [0, 0]
    check(model, other.feed(0, wanted=1), [text.flip(0).tolist() for text in longer])


def without_a_copy(monkeypatch):
    start_from = RecurrentDraft.start_from

    def shares(self, sources):
        states = (sources[0] or (None, 0))[0]
        if states is not None and sources == [(states, row) for row in range(len(states[0]))]:
            self.cache.set_states(states)
        else:
            start_from(self, sources)

    monkeypatch.setattr(RecurrentDraft, "start_from", shares)


def with_a_lost_token(monkeypatch):
    step = RecurrentDraft._step

    def loses(self, inputs, at, count, moved):
        if count > 1 and min(at.values()):
            for row in moved:
                self.states[row][at[row] + 1] = self.states[row][at[row]]
                at[row] += 1
            count -= 1
        return step(self, inputs, at, count, moved)

    monkeypatch.setattr(RecurrentDraft, "_step", loses)


def with_fillers(monkeypatch):
    step = RecurrentDraft._step

    def keeps(self, inputs, at, count, moved):
        logits = step(self, inputs, at, count, moved)
        for place, row in enumerate(at):
            if row not in moved:
                self.states[row][at[row]] = self.cache.current_states(), place
        return logits

    monkeypatch.setattr(RecurrentDraft, "_step", keeps)


def with_a_neighbours_state(monkeypatch):
    made = RecurrentBranches.__init__

    def starts_elsewhere(self, *arguments):
        made(self, *arguments)
        self.current = self.current[1:] + self.current[:1]

    monkeypatch.setattr(RecurrentBranches, "__init__", starts_elsewhere)


def with_an_adopted_neighbour(monkeypatch):
    adopt = RecurrentBranches.adopt

    def adopts_elsewhere(self, chosen, forks):
        self.states = [[one.roll(1, 0) for one in states] for states in self.states]
        return adopt(self, chosen, forks)

    monkeypatch.setattr(RecurrentBranches, "adopt", adopts_elsewhere)


MUTANTS = [without_a_copy, with_a_lost_token, with_fillers, with_a_neighbours_state, with_an_adopted_neighbour]


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTANTS)
@torch.inference_mode()
def test_a_wrong_state_is_noticed(model, mutate, monkeypatch):  # noqa: F811
    """The mutants for the tests above."""
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        follow(model, LONG)
