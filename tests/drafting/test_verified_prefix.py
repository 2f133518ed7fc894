"""The verified tokens, from call to call."""

import pytest
import torch

from hf_ssd.cache import masks
from hf_ssd.drafting.verified_prefix import WORTH_KEEPING, VerifiedPrefix

from ..helpers.tiny import VOCAB, tiny_draft


def tokens(count, seed=0):
    return torch.randint(2, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def draft():
    return tiny_draft()


def logits_of(prefix):
    with torch.inference_mode():
        return prefix.feed(0, wanted=1)


def counted(prefix):
    """Counts the columns that are fed from now on."""
    fed, extend = [], prefix.decoder.extend
    prefix.decoder.extend = lambda ids, *args, **kwargs: (fed.append(ids.shape[1]), extend(ids, *args, **kwargs))[1]
    return fed


@pytest.mark.parametrize("rows", [1, 2])
def test_a_text_that_goes_on_is_not_fed_again(draft, rows):
    texts = [tokens(WORTH_KEEPING + 20 + 5 * row, seed=row) for row in range(rows)]
    earlier = VerifiedPrefix(draft, texts, 256)
    logits_of(earlier)
    longer = [torch.cat([text, tokens(7, seed=9)]) for text in texts]
    prefix = VerifiedPrefix(draft, longer, 256, earlier)
    fed = counted(prefix)
    torch.testing.assert_close(logits_of(prefix), logits_of(VerifiedPrefix(draft, longer, 256)), rtol=1e-4, atol=1e-4)
    assert fed == [7]


def test_what_differs_is_fed(draft):
    text = tokens(WORTH_KEEPING + 30)
    earlier = VerifiedPrefix(draft, [text], 256)
    logits_of(earlier)
    other = text.clone()
    other[-10] = (other[-10] + 1) % VOCAB
    prefix = VerifiedPrefix(draft, [other], 256, earlier)
    fed = counted(prefix)
    torch.testing.assert_close(logits_of(prefix), logits_of(VerifiedPrefix(draft, [other], 256)), rtol=1e-4, atol=1e-4)
    assert fed == [10]


@pytest.mark.parametrize("change", ["short", "another text", "more rows"])
def test_a_cache_that_does_not_help_is_left(draft, change):
    text = tokens(WORTH_KEEPING + 30)
    earlier = VerifiedPrefix(draft, [text], 256)
    logits_of(earlier)
    prompts = {"short": [text[: WORTH_KEEPING - 1]], "another text": [tokens(90, seed=3)], "more rows": [text, text]}
    prefix = VerifiedPrefix(draft, prompts[change], 256, earlier)
    assert prefix.fed == [0] * len(prompts[change]) and prefix.decoder.cache is not earlier.decoder.cache


def test_the_same_text_again_needs_its_last_token(draft):
    text = tokens(WORTH_KEEPING + 30)
    earlier = VerifiedPrefix(draft, [text], 256)
    expected = logits_of(earlier)
    prefix = VerifiedPrefix(draft, [text], 256, earlier)
    fed = counted(prefix)
    torch.testing.assert_close(logits_of(prefix), expected, rtol=1e-4, atol=1e-4)
    assert fed == [1]


@pytest.mark.parametrize("lengths", [(30,), (30, 12)])
def test_a_prefill_needs_no_mask_of_all_columns_by_all_columns(draft, lengths, monkeypatch):
    texts = [tokens(length, seed=length) for length in lengths]
    made, additive = [], masks.additive
    monkeypatch.setattr(
        masks, "additive", lambda allowed, dtype: made.append(allowed.shape) or additive(allowed, dtype)
    )
    prefix = VerifiedPrefix(draft, texts, 256)
    logits = logits_of(prefix)
    assert not made
    with torch.inference_mode():
        for row, text in enumerate(texts):
            expected = draft(text[None], use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[row, 0], expected, atol=1e-5, rtol=1e-5)
    prefix.grow([[5]] * len(texts), [0] * len(texts))
    logits_of(prefix)
    assert all(shape[1] == 1 for shape in made)  # what follows is fed token by token
