"""Fallbacks against slow references, exact enumeration and chi-square; and objects that misbehave."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers.generation import CandidateGenerator, PromptLookupCandidateGenerator

from hf_ssd.drafting.ngrams import NgramIndex
from hf_ssd.generation.proposers.base import Texts, joined, point_masses
from hf_ssd.generation.proposers.custom import CustomFallback, is_proposer
from hf_ssd.generation.proposers.ngrams import NGramFallback
from hf_ssd.generation.proposers.random_tokens import RandomFallback
from hf_ssd.rounds import Speculation

VOCAB, CPU = 6, torch.device("cpu")

# ---------------------------------------------------------------- n-grams


@st.composite
def requests(draw):
    """Rows of different lengths over few tokens, and rows that miss, round by round."""
    vocab, lookahead = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    capacity, rounds = max(lengths) + 12, []
    ids = draw(st.lists(st.integers(0, vocab - 1), min_size=len(lengths) * capacity, max_size=len(lengths) * capacity))
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
        rounds.append((list(lengths), rows))
        lengths = [length + draw(st.integers(1, 4)) for length in lengths]
    return torch.tensor(ids).view(len(lengths), capacity), rounds, lookahead


def check_ngram(make, phases=tuple(Phase)):
    @settings(max_examples=300, derandomize=True, database=None, phases=phases)
    @given(requests())
    def check(request):
        ids, rounds, lookahead = request
        fallback, before, texts = make(), ids.clone(), {}
        for lengths, rows in rounds:
            found = fallback.propose(ids, lengths, rows, lookahead)
            for row, tokens in zip(rows, found.tokens, strict=True):
                text = texts.setdefault(row, NgramIndex([]))
                text.extend(ids[row, len(text.tokens) : lengths[row]].tolist())
                assert tokens == text.propose(lookahead, 1)
            assert found.probabilities is None and torch.equal(ids, before)

    check()


def test_ngrams_are_those_of_the_known_tokens_of_each_row():
    check_ngram(NGramFallback)


@pytest.mark.parametrize(
    "change",
    [
        lambda ids, lengths, rows: (ids, [n + 1 for n in lengths], rows),  # reads on behind the known tokens
        lambda ids, lengths, rows: (ids, lengths, rows[::-1]),  # takes a row for another
        lambda ids, lengths, rows: (ids[:, 1:], [n - 1 for n in lengths], rows),  # forgets the first token
    ],
    ids=["unknown", "other rows", "shifted"],
)
def test_ngram_mistakes_are_noticed(change):
    class Mistaken(NGramFallback):
        def propose(self, ids, lengths, rows, lookahead):
            return super().propose(*change(ids, lengths, rows), lookahead)

    with pytest.raises(AssertionError):
        check_ngram(Mistaken, phases=[Phase.generate])


def test_ngram_by_hand():
    rows = ([1, 2, 3, 9, 4, 2, 3, 5, 6, 1, 2, 3], [1, 2, 3], [7, 5, 7, 7, 8, 7, 7])
    lengths = [len(row) for row in rows]
    ids = torch.tensor([row + [2] * (14 - len(row)) for row in rows])
    assert NGramFallback().propose(ids, lengths, [2, 0, 1], 4).tokens == [[8, 7, 7, 8], [9, 4, 2, 3], []]


# ---------------------------------------------------------------- random


def random_tokens(fallback, starts, rows=4, lookahead=3):
    """Proposals behind these starts of a text that counts up to the vocabulary again and again, `(starts, rows, n)`."""
    ids = torch.arange(max(starts) + rows).repeat(rows, 1) % fallback.vocab_size
    asked = [fallback.propose(ids, [start] * rows, list(range(rows)), lookahead) for start in starts]
    return torch.tensor([proposal.tokens for proposal in asked])


def whole_texts(vocab_size, count=2000):
    """Starts behind which each token has the same share of the text."""
    return range(vocab_size, vocab_size * (count + 1), vocab_size)


def uniform_p_values(tokens, vocab_size):
    """Whether tokens are uniform, and independent of the ones at the next place, row and position."""
    found = [stats.chisquare(torch.bincount(tokens.flatten(), minlength=vocab_size)).pvalue]
    for dim in range(3):
        count = tokens.shape[dim] - 1
        pairs = tokens.narrow(dim, 0, count) * vocab_size + tokens.narrow(dim, 1, count)
        found.append(stats.chisquare(torch.bincount(pairs.flatten(), minlength=vocab_size**2)).pvalue)
    return found


@pytest.mark.parametrize("vocab_size", [2, 7, pytest.param(64, marks=pytest.mark.slow)])
def test_random_tokens_are_uniform_and_independent(vocab_size):
    tokens = random_tokens(RandomFallback(vocab_size, 5), whole_texts(vocab_size))
    assert min(uniform_p_values(tokens, vocab_size)) > 1e-3


class NotTheLast(RandomFallback):
    def propose(self, *request):
        tokens = torch.tensor(super().propose(*request).tokens)
        return Speculation((tokens * (self.vocab_size - 1) // self.vocab_size).tolist())


class FirstBytes(RandomFallback):
    def propose(self, ids, lengths, *request):
        return super().propose(ids, [min(length, 256) for length in lengths], *request)


class SameForEachRow(RandomFallback):
    def propose(self, ids, lengths, rows, lookahead):
        return super().propose(ids, lengths, [0] * len(rows), lookahead)


class RowAndPositionAdded(RandomFallback):
    """Neighbouring places share their numbers."""

    def propose(self, ids, lengths, rows, lookahead):
        tokens = [super(RowAndPositionAdded, self).propose(ids, [lengths[r] + r], [0], lookahead).tokens for r in rows]
        return Speculation([of_row for (of_row,) in tokens])


@pytest.mark.parametrize("mutant", [NotTheLast, FirstBytes, SameForEachRow])
def test_random_mistakes_are_noticed(mutant):
    assert min(uniform_p_values(random_tokens(mutant(25, 5), whole_texts(25)), 25)) < 1e-3


def check_all_places_differ(fallback):
    tokens = random_tokens(fallback, range(1000, 1300), rows=8, lookahead=8).flatten(0, 1)
    assert len(tokens.unique(dim=0)) == len(tokens)


def test_no_two_places_share_numbers():
    check_all_places_differ(RandomFallback(1000, 5))
    with pytest.raises(AssertionError):
        check_all_places_differ(RowAndPositionAdded(1000, 5))


def check_shares(fallback):
    """Each token is drawn from what the proposal says, which is its share of the text, whatever stands behind that."""
    ids = torch.tensor([[3, 5, 3, 3, 9, 9], [7, 8, 8, 2, 2, 2]])
    lengths, drawn = [4, 3], torch.zeros(2, 11)
    for _ in range(3000):
        fallback.seed += 1
        proposal = fallback.propose(ids, lengths, [1, 0], 2)
        drawn += torch.nn.functional.one_hot(torch.tensor(proposal.tokens), 11).sum(1)
    expected = torch.zeros(2, 11)
    expected[0, [7, 8]] = torch.tensor([1 / 3, 2 / 3])
    expected[1, [3, 5]] = torch.tensor([3 / 4, 1 / 4])
    torch.testing.assert_close(proposal.probabilities, expected[:, None].expand(-1, 2, -1))
    for row in range(2):
        possible = expected[row] > 0
        assert not drawn[row, ~possible].any()
        assert stats.chisquare(drawn[row, possible], 6000 * expected[row, possible]).pvalue > 1e-3


class EachTokenAlike(RandomFallback):
    def propose(self, ids, lengths, rows, lookahead):
        distinct = [ids[row, : lengths[row]].unique() for row in rows]
        one = super().propose(torch.stack([d.repeat(3)[:6] for d in distinct]), [2, 2], [0, 1], lookahead)
        return Speculation(one.tokens, super().propose(ids, lengths, rows, lookahead).probabilities)


def test_random_tokens_are_those_of_the_text_with_the_shares_they_have_there():
    check_shares(RandomFallback(11, 5))
    with pytest.raises(AssertionError):
        check_shares(EachTokenAlike(11, 5))


def test_random_depends_on_text_seed_and_row_alone():
    ids, lengths = torch.randint(97, (4, 30)), [5, 9, 30, 9]
    fallback = RandomFallback(97, 2**31 - 1)
    first = fallback.propose(ids, lengths, [0, 1, 3], 5)
    changed = torch.where(torch.arange(30) < torch.tensor(lengths)[:, None], ids, 0)  # what is behind it is no text
    again = fallback.propose(changed, [1, 9, 1, 9], [3, 1], 5)
    assert again.tokens == [first.tokens[2], first.tokens[1]]
    assert fallback.propose(ids, lengths, [3], 2).tokens == [first.tokens[2][:2]]
    assert [len(tokens) for tokens in first.tokens] == [5, 5, 5]
    assert len(set(map(tuple, first.tokens))) == 3
    assert RandomFallback(97, 0).propose(ids, lengths, [0, 1, 3], 5).tokens != first.tokens
    assert first.probabilities.shape == (3, 5, 97) and first.probabilities.dtype == torch.float32


# ---------------------------------------------------------------- the user's own


class Scripted:
    """Answers row after row what it was told to."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def propose(self, input_ids, lookahead):
        self.asked.append((input_ids.tolist(), lookahead))
        input_ids.fill_(0)
        return self.answers.pop(0)


