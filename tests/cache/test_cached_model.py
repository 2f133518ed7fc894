import pytest
import torch

from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.ragged import RaggedCache

from ..helpers.tiny import FAMILIES, VOCAB, tiny_model

EXACT = {"atol": 1e-5, "rtol": 1e-5}


def fresh_logits(model, tokens):
    with torch.inference_mode():
        return model(input_ids=tokens[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("no_room")
@torch.inference_mode()
def test_rows_of_different_lengths_equal_fresh_forward_passes(family):
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, VOCAB, (n,), generator=generator) for n in (7, 12, 3)]
    ids = torch.zeros(3, 12, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    decoder = CachedModel(model, RaggedCache())
    decoder.extend(ids, [0, 0, 0])
    lengths = [len(row) for row in rows]
    for count, kept in [(5, [2, 5, 0]), (3, [3, 1, 2]), (4, [4, 4, 4])]:  # the rest is rejected and overwritten
        new = torch.randint(2, VOCAB, (3, count), generator=generator)
        logits = decoder.extend(new, lengths)
        for i in range(3):
            expected = fresh_logits(model, torch.cat([rows[i], new[i]]))[-count:]
            torch.testing.assert_close(logits[i], expected, **EXACT)
            rows[i] = torch.cat([rows[i], new[i, : kept[i]]])
            lengths[i] = len(rows[i])


@pytest.mark.parametrize("padded", [False, True])
@torch.inference_mode()
def test_one_token_needs_a_mask_only_where_a_prompt_is_padded(padded):
    """A mask without padding hides nothing, and with it attention takes twice as long."""
    model, masks = tiny_model(), []
    decoder = CachedModel(model, RaggedCache(), valid=torch.tensor([[not padded, True, True]]))
    model.register_forward_pre_hook(lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    decoder.extend(torch.tensor([[2, 3, 4]]), [0])
    decoder.extend(torch.tensor([[5, 6]]), [3])
    decoder.extend(torch.tensor([[7]]), [5])
    assert masks[1] is not None and (masks[0] is None) == (masks[2] is None) != padded
