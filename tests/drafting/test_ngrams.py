"""The incremental index of a row's text, against the rule that it stands for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ssd.generation.proposers import ngrams
from hf_ssd.generation.proposers.ngrams import LONGEST_MATCH, TOKENS_PER_MATCHED, NgramIndex

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def rule(text: list[int], count: int) -> list[int]:
    """The longest match, the latest of equally long ones, by looking at all places."""
    best, longest = 0, 1
    for place in range(2, len(text)):
        matched = 0
        while matched < min(LONGEST_MATCH, place) and text[place - 1 - matched] == text[-1 - matched]:
            matched += 1
        if matched >= max(2, longest):
            best, longest = place, matched
    period = len(text) - best
    return [text[best + i % period] for i in range(min(count, TOKENS_PER_MATCHED * longest))] if best else []


@given(TEXTS, st.integers(1, 20))
@settings(max_examples=200)
def test_the_first_proposal_is_that_of_the_rule(text, count):
    """A text of up to 40 tokens may have more occurrences of a pair than are compared; then all are compared here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "PLACES", 100)
        assert NgramIndex(text).propose(count) == rule(text, count)


def other_ways(text: list[int], tokens: list[int]) -> set[tuple[int, int]]:
    """The first other token after each occurrence of the last two tokens, by looking at all places."""
    found = set()
    for place in range(2, len(text)):
        if text[place - 2 : place] == text[-2:]:
            differ = [depth for depth, (one, other) in enumerate(zip(text[place:], tokens)) if one != other]
            found |= {(depth, text[place + depth]) for depth in differ[:1]}
    return found


def check_siblings():
    @given(TEXTS, st.integers(1, 20))
    @settings(max_examples=200)
    def check(text, count):
        index = NgramIndex(text)
        tokens = index.propose(count)
        assert (found := index.siblings(tokens)) == [*dict.fromkeys(found)] and {*found} == other_ways(text, tokens)

    check()


def test_siblings_of_a_proposal_are_the_other_ways_in_which_the_text_went_on(monkeypatch):
    monkeypatch.setattr(ngrams, "PLACES", 100)
    check_siblings()
    text = [7, 1, 2, 3, 4, 5, 1, 2, 8, 9, 7, 1, 2, 3, 6, 7, 1, 2]  # the longest match first, and of these the latest
    index = NgramIndex(text)
    assert index.propose(3) == [3, 6, 7] and index.siblings([3, 6, 7]) == [(1, 4), (0, 8)]
    monkeypatch.setattr(ngrams.os.path, "commonprefix", lambda texts: [])  # the mutant: all differ at once
    with pytest.raises(AssertionError):
        check_siblings()


@given(TEXTS, st.lists(TEXTS, max_size=5))
@settings(max_examples=100)
def test_a_text_that_grows_has_the_links_of_one_that_was_given_at_once(text, more):
    grown = NgramIndex([*text])
    for part in more:
        grown.tokens += part
        grown.propose(4)
    whole = NgramIndex(text + sum(more, []))
    grown.read(), whole.read()
    assert (grown.tokens, grown.latest, grown.earlier) == (whole.tokens, whole.latest, whole.earlier)


def test_a_copied_passage_is_followed_although_its_pairs_are_common():
    """After the first match the proposals go on from its place, however often the pairs occurred since."""
    passage = [7, 8, 9, *[0, 1] * 20, 5, 6, *[1, 2] * 20]
    row = NgramIndex([*passage, *[0, 1, 3] * 50, 7, 8])
    copied = 2
    while copied < len(passage):
        proposed = row.propose(8)
        assert proposed == passage[copied : copied + len(proposed)] or copied + 8 > len(passage)
        row.tokens += passage[copied : copied + 4]
        copied += 4


def test_a_single_token_is_a_match_after_a_miss():
    """The latest occurrence of the last token, unless more tokens match at another one."""
    assert NgramIndex([1, 2, 3, 1]).propose(4, least=1) == [2, 3, 1, 2]
    assert NgramIndex([1, 2, 3, 1, 4, 1]).propose(4, least=1) == [4, 1, 4, 1]
    assert NgramIndex([5, 1, 2, 1, 4, 5, 1]).propose(4, least=1) == [2, 1, 4, 5]
    assert NgramIndex([]).propose(4, least=1) == NgramIndex([1, 2]).propose(4, least=1) == []


class Counted(list):
    reads = 0

    def __getitem__(self, place):
        Counted.reads += 1
        return super().__getitem__(place)


def test_a_proposal_reads_as_much_of_a_long_text_as_of_a_short_one():
    def reads(length):
        row = NgramIndex(Counted([0, 1, 2, 3] * (length // 4)))
        row.read()
        Counted.reads = 0
        row.propose(8)
        return Counted.reads

    assert reads(100_000) == reads(400)
