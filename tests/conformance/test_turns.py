"""The cache that a call returns: a later turn goes on from it as from that of plain generate()."""

import pytest
import torch

import hf_ssd
from hf_ssd.cache import recurrent
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.support import is_recurrent

from ..helpers.comparing import GREEDY, settings
from ..helpers.families import likely_draft, sharp_pair
from ..helpers.preparing import preparing
from ..helpers.suites import quick_first
from ..helpers.tiny import FAMILIES, VOCAB, padded_batch, tiny_draft, tiny_model


def turns(target, options, of_turn, count=3):
    """Plays several turns with one cache: the output of each, and whether rows have ended unevenly."""
    ids, mask = padded_batch(4).values()
    cache, outputs, uneven = None, [], False
    for turn in range(count):
        output = target.generate(ids, attention_mask=mask, **{CACHE: cache}, **options, **of_turn(turn))
        new = output.sequences[:, ids.shape[1] :]
        uneven |= len(set((new != 0).sum(1).tolist())) > 1
        question = torch.randint(2, VOCAB, (4, 5), generator=torch.Generator().manual_seed(turn))
        mask = torch.cat([mask, torch.ones_like(new), torch.ones_like(question)], dim=1)
        ids, cache = torch.cat([output.sequences, question], dim=1), output[CACHE]
        assert cache.get_seq_length() == output.sequences.shape[1] - 1
        outputs.append(output.sequences)
    return outputs, uneven


def ends(target):
    """Options with which rows end at different places."""
    plain = target.generate(**padded_batch(4), max_new_tokens=30, do_sample=False)
    tokens = [int(plain[0, 9 + 3]), int(plain[1, 9 + 8]), int(plain[2, 9 + 12])]
    return {**GREEDY, "eos_token_id": tokens, "max_new_tokens": 24}


def differ(target, draft):
    """Whether speculation, in any of some turns, and plain generation differ in one of them."""
    ssd, options = settings(draft), ends(target)
    expected, uneven = turns(target, options, lambda _: {})
    assert uneven
    mixed = [lambda _: ssd, lambda turn: ssd if turn == 0 else {}, lambda turn: {} if turn == 0 else ssd]
    with preparing():
        played = (turns(target, options, of_turn)[0] for of_turn in mixed)
        return any(not torch.equal(*both) for of_one in played for both in zip(of_one, expected))


def of_family(family):
    if family in FAMILIES:
        return hf_ssd.enable(tiny_model(family)), tiny_draft(family)
    target, draft = sharp_pair(family, noise=0.02)
    return target, likely_draft(target) if is_recurrent(target.config) else draft


# "gemma" has a sliding window; the cache of "deepseek_v32" also holds the keys by which columns are chosen.
@pytest.mark.parametrize("family", quick_first(["gemma", "lfm2", "llama", "deepseek_v32", "qwen3_next", "bamba"], 2))
def test_later_turns_are_those_of_plain_generation(family, monkeypatch):
    """Other ends, and masks that hide the padding of answers, are in `test_against_plain.py`."""
    monkeypatch.setattr(recurrent, "WORTH_A_PASS", 6)
    assert not differ(*of_family(family))


def test_the_columns_are_those_of_plain_generation(target, draft):
    options = {**padded_batch(4), **ends(target)}
    plain = target.generate(**options)[CACHE]
    ssd = target.generate(**options, **settings(draft))[CACHE]
    for ours, theirs in zip(ssd.layers, plain.layers):
        seen = options["attention_mask"].bool()[:, None, :, None]
        for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(one[:, :, 9:], other[:, :, 9:], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(one[:, :, :9] * seen, other[:, :, :9] * seen, atol=1e-4, rtol=1e-4)


def test_columns_that_are_missing_are_noticed(target, draft, monkeypatch):
    """The mutant: the cache is returned as the rounds have left it."""
    monkeypatch.setattr(CachedModel, "finish", lambda *_: None)
    assert differ(target, draft)


def test_a_user_who_gets_no_cache_pays_for_none(target, draft, monkeypatch):
    monkeypatch.setattr(CachedModel, "finish", lambda *_: pytest.fail("fed for no one"))
    target.generate(**padded_batch(4), **{**ends(target), "return_dict_in_generate": False}, **settings(draft))
