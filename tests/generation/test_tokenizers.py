"""Drafts with another tokenizer than the target's, as they exist."""

import functools
import gc
import weakref
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken

import hf_ssd
from hf_ssd.drafting.resolver import resolve
from hf_ssd.generation import tokenizers
from hf_ssd.generation.spelling import spelled_tokens
from hf_ssd.generation.tokenizers import translation_between, translation_for

from ..helpers.tiny import speculated, tiny_model
from ..helpers.vocabularies import DRAFT, KINDS, TARGET, byte_level, renamed_draft, sentencepiece, tokenizer

TEXT = "the quick brown fox jumps over the lazy dog"


def translated(translation, ids: list[int]) -> list[int]:
    return [piece for i in ids for piece in translation.pieces[i]]


def copy_common(target, draft, translation) -> None:
    """Gives the draft the target's weights, and the vectors of common tokens under its own ids."""
    common = translation.is_common.nonzero().flatten()
    ids = torch.tensor([translation.pieces[i][0] for i in common.tolist()])
    states = draft.state_dict()
    for name, weight in target.state_dict().items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            states[name][ids] = weight[common]
        else:
            states[name].copy_(weight)


def resolved_pair(ours, theirs):
    """A tiny target and draft of these vocabularies, and how a call sees the draft."""
    target, draft = (
        hf_ssd.enable(tiny_model(vocab_size=len(ours), eos_token_id=None)),
        tiny_model(vocab_size=len(theirs)),
    )
    return target, draft, resolve(draft, target, hf_ssd.SSDConfig())


