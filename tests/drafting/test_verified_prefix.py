"""The verified tokens, from call to call: what a text shares with that of the call before is not fed again."""

import pytest
import torch
from transformers import GenerationConfig

from hf_ssd import SSDConfig
from hf_ssd.cache import masks
from hf_ssd.drafting.recurrent_prefix import RecurrentPrefix
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.drafting.verified_prefix import WORTH_KEEPING, VerifiedPrefix

from ..helpers.families import sharp_model, tiny_config
from ..helpers.tiny import VOCAB, tiny_draft


def tokens(count, seed=0):
    return torch.randint(2, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def request_of(texts):
    return SessionRequest(SSDConfig(), GenerationConfig(max_length=256), texts, 0, VOCAB)


def check(model, logits, texts):
    """Compares logits `(n, vocab_size)` of each row with those after the last n tokens of its text."""
    for of_row, text in zip(logits, texts):
        expected = model(text[None], use_cache=False).logits[0, -len(of_row) :]
        torch.testing.assert_close(of_row, expected, atol=1e-5, rtol=1e-5)


LONG = WORTH_KEEPING + 30
FED = {  # of the second text
    "it goes on": ([tokens(LONG)], [torch.cat([tokens(LONG), tokens(7, 9)])], [LONG]),
    "so do two": (
        [tokens(LONG), tokens(LONG + 5, 1)],
        [torch.cat([tokens(LONG), tokens(7, 9)]), torch.cat([tokens(LONG + 5, 1), tokens(7, 9)])],
        [LONG, LONG + 5],
    ),
    "its last ten tokens are others": ([tokens(LONG)], [torch.cat([tokens(LONG - 10), tokens(10, 5)])], [LONG - 10]),
    "it is the same": ([tokens(LONG)], [tokens(LONG)], [LONG - 1]),
    "it is short": ([tokens(LONG)], [tokens(WORTH_KEEPING - 1)], [0]),
    "it is another one": ([tokens(LONG)], [tokens(LONG, 3)], [0]),
    "there is a second row": ([tokens(LONG)], [tokens(LONG)] * 2, [0, 0]),
}


@pytest.mark.parametrize("case", FED)
@torch.inference_mode()
def test_what_two_texts_share_is_not_fed_again(case):
    (before, texts, shared), draft = FED[case], tiny_draft()
    earlier = VerifiedPrefix(draft, request_of(before))
    earlier.feed(0, wanted=1)
    prefix = VerifiedPrefix(draft, request_of(texts), earlier)
    assert prefix.fed == shared and (prefix.decoder.cache is earlier.decoder.cache) == bool(shared[0])
    check(draft, prefix.feed(0, wanted=1), texts)


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "lfm2", "falcon_h1"])
@torch.inference_mode()
def test_a_hybrid_starts_from_the_states_of_a_text_that_goes_on(family):
    model = sharp_model(tiny_config(family))
    for weights in model.parameters():
        weights.mul_(0.3)  # logits below 1, whose rounding stays below 1e-5
    texts, more = [tokens(70), tokens(75, 1)], torch.stack([tokens(9, 2), tokens(9, 3)])
    earlier = RecurrentPrefix(model, request_of(texts))
    earlier.feed(0, wanted=1)
    earlier.write(more[:, :3])
    earlier.feed(3, wanted=1)
    earlier.decoder.leave_out([False, True])
    earlier.grow([more[0, :3].tolist(), []], [2, -1])
    longer = [torch.cat([text, new]) for text, new in zip(texts, more)]
    prefix = RecurrentPrefix(model, request_of(longer), earlier)
    assert prefix.fed == [72, 75]
    check(model, prefix.feed(0, wanted=1), longer)
    others = [text.flip(0) for text in longer]
    prefix = RecurrentPrefix(model, request_of(others), prefix)
    assert prefix.fed == [0, 0]
    check(model, prefix.feed(0, wanted=1), others)


@pytest.mark.parametrize("lengths", [(30,), (30, 12)])
@torch.inference_mode()
def test_a_prefill_needs_no_mask_of_all_columns_by_all_columns(lengths, monkeypatch):
    draft, texts, made, additive = tiny_draft(), [tokens(length, length) for length in lengths], [], masks.additive
    prefix = VerifiedPrefix(draft, request_of(texts))
    monkeypatch.setattr(masks, "additive", lambda allowed, *of: made.append(allowed.shape) or additive(allowed, *of))
    check(draft, prefix.feed(0, wanted=1), texts)
    assert not made
    prefix.grow([[5]] * len(texts), [0] * len(texts))
    prefix.feed(0, wanted=1)
    assert all(shape[1] == 1 for shape in made)  # what follows is fed token by token
