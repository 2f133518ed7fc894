"""Requests of a running batch, as transformers' own `generate()` prepares a call."""

import contextlib
import threading
from collections.abc import Callable

import torch

from .. import devices
from ..cache.cached_model import CachedModel
from .api import SSDGenerationMixin, move_stop_strings
from .checks import check_generation, check_row
from .deciding import CallRows
from .loop import Pair
from .sequences import Sequences
from .settings import Settings


class Request(CallRows):
    """A row that is to join a running batch. `on_change` is called in the thread that decodes."""

    def __init__(
        self, settings: Settings, sequences: Sequences, seed: int, vocab_size: int, streamer, on_change: Callable
    ):
        super().__init__(settings, sequences, seed, vocab_size, streamer=streamer)
        self.prompt, self.padding = sequences.prompts[0].tolist(), sequences.padding[0]
        self.text = list(self.prompt)  # and all tokens since; columns of all but the last are in the target's cache
        self.options, self.seed, self.on_change = settings.of_the_draft, seed, on_change
        self.read = 0  # tokens of the prompt that the target has read
        self.known = 0  # of these, whose columns are copies
        self.reader: CachedModel | None = None
        self.following: torch.LongTensor | None = None  # what is verified, see [`Sequences.propose`]
        self.output: torch.LongTensor | None = None
        self.error: BaseException | None = None
        self.is_cancelled = False  # set in any thread
        self.has_ended = threading.Event()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the request with its output, or with an error."""
        if self.has_ended.is_set():
            return
        try:
            if error is None:
                self.output = self.finish()
            self.error = error
        except Exception as raised:  # by the streamer
            self.error = raised
        # Nothing of it waits until Python collects cycles, least of all the target's cache.
        self.target = self.reader = None
        self.has_ended.set()
        with contextlib.suppress(Exception):
            self.on_change(self)


def make_request(pair: Pair, input_ids, on_change, seed: int | None = None, streamer=None, **kwargs) -> Request:
    """Returns a request of this pair. For the arguments see [`~continuous.ContinuousBatching.add_request`]."""
    model = pair.model
    ids = torch.as_tensor(input_ids, device=devices.of_model(model))
    ids = ids[None] if ids.dim() == 1 else ids
    move_stop_strings(model, kwargs)
    options = {"ssd_config": None} if isinstance(model, SSDGenerationMixin) else {}

    def made(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs) -> Request:
        """A decoding method in the form that `generate(custom_generate=...)` calls, which decodes nothing yet."""
        settings = Settings(logits_processor, stopping_criteria, generation_config, pair.config)
        check_generation(model, input_ids, settings, model_kwargs, pair.resolved.model)
        check_row(model, input_ids, settings, model_kwargs)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        drawn = int(torch.randint(2**31, (), generator=generator)) if generation_config.do_sample else 0  # as in a call
        sequences = Sequences(input_ids, settings, model_kwargs.get("attention_mask"))
        return Request(settings, sequences, drawn, pair.vocab_size, streamer, on_change)

    return model.generate(inputs=ids, custom_generate=made, streamer=streamer, **options, **kwargs)