class ScriptedCandidates(CandidateGenerator):
    def __init__(self, candidates, logits=None):
        self.answer = candidates, logits

    def get_candidates(self, input_ids):
        return self.answer


IDS = torch.tensor([[1, 2, 3, 4], [5, 4, 0, 0], [1, 1, 1, 0]])
LENGTHS = [4, 2, 3]


def ask(proposer, rows=(0,), lookahead=3):
    return CustomFallback(proposer, VOCAB).propose(IDS, LENGTHS, list(rows), lookahead)


@pytest.mark.parametrize("lead", [(), (1,)], ids=["flat", "batched"])
def test_custom_rows_of_both_kinds(lead):
    q = torch.rand(2, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = torch.tensor([3, 5], dtype=torch.int32)
    proposer = Scripted((tokens.view(*lead, 2), q.view(*lead, 2, VOCAB)), (torch.tensor([4]).view(*lead, 1), None))
    before = IDS.clone()
    proposal = ask(proposer, rows=[2, 1])
    assert proposer.asked == [([[1, 1, 1]], 3), ([[5, 4]], 3)] and torch.equal(IDS, before)
    assert proposal.tokens == [[3, 5], [4]]
    assert proposal.probabilities.dtype == torch.float32
    certain = torch.eye(VOCAB)
    torch.testing.assert_close(proposal.probabilities[0], torch.cat([q.float(), certain[:1]]))
    assert torch.equal(proposal.probabilities[1], certain[[4, 0, 0]])


def test_custom_proposals_are_cut_and_may_be_empty():
    q = torch.full((5, VOCAB), 1 / VOCAB)
    proposal = ask(Scripted((torch.arange(5), q), (torch.zeros(1, 0), None)), rows=[0, 1])
    assert proposal.tokens == [[0, 1, 2], []]
    proposal = ask(Scripted((torch.tensor([]), q[None, :0]), (torch.tensor([4]), None)), rows=[0, 1])
    assert proposal.tokens == [[], [4]] and proposal.probabilities is None
    assert ask(Scripted(), rows=[]).tokens == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_custom_probabilities_are_normalized_in_float32(dtype):
    q = torch.tensor([[0.1001, 0.2, 0.2, 0.2, 0.2, 0.1]], dtype=dtype)
    expected = q[0].double() / q.double().sum()
    assert (expected - q[0]).abs().max() > 1e-5
    found = ask(Scripted((torch.tensor([0]), q))).probabilities[0, 0]
    torch.testing.assert_close(found, expected.float(), atol=1e-7, rtol=0)


@pytest.mark.parametrize("rows", [[0], [2, 0, 1]])
def test_custom_prompt_lookup(rows):
    proposer = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([5]), num_output_tokens=4, max_matching_ngram_size=2, max_length=100
    )
    ids = torch.tensor([[1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 0, 0], [3, 5, 1, 3, 0, 0]])
    proposal = CustomFallback(proposer, VOCAB).propose(ids, [6, 4, 4], rows, 3)
    # A match, no match (it returns its input), and a match that is followed by the end-of-sequence token.
    assert proposal.tokens == [{0: [3, 4, 1], 1: [], 2: []}[row] for row in rows]
    assert proposal.probabilities is None


