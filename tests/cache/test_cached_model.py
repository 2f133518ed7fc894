import pytest
import torch
from transformers import DynamicCache

from hf_ssd.cache.branches import Branches
from hf_ssd.cache.cache_name import CACHE
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


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_branches_equal_fresh_forward_passes_over_prefix_and_branch(family):
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    trunks = torch.randint(2, VOCAB, (2, 14), generator=generator)
    forks = torch.tensor([[9, 9, 10, 14, 1], [7, 8, 8, 8, 11]])
    decoder = CachedModel(model, RaggedCache())
    decoder.extend(trunks, [0, 0])
    for _ in range(2):  # the second set overwrites the first
        depth = 9  # beyond the sliding windows of 6
        branches = Branches(decoder, forks, base=14, depth=depth)
        grown = torch.empty(2, 5, 0, dtype=torch.long)
        for _ in range(depth):
            tokens = torch.randint(2, VOCAB, (2, 5), generator=generator)
            grown = torch.cat([grown, tokens[:, :, None]], dim=2)
            logits = branches.grow(tokens)
            for row in range(2):
                for i in range(5):
                    alone = torch.cat([trunks[row, : forks[row, i]], grown[row, i]])
                    torch.testing.assert_close(logits[row, i], fresh_logits(model, alone)[-1], **EXACT)
    again = torch.randint(2, VOCAB, (2, 3), generator=generator)
    logits = decoder.extend(again, [9, 7])  # the trunk goes on as if nothing had been grown
    for row, length in enumerate([9, 7]):
        expected = fresh_logits(model, torch.cat([trunks[row, :length], again[row]]))[-3:]
        torch.testing.assert_close(logits[row], expected, **EXACT)


@torch.inference_mode()
def test_a_mask_that_lets_branches_see_each_other_is_noticed(monkeypatch):
    """The mutant for the test above."""
    original = Branches.grow

    def leaky(self, tokens):
        self.mask[..., self.base :] = 0
        return original(self, tokens)

    monkeypatch.setattr(Branches, "grow", leaky)
    with pytest.raises(AssertionError):
        test_branches_equal_fresh_forward_passes_over_prefix_and_branch("llama")


@torch.inference_mode()
def test_left_padding_is_hidden():
    model = tiny_model()
    prompt = torch.randint(2, VOCAB, (5,), generator=torch.Generator().manual_seed(2))
    padded = torch.cat([torch.full((3,), 50), prompt])[None]
    valid = torch.tensor([[False] * 3 + [True] * 5])
    decoder = CachedModel(model, RaggedCache(), valid=valid, first_positions=[-3])
    torch.testing.assert_close(decoder.extend(padded, [0])[0, 3:], fresh_logits(model, prompt), **EXACT)


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


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma"])
@torch.inference_mode()
def test_a_cache_of_transformers_goes_in_and_out(family):
    model = tiny_model(family)
    tokens = torch.randint(2, VOCAB, (1, 15), generator=torch.Generator().manual_seed(3))
    theirs = DynamicCache(config=model.config)
    model(input_ids=tokens[:, :10], **{CACHE: theirs})
    ragged = RaggedCache.from_cache(theirs)
    assert ragged.get_seq_length() == 10
    logits = CachedModel(model, ragged).extend(tokens[:, 10:14], [10])
    torch.testing.assert_close(logits[0], fresh_logits(model, tokens[0])[10:14], **EXACT)

    ragged.copy_to(theirs, 13)
    assert theirs.get_seq_length() == 13
    logits = model(input_ids=tokens[:, 13:], **{CACHE: theirs}).logits
    torch.testing.assert_close(logits[0], fresh_logits(model, tokens[0])[13:], **EXACT)
