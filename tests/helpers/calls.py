"""A call with a draft, whose greedy tokens are compared with those of plain generation."""

import torch
from transformers import LogitsProcessorList, set_seed

import hf_ssd

from .tiny import padded_batch


def call(target, draft, rows=2, processor=None, seed=None, inputs=None, settings=None, plain=None, **options):
    """
    Returns the output. The processor is of the call with the draft alone, the settings are those of `SSDConfig` that
    are not the usual ones, and `plain` is what plain generation returns, if that is known.
    """
    config = hf_ssd.SSDConfig(**{"lookahead": 3, "budget": 8, **(settings or {})})
    options = {**(inputs or padded_batch(rows)), "max_new_tokens": 30, "do_sample": False, **options}
    ours = {"assistant_model": draft, "ssd_config": config, "return_dict_in_generate": True}
    if processor is not None:
        ours["logits_processor"] = LogitsProcessorList([processor])
    if seed is not None:
        set_seed(seed)
    output = target.generate(**options, **ours)
    if not options["do_sample"] and "max_time" not in options:
        assert torch.equal(output.sequences, target.generate(**options) if plain is None else plain)
    return output