def test_custom_prompt_lookup_looks_as_far_as_its_max_length():
    """transformers takes `max_length`, 20 by default, for the last position that it may copy from."""
    ids = torch.tensor([[*range(30), 25, 26]])
    generators = {length: PromptLookupCandidateGenerator(max_length=length) for length in (20, 28, 33, 100)}
    proposals = {length: CustomFallback(g, 30).propose(ids, [32], [0], 4) for length, g in generators.items()}
    counts = {length: len(proposal.tokens[0]) for length, proposal in proposals.items()}
    assert counts == {20: 0, 28: 1, 33: 0, 100: 4}  # 33 leaves room for the bonus token alone


def test_custom_candidate_logits_become_probabilities():
    logits = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(0))
    proposal = ask(ScriptedCandidates(torch.tensor([[1, 2, 3, 4, 5, 0]]), logits), lookahead=2)
    assert proposal.tokens == [[5, 0]]
    torch.testing.assert_close(proposal.probabilities, logits.softmax(-1))


TWO = torch.tensor([1, 2])
SURE = torch.eye(VOCAB)[TWO]


@pytest.mark.parametrize(
    "answer, error, message",
    [
        (TWO, TypeError, "two things"),
        ((TWO,), TypeError, "two things"),
        (([1, 2], None), TypeError, "two things"),
        ((TWO, [0.5, 0.5]), TypeError, "two things"),
        ((TWO.float(), None), TypeError, "torch.float32, not integers"),
        ((TWO.bool(), None), TypeError, "torch.bool, not integers"),
        ((TWO[:, None], None), ValueError, r"shape \(2, 1\), not \(n,\)"),
        ((torch.tensor(1), None), ValueError, r"shape \(\), not \(n,\)"),
        ((torch.ones(2, 2).long(), None), ValueError, r"shape \(2, 2\), not \(n,\)"),
        ((torch.tensor([1, VOCAB]), None), ValueError, "outside the vocabulary of 6"),
        ((torch.tensor([-1, 2]), None), ValueError, "outside the vocabulary of 6"),
        ((TWO, SURE[:1]), ValueError, r"shape \(1, 6\), not \(2, 6\) or \(1, 2, 6\)"),
        ((TWO, SURE[:, :-1]), ValueError, r"shape \(2, 5\), not"),
        ((TWO, SURE[None, None]), ValueError, r"shape \(1, 1, 2, 6\), not"),
        ((TWO, SURE + torch.tensor([-0.1, 0, 0, 0, 0, 0.1])), ValueError, "negative or not finite"),
        ((TWO, SURE * torch.nan), ValueError, "negative or not finite"),
        ((TWO, SURE * torch.inf), ValueError, "negative or not finite"),
        ((TWO, SURE * 0.998), ValueError, "do not sum to 1"),
        ((TWO, SURE * 0), ValueError, "do not sum to 1"),
        ((TWO.flip(0), SURE), ValueError, "has probability 0"),
    ],
)
def test_custom_answers_that_cannot_be(answer, error, message):
    with pytest.raises(error, match=f"The fallback Scripted .*{message}"):
        ask(Scripted(answer))


