"""The kinds of drafters by their names in [`SSDConfig`]."""

from ..config import SSDConfig
from .autoregressive_drafter import AutoregressiveDrafter
from .block_drafter import BlockDrafter
from .drafter import Drafter
from .head_drafter import HeadDrafter
from .needs import DraftInfo
from .parallel_drafter import ParallelDrafter

DRAFTERS: dict[str, type[Drafter]] = {  # "auto" is the first kind that fits the model
    "dflash": BlockDrafter,
    "eagle3": HeadDrafter,
    "mtp": HeadDrafter,  # another head, drafted with in the same way
    "parallel": ParallelDrafter,
    "autoregressive": AutoregressiveDrafter,
}


def drafter_kind(config: SSDConfig, info: DraftInfo) -> type[Drafter]:
    """Returns the kind of drafter that the config names. A kind that is named explicitly may not fit the model."""
    fitting = (kind for kind in DRAFTERS.values() if kind.needs.fits(info))
    return next(fitting) if config.drafter == "auto" else DRAFTERS[config.drafter]


def drafter_for(model, config: SSDConfig, *others, **options) -> Drafter:
    """Returns the drafter that the config asks for. For the arguments see [`Drafter`]."""
    return drafter_kind(config, DraftInfo.of(model.config))(model, config, *others, **options)
