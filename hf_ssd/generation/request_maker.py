"""Requests of a running batch, as transformers' own `generate()` prepares a call."""

import copy
import functools

import torch
from transformers import GenerationConfig, PreTrainedModel

from .. import devices
from ..config import SSDConfig
from ..drafting.resolver import ResolvedDraft
from .api import SSDGenerationMixin, move_stop_strings
from .call_rows import CallRows
from .checks import check_generation, check_row
from .request import Request
from .sequences import Sequences, prompts_without_padding
from .settings import Settings


class RequestMaker:
    """Makes the requests of a running batch of this model, with the settings and the draft of the batch."""

    def __init__(self, model: PreTrainedModel, config: SSDConfig, resolved: ResolvedDraft):
        self.model, self.config, self.resolved = model, config, resolved
        self.vocab_size = model.config.get_text_config(decoder=True).vocab_size

    def request(self, input_ids, changed, seed: int | None, streamer=None, **kwargs) -> Request:
        """Returns a request that calls `changed`. For the others see [`~continuous.ContinuousBatching.add_request`]."""
        ids = torch.as_tensor(input_ids, device=devices.of_model(self.model))
        ids = ids[None] if ids.dim() == 1 else ids
        options = {"ssd_config": None} if isinstance(self.model, SSDGenerationMixin) else {}
        move_stop_strings(self.model, kwargs)
        made = functools.partial(self._made, changed=changed, seed=seed, of_the_user=streamer)
        return self.model.generate(inputs=ids, custom_generate=made, streamer=streamer, **options, **kwargs)

    def _made(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor,
        stopping_criteria,
        generation_config: GenerationConfig,
        changed=None,
        seed: int | None = None,
        of_the_user=None,
        **model_kwargs,
    ) -> Request:
        """A decoding method in the form that `generate(custom_generate=...)` calls, which decodes nothing yet."""
        settings = Settings(logits_processor, stopping_criteria, generation_config, self.config)
        check_generation(model, input_ids, settings, model_kwargs, self.resolved.model)
        check_row(model, input_ids, settings, model_kwargs)
        prompt = prompts_without_padding(input_ids, model_kwargs.get("attention_mask"))[0].tolist()
        padding = input_ids.shape[1] - len(prompt)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        seed = int(torch.randint(2**31, (), generator=generator)) if settings.do_sample else 0  # as in a call
        options = copy.copy(generation_config)
        options.max_length = settings.max_length
        rows = functools.partial(
            CallRows, settings, Sequences(input_ids, settings), seed, self.vocab_size, [padding], streamer=of_the_user
        )
        return Request(prompt, padding, options, seed, rows, changed)