@pytest.mark.parametrize(
    "candidates", [torch.tensor([[1, 2, 0, 4, 5]]), torch.tensor([[5]]), torch.tensor([1, 2, 3, 4])]
)
def test_candidates_that_do_not_begin_with_the_input(candidates):
    with pytest.raises(ValueError, match="ScriptedCandidates .*do not begin with the given `input_ids`"):
        ask(ScriptedCandidates(candidates))


def test_candidate_logits_of_another_shape():
    with pytest.raises(ValueError, match=r"ScriptedCandidates .*shape \(1, 1, 6\), not \(2, 6\)"):
        ask(ScriptedCandidates(torch.tensor([[1, 2, 3, 4, 5, 0]]), torch.zeros(1, 1, VOCAB)))


class NeedsTheTarget(ScriptedCandidates):
    requires_model_outputs = True


class WrongArguments:
    def propose(self, input_ids):
        return input_ids, None


def test_is_proposer():
    assert is_proposer(Scripted()) and is_proposer(PromptLookupCandidateGenerator())
    unfit = [
        "ngram",
        None,
        3,
        torch.nn.Linear(1, 1),
        Scripted,
        CandidateGenerator,
        WrongArguments(),
        NeedsTheTarget(None),
        NGramFallback(),
    ]
    assert not any(is_proposer(value) for value in unfit)
    with pytest.raises(TypeError, match="`fallback` is a WrongArguments, which cannot propose tokens"):
        CustomFallback(WrongArguments(), VOCAB)


