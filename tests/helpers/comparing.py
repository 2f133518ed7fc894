"""Calls with a draft, and the same calls without one."""

import torch

import hf_ssd

GREEDY = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}


def settings(draft, **changes) -> dict:
    """The arguments of a call with a draft: a model drafts in this process, an assistant in its worker."""
    is_model = isinstance(draft, torch.nn.Module)
    config = hf_ssd.SSDConfig(**{"lookahead": 4, "budget": 12, "asynchronous": not is_model, **changes})
    return {"assistant_model": draft, "ssd_config": config}


def generate(target, draft, inputs, of_config=(), **options):
    """A greedy call of 30 tokens, but for the options; `of_config` has settings of [`SSDConfig`]."""
    output = target.generate(**inputs, **{**GREEDY, **options}, **settings(draft, **dict(of_config)))
    assert output.ssd_stats.draft_failure is None
    return output


def as_plain(target, draft, inputs, of_config=(), **options):
    """Checks that a call speculates and that its tokens are those of plain generate(), and returns both outputs."""
    plain = target.generate(**inputs, **{**GREEDY, **options})
    output = generate(target, draft, inputs, of_config, **options)
    assert torch.equal(output.sequences, plain.sequences) and any(output.ssd_stats.column("lookahead"))
    return output, plain
