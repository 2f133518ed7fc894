"""Hybrid drafts from call to call; what they draft is in `tests/conformance/test_hybrids.py`."""

import pytest
import torch

from hf_ssd.drafting.recurrent_prefix import RecurrentPrefix

from ..helpers.families import sharp_model, tiny_config
from ..helpers.tiny import VOCAB


@pytest.fixture(scope="module", params=["qwen3_next", "bamba", "lfm2", "falcon_h1"])
def model(request):
    model = sharp_model(tiny_config(request.param))
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(0.3)  # logits below 1, whose rounding stays below 1e-5
    return model


def check(model, logits, texts):
    """Compares logits `(n, vocab_size)` with those after the last n tokens of a text."""
    for of_row, text in zip(logits, texts):
        expected = model(torch.tensor([text]), use_cache=False).logits[0, -len(of_row) :]
        torch.testing.assert_close(of_row, expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_call_that_continues_the_text_of_the_last_one_starts_from_its_states(model):
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(2, VOCAB, (length,), generator=generator) for length in (70, 75)]
    more = torch.randint(2, VOCAB, (2, 9), generator=generator)
    earlier = RecurrentPrefix(model, texts, None)
    earlier.feed(0, wanted=1)
    earlier.write(more[:, :3])
    earlier.feed(3, wanted=1)
    earlier.decoder.leave_out([False, True])
    earlier.grow([more[0, :3].tolist(), []], [2, -1])
    longer = [torch.cat([text, new]) for text, new in zip(texts, more)]
    prefix = RecurrentPrefix(model, longer, None, earlier)
    assert prefix.fed == [72, 75]
    check(model, prefix.feed(0, wanted=1), [text.tolist() for text in longer])
    other = RecurrentPrefix(model, [text.flip(0) for text in longer], None, prefix)
    assert other.fed == [0, 0]
    check(model, other.feed(0, wanted=1), [text.flip(0).tolist() for text in longer])
