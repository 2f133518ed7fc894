"""What fallbacks propose, by hand, by enumeration and by chi-square; and objects that misbehave."""

import pytest
import torch
from scipy import stats
from transformers.generation import CandidateGenerator, PromptLookupCandidateGenerator

from hf_ssd import SSDConfig
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.generation.proposers.base import Proposal
from hf_ssd.generation.proposers.custom import CustomFallback, check_proposer
from hf_ssd.generation.proposers.ngrams import Ngrams
from hf_ssd.generation.proposers.proposers import Proposers
from hf_ssd.generation.proposers.random_tokens import RandomFallback
from hf_ssd.noise import Noise

VOCAB, CPU = 6, torch.device("cpu")


def test_ngram_by_hand():
    rows = [[1, 2, 3, 9, 4, 2, 3, 5, 6, 1, 2, 3], [1, 2, 3], [7, 5, 7, 7, 8, 7, 7]]
    assert Ngrams().propose(rows, [2, 0, 1], 4) == [([8, 7, 7, 8], None), ([9, 4, 2, 3], None), ([], None)]


# ---------------------------------------------------------------- random


def check_shares(fallback):
    """Each token is drawn from what the proposal says, which is its share of the text."""
    drawn = torch.zeros(2, 11)
    for seed in range(300):
        fallback.noise = Noise(seed, 11)
        proposals = fallback.propose([[3, 5, 3, 3], [7, 8, 8]], [1, 0], 2)
        drawn += torch.nn.functional.one_hot(torch.tensor([tokens for tokens, _ in proposals]), 11).sum(1)
    expected = torch.zeros(2, 11)
    expected[0, [7, 8]] = torch.tensor([1 / 3, 2 / 3])
    expected[1, [3, 5]] = torch.tensor([3 / 4, 1 / 4])
    torch.testing.assert_close(torch.stack([q for _, q in proposals]), expected[:, None].expand(-1, 2, -1))
    for row in range(2):
        possible = expected[row] > 0
        assert not drawn[row, ~possible].any()
        assert stats.chisquare(drawn[row, possible], 600 * expected[row, possible]).pvalue > 1e-3


class EachTokenAlike(RandomFallback):
    def propose(self, texts, rows, lookahead):
        alike = super().propose([sorted(set(text)) for text in texts], rows, lookahead)
        return [Proposal(one.tokens, q) for one, (_, q) in zip(alike, super().propose(texts, rows, lookahead))]


def test_random_tokens_are_those_of_the_text_with_the_shares_they_have_there():
    check_shares(RandomFallback(11, 5))
    with pytest.raises(AssertionError):
        check_shares(EachTokenAlike(11, 5))


def test_random_depends_on_text_seed_and_row_alone():
    texts = [torch.randint(97, (length,)).tolist() for length in (5, 9, 30, 9)]

    def tokens_of(*request, seed=2**31 - 1):
        proposals = RandomFallback(97, seed).propose(*request)
        assert all(q.shape == (request[-1], 97) and q.dtype == torch.float32 for _, q in proposals)
        return [tokens for tokens, _ in proposals]

    first = tokens_of(texts, [0, 1, 3], 5)
    assert tokens_of([[1], texts[1], [1], texts[3]], [3, 1], 5) == [first[2], first[1]]
    assert tokens_of(texts, [3], 2) == [first[2][:2]]
    assert [len(tokens) for tokens in first] == [5, 5, 5]
    assert len(set(map(tuple, first))) == 3
    assert tokens_of(texts, [0, 1, 3], 5, seed=0) != first


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


TEXTS = [[1, 2, 3, 4], [5, 4], [1, 1, 1]]


def ask(proposer, rows=(0,), lookahead=3, texts=TEXTS, vocab_size=VOCAB):
    """The tokens and the probabilities that are proposed for each row."""
    proposals = CustomFallback(proposer, vocab_size).propose(texts, list(rows), lookahead)
    return [list(part) for part in zip(*proposals)] if proposals else ([], [])


