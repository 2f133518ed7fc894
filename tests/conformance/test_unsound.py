"""Drafted tokens whose keys and values are not numbers: they cost a round, and not the tokens before them."""

import pytest
import torch

import hf_ssd
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.generation.sequences import Sequences

from ..helpers.comparing import as_plain
from ..helpers.families import sharp_model, tiny_config
from ..helpers.preparing import preparing
from ..helpers.suites import quick_first
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

UNSOUND = 90  # a token whose embedding was never set, as those are that pad a vocabulary


def spoilt(model, value=float("nan"), is_drafted=False):
    with torch.no_grad():
        model.get_input_embeddings().weight[UNSOUND] = value
        model.lm_head.weight[UNSOUND] = 0
        if is_drafted:  # in place of a token that is frequent
            model.lm_head.weight[UNSOUND] = 1.1 * model.lm_head.weight[23]
    return model


def hybrid():
    return sharp_model(tiny_config("qwen3_next"))


class Proposes:
    """Of each four tokens one is the bad one, each time in another place."""

    def __init__(self):
        self.calls = 0

    def propose(self, input_ids, lookahead):
        self.calls += 1
        tokens = torch.full((lookahead,), 7)
        tokens[self.calls % lookahead] = UNSOUND
        return tokens, None


PAIRS = {
    "not a number": lambda: (spoilt(tiny_model()), spoilt(tiny_draft())),
    "sliding": lambda: (spoilt(tiny_model("gemma")), spoilt(tiny_draft("gemma"))),
    "recurrent": lambda: (spoilt(hybrid()), spoilt(tiny_draft())),
    "draft": lambda: (spoilt(tiny_model()), spoilt(tiny_draft(), is_drafted=True)),
    "sound draft": lambda: (spoilt(tiny_model()), spoilt(tiny_draft(), 0.1, is_drafted=True)),
    "infinite": lambda: (spoilt(tiny_model(), torch.inf), spoilt(tiny_draft(), torch.inf)),
    "eager": lambda: (spoilt(tiny_model(attn_implementation="eager")), spoilt(tiny_draft())),
}


@pytest.mark.parametrize("rows", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick_first(PAIRS, 5))
def test_tokens_are_those_of_plain_generation(name, rows, monkeypatch):
    """Sampled ones are in `test_unsound_sampled.py`."""
    target, draft = PAIRS[name]()
    proposed, accept = [], Sequences.propose
    monkeypatch.setattr(Sequences, "propose", lambda self, tokens: proposed.append(tokens) or accept(self, tokens))
    of_config = {"budget": 4, "fallback": "primary" if "draft" in name else Proposes()}
    with preparing():
        options = {"output_scores": True, "output_logits": True}
        ssd, plain = as_plain(hf_ssd.enable(target), draft, padded_batch(rows), of_config, **options)
    assert any(UNSOUND in row for of_round in proposed for row in of_round)
    for ours, theirs in ((ssd.scores, plain.scores), (ssd.logits, plain.logits)):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-3, rtol=1e-3)
    for ours, theirs in zip(ssd[CACHE].layers, plain[CACHE].layers):
        if not hasattr(ours, "keys"):  # a recurrent layer
            continue
        assert ours.keys.isfinite().all() and ours.values.isfinite().all()
        assert ours.keys.shape == theirs.keys.shape


def test_rows_that_are_not_verified_again_are_noticed(monkeypatch):
    """The mutant: what was drafted stays in the cache, and only the last token is fed once more."""
    monkeypatch.setattr(RaggedCache, "clear_behind", lambda *_: None)
    with pytest.raises(AssertionError):
        test_tokens_are_those_of_plain_generation("draft", 4, monkeypatch)
