"""The speculators of a draft model for successive calls, and the cache shapes that learn over these calls."""

import itertools

from transformers import PreTrainedModel

from ..config import REJECTION, SSDConfig
from ..rounds import BY_TARGET
from .cache_shapes import CacheShape, shape_for
from .draft_info import DraftInfo
from .drafters import drafter_kind
from .request import SessionRequest
from .speculator import Speculator
from .verified_prefix import VerifiedPrefix

SHAPES_KEPT = 32  # cache shapes kept between calls; a service may see a new temperature in each call
SEED_STEP, SEEDS = 1_000_003, 2**31  # between the seeds of two successive calls, and how many there are
_calls = itertools.count()


def is_fixed(config: SSDConfig) -> bool:
    """Whether no setting of a call depends on the clock, or on measurements that the planner made in earlier calls."""
    return config.lookahead == 0 or "auto" not in (config.lookahead, config.budget)


def has_fallback(request: SessionRequest) -> bool:
    """Whether a fallback, not the draft, proposes after a miss, so that proposals depend on the prepared outcomes."""
    return not isinstance(request.config.fallback, str) or request.config.fallback in BY_TARGET


def seed_of_call(request: SessionRequest, seed: int, reads_target: bool) -> int:
    """
    Returns the seed of a call's noise: another seed in each call if proposals depend on earlier calls, so that values
    that were learned do not meet the noise again that they were learned with. Coupled tokens depend on no proposals.
    """
    depends = (request.config.asynchronous and reads_target) or has_fallback(request)
    is_taught = request.config.lookahead == "auto" or (depends and not is_fixed(request.config))
    is_taught = is_taught and request.config.verification == REJECTION
    return (seed + SEED_STEP * next(_calls) * is_taught) % SEEDS


class Drafts:
    """Makes a speculator for each call of a draft model, and keeps the cache shapes between calls."""

    def __init__(self):
        self.shapes: dict[tuple, CacheShape] = {}

    def speculator(
        self, model: PreTrainedModel, request: SessionRequest, earlier: VerifiedPrefix | None = None
    ) -> Speculator:
        """Returns the speculator of a call, which may continue the `earlier` prefix of the last call."""
        config, generation = request.config, request.generation_config
        rule = (generation.temperature, config.verification, config.saguaro_c) if generation.do_sample else None
        key = (str(config.fan_out), rule)
        kind = drafter_kind(config, DraftInfo.of(model.config))
        if (kind.reads_target or has_fallback(request)) and is_fixed(config) and generation.do_sample:
            shape = shape_for(config)  # misses decide on proposals, so they must not depend on earlier calls
        else:
            shape = self.shapes[key] = self.shapes.pop(key, None) or shape_for(config)  # now last in order
        if len(self.shapes) > SHAPES_KEPT:
            del self.shapes[next(iter(self.shapes))]
        drafter = kind(model, request, earlier)
        if request.keep_prefixes and not kind.reads_target:  # other calls may run beside a running batch
            request.kept.begin(model, request.keep_prefixes)
            drafter.prefix.kept = request.kept
        return Speculator(drafter, shape, request)