def check_a_tiny_pair(ours, theirs, text: str = TEXT) -> None:
    """A target that writes common tokens only, and a draft that agrees: greedy tokens are plain's, many in a round."""
    target, draft, resolved = resolved_pair(ours, theirs)
    translation = translation_for(target, resolved, ours, theirs)  # which generate() uses again
    target.lm_head.weight.data[~translation.is_common] = 0.0
    copy_common(target, draft, translation)
    inputs = ours(text, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    both = {"tokenizer": ours, "assistant_tokenizer": theirs}
    generate = functools.partial(target.generate, **both)
    speculated(target, draft, inputs, {"lookahead": 4}, generate, 3, max_new_tokens=24)


# ---------------------------------------------------------------- how a tokenizer spells its tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_the_same_in_the_drafts_tokens_whatever_kinds_both_are(kind):
    ours = KINDS[kind]()
    for other, make in KINDS.items():
        theirs = make()
        translation = translation_between(ours, theirs, len(ours), len(theirs))
        ids = ours.encode(TEXT, add_special_tokens=False)
        text = theirs.decode(translated(translation, ids)).strip()
        if other in ("WordPiece", "ends of words"):  # which do not write blanks alone
            assert text.replace(" ", "") == TEXT.replace(" ", ""), other
        else:
            assert text == TEXT, other


def test_a_vocabulary_with_names_of_the_letter_that_byte_level_tokens_begin_with_drafts():
    check_a_tiny_pair(sentencepiece(), byte_level())
    check_a_tiny_pair(byte_level(), sentencepiece())


def test_of_two_tokens_for_one_byte_the_draft_proposes_the_one_that_the_target_writes():
    ours, theirs = sentencepiece(), byte_level()
    letters = [letter for letter in "abcdefg" if letter in ours.get_vocab()]
    assert len(letters) == 7
    for target, draft in ((ours, theirs), (theirs, ours)):
        translation = translation_between(target, draft, len(target), len(draft))
        for letter in letters:
            id_, other = target.get_vocab()[letter], draft.get_vocab()[letter]
            assert translation.is_common[id_] and translation.pieces[id_] == [other]
    translation = translation_between(ours, theirs, len(ours), len(theirs))
    byte = ours.get_vocab()["<0x61>"]
    assert not translation.is_common[byte] and translation.pieces[byte] == [theirs.get_vocab()["a"]]
    assert translation.is_common[ours.get_vocab()["<0xC3>"]]  # which is part of a letter, and has no other token


def test_the_letter_is_a_letter_to_sentencepiece_and_a_blank_to_byte_level():
    ours, theirs = sentencepiece(), byte_level()
    spelled, other = spelled_tokens(ours, len(ours)), spelled_tokens(theirs, len(theirs))
    assert spelled[ours.get_vocab()["Ġorġ"]] == "Ġorġ".encode() and spelled[ours.get_vocab()["Ċ"]] == "Ċ".encode()
    assert other[theirs.get_vocab()["Ġ"]] == b" " and other[theirs.get_vocab()["Ċ"]] == b"\n"


def test_added_tokens_that_are_not_special_are_text():
    ours, theirs = sentencepiece(), byte_level()
    ours.add_tokens([AddedToken("quick brown", special=False), AddedToken("\n\n", special=False)])
    ours.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    theirs.add_tokens([AddedToken("\n\n", special=False)])
    spelled = spelled_tokens(ours, len(ours))
    assert [spelled[len(ours) - place] for place in (3, 2, 1)] == [b"quick brown", b"\n\n", "<turn>"]
    translation = translation_between(ours, theirs, len(ours), len(theirs))
    assert translation.pieces[len(ours) - 2] == [theirs.get_vocab()["\n\n"]] and translation.is_common[len(ours) - 2]
    assert theirs.decode(translation.pieces[len(ours) - 3]) == "quick brown"
    assert theirs.decode(translation.pieces[len(ours) - 1]) == "<turn>"


def test_a_tokenizer_without_a_decoder_is_read_as_it_writes():
    for kind in ("byte-level", "SentencePiece", "Metaspace"):
        known, bare = KINDS[kind](), KINDS[kind]()
        bare.backend_tokenizer.decoder = None
        spelled, expected = spelled_tokens(bare, len(bare)), spelled_tokens(known, len(known))
        words = {token for token in known.get_vocab() if not token.startswith("<")}
        ids = known.get_vocab()
        assert all(spelled[i] == expected[ids[token]] for token, i in bare.get_vocab().items() if token in words), kind


class Foreign:
    """A tokenizer of another library, with the interface that transformers gives to mistral-common's."""

    def __init__(self, inner):
        self.inner, self.all_special_ids = inner, inner.all_special_ids

    def __len__(self):
        return len(self.inner)

    def __call__(self, text, **options):
        return self.inner(text, **options)

    def decode(self, ids):
        return self.inner.decode(ids, clean_up_tokenization_spaces=False)

    def batch_decode(self, rows):
        return [self.decode(ids) for ids in rows]

    def get_vocab(self):
        """Is lossy: the parts of characters have one name."""
        return {self.decode([i]): i for i in reversed(range(len(self)))}

    def added_tokens_decoder(self):
        raise NotImplementedError

    def convert_tokens_to_string(self, tokens):
        raise NotImplementedError


@pytest.mark.parametrize("make", [byte_level, sentencepiece], ids=["byte-level", "SentencePiece"])
def test_a_tokenizer_of_another_library_is_read_through_decode(make):
    inner = make()
    known, found = spelled_tokens(inner, len(inner)), spelled_tokens(Foreign(inner), len(inner))
    assert all(known[i] == token for i, token in found.items() if i not in inner.all_special_ids)
    spelled = {i: token for i, token in known.items() if isinstance(token, bytes)}
    parts = {i for i, token in spelled.items() if token.decode(errors="replace").encode() != token}
    assert len(found) > 100 and parts.isdisjoint(found) and parts | found.keys() == known.keys()
    check_a_tiny_pair(Foreign(byte_level()), sentencepiece())
    check_a_tiny_pair(sentencepiece(), Foreign(byte_level()))


@pytest.mark.slow
def test_a_tokenizer_of_mistral_common_is_read_through_decode():
    mistral_common = pytest.importorskip("mistral_common")
    from transformers.tokenization_mistral_common import MistralCommonBackend

    file = Path(mistral_common.__file__).parent / "data/tekken_240718.json"
    theirs = MistralCommonBackend(file)
    found, core = spelled_tokens(theirs, 20_000), theirs.tokenizer.instruct_tokenizer.tokenizer
    ids = [i for i in range(1000, 20_000) if i in found]
    assert len(ids) > 18_000 and all(core.id_to_byte_piece(i) == found[i] for i in ids)
    assert found[1] == "<s>" and found[3] == "[INST]"


# ---------------------------------------------------------------- tokenizers of calls that are over


@pytest.mark.slow
def test_tokenizers_are_not_kept_longer_than_their_user_keeps_them():
    target, draft, kept = hf_ssd.enable(tiny_model()), renamed_draft(), []
    for _ in range(3):
        ours, theirs = tokenizer(TARGET), tokenizer(DRAFT)
        kept += [weakref.ref(ours), weakref.ref(theirs)]
        generate = functools.partial(target.generate, tokenizer=ours, assistant_tokenizer=theirs)
        speculated(target, draft, {"input_ids": ours("zyxwvuts", return_tensors="pt").input_ids}, generate=generate)
        del ours, theirs, generate
        gc.collect()
        assert not any(one() for one in kept)


def test_tokenizers_that_are_used_again_are_compared_once(monkeypatch):
    compared, between, both = [], tokenizers.translation_between, (sentencepiece(), byte_level())
    monkeypatch.setattr(tokenizers, "translation_between", lambda *a: compared.append(a) or between(*a))
    model, _, draft = resolved_pair(range(400), range(400))
    first = translation_for(model, draft, *both)
    assert translation_for(model, draft, *both) is first
    assert translation_for(tiny_model(vocab_size=400), draft, *both) is first and len(compared) == 1
    assert translation_for(model, draft, *reversed(both)) is not first and len(compared) == 2


# ---------------------------------------------------------------- public weights

REAL_TEXT = """The capital of France is Paris, and that of Germany is Berlin.

    def area(radius):
        return 3.14159 * radius**2  # größer als 日本? It's "quoted".
"""
REAL = [("gemma3", "smollm2"), ("smollm2", "gemma3")]
both_ways = pytest.mark.parametrize("names", REAL, ids=[" drafted by ".join(pair) for pair in REAL])


@pytest.mark.real
@pytest.mark.slow
@both_ways
def test_the_tokens_of_gemma_and_smollm_stand_for_the_same_texts(real_tokenizers, names):
    ours, theirs = (real_tokenizers[name] for name in names)
    target, _, resolved = resolved_pair(ours, theirs)
    translation = translation_for(target, resolved, ours, theirs)  # once for this test and the next
    ids = ours.encode(REAL_TEXT, add_special_tokens=False)
    assert theirs.decode(translated(translation, ids)) == REAL_TEXT
    assert int(translation.is_common.sum()) > 40_000
    assert int(translation.is_common[ids].sum()) > 0.8 * len(ids)
    # Every token that is a whole text by itself, among others 'Ġ' and names that begin with it.
    expected, other = spelled_tokens(ours, len(ours)), spelled_tokens(theirs, len(theirs))
    texts = [i for i, token in expected.items() if isinstance(token, bytes) and b"\xc4" in token]
    assert len(texts) > 10
    for i in texts:
        assert b"".join(other[piece] for piece in translation.pieces[i]) == expected[i]


@pytest.mark.real
@pytest.mark.slow
@both_ways
def test_tiny_models_of_the_vocabularies_of_gemma_and_smollm_speculate(real_tokenizers, names):
    check_a_tiny_pair(*(real_tokenizers[name] for name in names), "The capital of France is Paris")
