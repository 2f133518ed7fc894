"""Rows that are finished are left out of forward passes: the others go on as before, and nothing of any row is lost."""

import pytest

from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.trial import check_supported

from ..helpers.comparing import as_plain
from ..helpers.tiny import padded_batch


@pytest.mark.parametrize("asynchronous", [False, True])
def test_finished_rows_are_not_computed(target, draft, assistant, asynchronous, monkeypatch):
    """Of a batch whose rows end at different lengths; and the tokens are those of plain generation."""
    check_supported(target)  # by passes that are not counted
    computed, forward = [], CachedModel.forward

    def counted(self, tokens, *args):
        if self.model is target:
            computed.append(len(tokens))
        return forward(self, tokens, *args)

    monkeypatch.setattr(CachedModel, "forward", counted)
    drafts, options = assistant if asynchronous else draft, {"max_new_tokens": 40, "eos_token_id": [5, 6, 7, 8, 9, 10]}
    output, _ = as_plain(target, drafts, padded_batch(4), {"lookahead": 3, "budget": 8}, **options)
    live = [sum(k >= 0 for k in accepted) for accepted in output.ssd_stats.column("accepted")]
    # Behind the rounds, the rows that ended before the others are fed what the returned cache lacks of them.
    assert computed[:-1] == live and len(set(live)) > 2 and computed[-1] == 3
