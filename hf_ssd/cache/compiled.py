"""Models whose forward pass is compiled by torch.compile.

Whatever differs from one call to the next must be a tensor's values or a size that was compiled as dynamic: a number
that changes would be compiled again each time. So a compiled forward pass sees a *window* of its cache, a view that
stays the same for many steps, and masks hide the columns that are not in use. A prefill runs uncompiled.
"""

import contextlib
import functools
import threading

import torch
from torch._dynamo import callback
from torch.fx.experimental import _config
from transformers import PreTrainedModel
from transformers.utils import logging

LONGEST_STEP = 64  # tokens of each row; more than that is a prefill
FEWEST_TOKENS = 2  # that are fed to each row: torch.compile treats a size of 1 as a case of its own


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether `model.compile()` was called, or `model.forward = torch.compile(model.forward)`."""
    own_forward = model.__dict__.get("forward")
    return model._compiled_call_impl is not None or hasattr(own_forward, "_torchdynamo_orig_callable")


def uncompiled(model: PreTrainedModel) -> contextlib.AbstractContextManager:
    """Returns a context in which the model runs as if it were not compiled."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else contextlib.nullcontext()


def call_compiled(model: PreTrainedModel, **inputs):
    """
    Calls a model as compiled for this purpose alone: plain generation compiles it for other shapes, and torch.compile
    gives up on a function that has been compiled for too many. A progress bar shows when something is compiled.
    """
    with _noticed(), _config.patch(use_duck_shape=False):  # sizes that are equal now need not be so the next time
        return _compiled_call()(model, inputs)


@contextlib.contextmanager
def _noticed():
    """Counts what is compiled in this thread, and shows that it is."""
    thread, bars = threading.get_ident(), []

    def begin(arguments) -> None:
        if threading.get_ident() == thread:
            _now.count += 1
            about = "compiling the model, once for each kind of batch"
            bars.append(logging.tqdm(desc=about, bar_format="{desc} ({elapsed})"))

    handler = callback.callback_handler
    handler.register_start_callback(begin)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # somebody has reset the compiler
            handler.remove_start_callback(begin)
        for bar in bars:
            bar.close()


def compilations() -> int:
    """Returns how often [`call_compiled`] has compiled something in this thread."""
    return _now.count


class _Now(threading.local):
    count = 0


_now = _Now()


@functools.cache
def _compiled_call():
    return torch.compile(_call, dynamic=True)


def _call(model: PreTrainedModel, inputs: dict):
    return model(**inputs)