# ---------------------------------------------------------------- beside what was drafted


def test_texts_are_those_of_all_rounds():
    texts, expected = Texts([[1, 2, 3], [4]]), [[1, 2, 3], [4]]
    for turn in range(40):
        new = [[turn] * (turn % 5), [] if turn > 20 else [turn, 7]]
        expected = [of_row + more for of_row, more in zip(expected, new)]
        texts.read(expected)
    assert [ids[:length].tolist() for ids, length in zip(texts.ids, texts.lengths)] == expected


def test_each_row_has_the_distributions_that_its_tokens_were_drawn_from():
    """A row of the draft, a shorter one, one that missed, an n-gram, and a finished one, whose q is anything."""
    tokens = [[1, 2, 3], [3, 0, 0], [4, 5, 0], [5, 5, 5], [0, 0, 0]]
    q = torch.rand(5, 3, VOCAB, generator=torch.Generator().manual_seed(0)).softmax(-1)
    q[2:], certain = torch.nan, torch.eye(VOCAB)
    theirs = torch.full((1, 2, VOCAB), 1 / VOCAB)
    found = joined(tokens, VOCAB, CPU, [3, 1, 0, 0, 0], q, [2], Speculation([[4, 5]], theirs))
    assert torch.equal(found[0], q[0]) and torch.equal(found[1, :1], q[1, :1])
    assert torch.equal(found[1, 1:], certain[[0, 0]])
    assert torch.equal(found[2], torch.cat([theirs[0], certain[:1]]))
    assert torch.equal(found[3], certain[[5, 5, 5]]) and torch.equal(found[4], certain[[0, 0, 0]])
    assert torch.equal(
        joined(tokens, VOCAB, CPU, [0] * 5, None, [2], Speculation([[4, 5]])), certain[torch.tensor(tokens)]
    )


# ---------------------------------------------------------------- what all share


def test_point_masses():
    tokens = torch.tensor([[2, 0], [1, 5]])
    dense = point_masses(tokens, VOCAB)
    assert dense.dtype == torch.float32 and torch.equal(dense, torch.eye(VOCAB)[tokens])
