"""The speculators of a draft model for successive calls, and the cache shapes that learn over these calls."""

from transformers import PreTrainedModel

from .. import devices
from ..config import SSDConfig
from ..rounds import BY_TARGET
from .cache_shapes import CacheShape, shape_for
from .drafters import drafter_for, drafter_kind
from .needs import DraftInfo
from .speculator import Speculator
from .verified_prefix import VerifiedPrefix
from .vocabulary import Vocabulary

SHAPES_KEPT = 32  # cache shapes kept between calls; a service may see a new temperature in each call
SEED_STEP = 1_000_003  # between the noise seeds of two successive calls


def is_fixed(config: SSDConfig) -> bool:
    """Whether no setting of a call depends on the clock, or on measurements that the planner made in earlier calls."""
    return "auto" not in (config.lookahead, config.budget)


def has_fallback(request) -> bool:
    """Whether a fallback, not the draft, proposes after a miss, so that proposals depend on the prepared outcomes."""
    return not isinstance(request.config.fallback, str) or request.config.fallback in BY_TARGET


def seed_of_call(request, call: int, is_same_ahead: bool = True) -> int:
    """
    Returns the seed of the draft's noise. If proposals depend on earlier calls, each call, numbered from 1, gets a
    different seed: values that were learned in a call with the same seed must not meet the same noise again. For
    `is_same_ahead` see [`~hf_ssd.drafting.drafter.Drafter`].
    """
    depends = (request.config.asynchronous and not is_same_ahead) or has_fallback(request)
    is_taught = request.config.lookahead == "auto" or (depends and not is_fixed(request.config))
    return request.seed + SEED_STEP * (call - 1) * is_taught


class Drafts:
    """Makes a speculator for each call of a draft model, and keeps the cache shapes between calls."""

    def __init__(self):
        self.calls = 0
        self.shapes: dict[tuple, CacheShape] = {}

    def speculator(self, model: PreTrainedModel, request, earlier: VerifiedPrefix | None = None) -> Speculator:
        """Returns the speculator of a call, which may continue the `earlier` prefix of the last call."""
        config, generation = request.config, request.generation_config
        self.calls += 1
        key = (str(config.fan_out), generation.temperature if generation.do_sample else None)
        is_same_ahead = drafter_kind(config, DraftInfo.of(model.config)).is_same_ahead
        depends = not is_same_ahead or has_fallback(request)
        if depends and is_fixed(config) and generation.do_sample:
            shape = shape_for(config)  # misses decide on proposals, so they must not depend on earlier calls
        else:
            shape = self.shapes[key] = self.shapes.pop(key, None) or shape_for(config)  # now last in order
        if len(self.shapes) > SHAPES_KEPT:
            del self.shapes[next(iter(self.shapes))]
        seed = seed_of_call(request, self.calls, is_same_ahead)
        own = model.config.get_text_config(decoder=True).vocab_size
        vocabulary = Vocabulary(request.vocab_size, own, request.translation, devices.of_model(model))
        drafter = drafter_for(
            model,
            config,
            generation,
            request.prompts,
            seed,
            earlier,
            request.prompt_length,
            request.num_workers,
            vocabulary,
        )
        place = {"worker_index": request.worker_index, "num_workers": request.num_workers}
        return Speculator(drafter, config, shape, generation.max_length, **place)