@pytest.mark.parametrize("lead", [(), (1,)], ids=["flat", "batched"])
def test_custom_rows_of_both_kinds(lead):
    q = torch.rand(2, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = torch.tensor([3, 5], dtype=torch.int32)
    proposer = Scripted((tokens.view(*lead, 2), q.view(*lead, 2, VOCAB)), (torch.tensor([4]).view(*lead, 1), None))
    tokens, (theirs, certain) = ask(proposer, rows=[2, 1])
    assert proposer.asked == [([[1, 1, 1]], 3), ([[5, 4]], 3)] and TEXTS[1:] == [[5, 4], [1, 1, 1]]
    assert tokens == [[3, 5], [4]] and certain is None
    assert theirs.dtype == torch.float32
    torch.testing.assert_close(theirs, q.float())


def test_custom_proposals_are_cut_and_may_be_empty():
    q = torch.full((5, VOCAB), 1 / VOCAB)
    tokens, probabilities = ask(Scripted((torch.arange(5), q), (torch.zeros(1, 0), None)), rows=[0, 1])
    assert tokens == [[0, 1, 2], []] and len(probabilities[0]) == 3
    tokens, probabilities = ask(Scripted((torch.tensor([]), q[None, :0]), (torch.tensor([4]), None)), rows=[0, 1])
    assert tokens == [[], [4]] and probabilities == [None, None]
    assert ask(Scripted(), rows=[]) == ([], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_custom_probabilities_are_normalized_in_float32(dtype):
    q = torch.tensor([[0.1001, 0.2, 0.2, 0.2, 0.2, 0.1]], dtype=dtype)
    expected = q[0].double() / q.double().sum()
    assert (expected - q[0]).abs().max() > 1e-5
    _, (found,) = ask(Scripted((torch.tensor([0]), q)))
    torch.testing.assert_close(found[0], expected.float(), atol=1e-7, rtol=0)


@pytest.mark.parametrize("rows", [[0], [2, 0, 1]])
def test_custom_prompt_lookup(rows):
    proposer = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([5]), num_output_tokens=4, max_matching_ngram_size=2, max_length=100
    )
    tokens, probabilities = ask(proposer, rows, texts=[[1, 2, 3, 4, 1, 2], [1, 2, 3, 4], [3, 5, 1, 3]])
    # A match, no match (it returns its input), and a match that is followed by the end-of-sequence token.
    assert tokens == [{0: [3, 4, 1], 1: [], 2: []}[row] for row in rows]
    assert probabilities == [None] * len(rows)


def test_custom_candidate_logits_become_probabilities():
    logits = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(0))
    (tokens,), (probabilities,) = ask(ScriptedCandidates(torch.tensor([[1, 2, 3, 4, 5, 0]]), logits), lookahead=2)
    assert tokens == [5, 0]
    torch.testing.assert_close(probabilities, logits[0].softmax(-1))


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
    "candidates, logits, message",
    [
        ([[1, 2, 0, 4, 5]], None, "do not begin with the given `input_ids`"),
        ([[5]], None, "do not begin with the given `input_ids`"),
        ([1, 2, 3, 4], None, "do not begin with the given `input_ids`"),
        ([[1, 2, 3, 4, 5, 0]], torch.zeros(1, 1, VOCAB), r"shape \(1, 1, 6\), not \(2, 6\)"),
    ],
)
def test_candidates_that_cannot_be(candidates, logits, message):
    with pytest.raises(ValueError, match=f"ScriptedCandidates .*{message}"):
        ask(ScriptedCandidates(torch.tensor(candidates), logits))


class NeedsTheTarget(ScriptedCandidates):
    requires_model_outputs = True


class WrongArguments:
    def propose(self, input_ids):
        return input_ids, None


def test_what_can_propose():
    check_proposer(Scripted())
    check_proposer(PromptLookupCandidateGenerator())
    unfit = ["ngram", None, 3, torch.nn.Linear(1, 1), Scripted, CandidateGenerator, Ngrams()]
    unfit += [WrongArguments(), NeedsTheTarget(None)]
    for value in unfit:
        with pytest.raises(TypeError, match=f"`fallback` is a {type(value).__name__}, which cannot propose tokens"):
            check_proposer(value)
    with pytest.raises(TypeError, match="cannot propose tokens by itself"):
        CustomFallback(WrongArguments(), VOCAB)


# ---------------------------------------------------------------- beside what was drafted


def test_each_row_has_the_distributions_that_its_tokens_were_drawn_from():
    """A row of the draft, a shorter one, one that missed, an n-gram, and a finished one, whose q is anything."""
    tokens = [[1, 2, 3], [3, 0, 0], [4, 5, 0], [5, 5, 5], [0, 0, 0]]
    q = torch.rand(5, 3, VOCAB, generator=torch.Generator().manual_seed(0)).softmax(-1)
    q[2:], certain = torch.nan, torch.eye(VOCAB)
    theirs = torch.full((2, VOCAB), 1 / VOCAB)
    proposers = Proposers(SessionRequest(SSDConfig(), None, [torch.ones(1, dtype=torch.long)] * 5, 0, VOCAB), [[1]] * 5)
    proposers.drafted, proposers.missed = [3, 1, 0, 0, 0], {2: Proposal([4, 5], theirs)}
    found = proposers.distributions(tokens, q, CPU)
    assert torch.equal(found[0], q[0]) and torch.equal(found[1, :1], q[1, :1])
    assert torch.equal(found[1, 1:], certain[[0, 0]])
    assert torch.equal(found[2], torch.cat([theirs, certain[:1]]))
    assert torch.equal(found[3], certain[[5, 5, 5]]) and torch.equal(found[4], certain[[0, 0, 0]])
    proposers.drafted, proposers.missed = [0] * 5, {2: Proposal([4, 5])}
    assert torch.equal(proposers.distributions(tokens, None, CPU), certain[torch.tensor(tokens)])
