"""Models whose forward pass is compiled by torch.compile, with the backend, mode and options of the user."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable

import torch
from torch._dynamo import callback, exc
from torch.fx.experimental import _config
from transformers import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)
_calls: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # for each model, its backend and its compiled call
_failures: "weakref.WeakKeyDictionary[PreTrainedModel, str]" = weakref.WeakKeyDictionary()


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether `model.compile()` was called, or `model.forward = torch.compile(model.forward)`."""
    own_forward = model.__dict__.get("forward")
    return model._compiled_call_impl is not None or hasattr(own_forward, "_torchdynamo_orig_callable")


def uncompiled(model: PreTrainedModel) -> contextlib.AbstractContextManager:
    """Returns a context in which the model runs as if it were not compiled."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else contextlib.nullcontext()


def call_compiled(model: PreTrainedModel, view: PreTrainedModel, noticed: Callable[[], None], inputs: dict):
    """Calls the view of a compiled model, compiled for these passes alone, or uncompiled if that fails."""
    # Plain generation compiles for other shapes, and `torch.compile` gives up on a function after too many shapes.
    if why_not_compiled(model) is None:
        try:
            with _watching(noticed):
                return _call_for(model)(view, inputs)  # a compilation that begins is noticed, and shown
        except exc.TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            _failures[model] = f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
            logger.warning(
                f"{type(model).__name__} cannot be compiled for steps of several tokens, so these run uncompiled: "
                f"{_failures[model]}"
            )
    with uncompiled(model):
        return view(**inputs)


def why_not_compiled(model: PreTrainedModel) -> str | None:
    """Returns the error that kept a forward pass of the model from being compiled, or `None` if none did."""
    return _failures.get(model)


@contextlib.contextmanager
def _watching(noticed: Callable[[], None]):
    thread = threading.get_ident()
    compiling = contextlib.ExitStack()
    handler = callback.callback_handler

    def begin(arguments) -> None:
        if threading.get_ident() == thread:
            noticed()
            compiling.enter_context(_config.patch(use_duck_shape=False))  # sizes that are equal now may differ later
            about = "compiling the model, once for each kind of batch"
            compiling.enter_context(logging.tqdm(desc=about, bar_format="{desc} ({elapsed})"))

    handler.register_start_callback(begin)
    try:
        yield
    finally:
        with compiling, contextlib.suppress(ValueError):  # the callback is gone if the compiler was reset
            handler.remove_start_callback(begin)


def _call_for(model: PreTrainedModel) -> Callable:
    """Returns `_call` compiled as the user has compiled the model, except that all sizes are dynamic."""
    backend = _backend_of(model)
    is_default = getattr(backend, "compiler_name", None) == "inductor" and not getattr(backend, "config", None)
    if backend is None or is_default:
        return _compiled_call()
    before, call = _calls.get(model, (None, None))
    if before is not backend:
        call = torch.compile(_call, dynamic=True, backend=backend)
        _calls[model] = backend, call
    return call


def _backend_of(model: PreTrainedModel) -> Callable | None:
    """Returns the backend of the user's compilation, with mode and options, from the end of dynamo's wrapper chain."""
    compiled = model._compiled_call_impl or model.__dict__["forward"]
    names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    if "callback" not in names:
        return None
    found = compiled.__closure__[names.index("callback")].cell_contents
    while hasattr(found, "_torchdynamo_orig_backend"):
        found = found._torchdynamo_orig_backend
    return found


@functools.cache
def _compiled_call():
    return torch.compile(_call, dynamic=True)


def _call(model: PreTrainedModel, inputs: dict):
    return model(**inputs)
