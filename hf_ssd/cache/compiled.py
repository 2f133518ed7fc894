"""Models whose forward pass is compiled by torch.compile.

Whatever differs from one call to the next must be a tensor's values or a size that was compiled as dynamic: a number
that changes would be compiled again each time. So the forward pass of a compiled model sees a *window* of its cache, a
view that stays the same for many steps, and masks hide the columns that are not in use. A prefill is not like the rest,
and runs as if the model were not compiled.
"""

import functools

import torch
from transformers import PreTrainedModel

LONGEST_STEP = 64  # tokens of each row; more than that is a prefill
FEWEST_TOKENS = 2  # of each row that a draft feeds: torch.compile treats a size of 1 as a case of its own

uncompiled = functools.partial(torch.compiler.set_stance, "force_eager")
"""Context in which compiled models run as if they were not."""


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether `model.compile()` was called, or `model.forward = torch.compile(model.forward)`."""
    own_forward = model.__dict__.get("forward")
    return model._compiled_call_impl is not None or hasattr(own_forward, "_torchdynamo_orig_callable")
