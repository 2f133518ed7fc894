"""The kinds of drafters by their names in [`SSDConfig`], and which of them fits a draft model."""

from ..config import SSDConfig
from .autoregressive_drafter import AutoregressiveDrafter
from .draft_info import DraftInfo
from .drafter import Drafter
from .head_drafter import HeadDrafter
from .parallel_drafter import BlockDrafter, ParallelDrafter

DRAFTERS: dict[str, type[Drafter]] = {  # "auto" is the first kind that fits the model
    "dflash": BlockDrafter,
    "eagle3": HeadDrafter,
    "mtp": HeadDrafter,  # another head, drafted with in the same way
    "parallel": ParallelDrafter,
    "autoregressive": AutoregressiveDrafter,
}


def drafter_kind(config: SSDConfig, info: DraftInfo) -> type[Drafter]:
    """Returns the kind of drafter that the config names, or raises `ValueError` if the model does not fit it."""
    has_mask_token, reads_target = info.mask_token is not None, bool(info.target_layers)
    if config.drafter == "auto":
        fitting = (kind for kind in DRAFTERS.values() if kind.reads_target == reads_target)
        kind = next(kind for kind in fitting if not kind.one_pass or (has_mask_token and not info.recurrent))
    else:
        kind = DRAFTERS[config.drafter]
    if kind.reads_target != reads_target:
        reads = "reads" if reads_target else "does not read"
        raise ValueError(f"The draft {reads} hidden states of the target; leave out `drafter`.")
    if reads_target and kind.one_pass != has_mask_token:
        fills = "fills" if has_mask_token else "does not fill"
        raise ValueError(f"The draft {fills} a block of mask tokens in one pass; leave out `drafter`.")
    if not kind.one_pass:
        return kind
    if not has_mask_token:
        raise ValueError(
            "The draft was not trained to draft in parallel: its config has no `pard_token`. Leave out "
            'drafter="parallel", or choose a PARD model.'
        )
    if info.recurrent:
        raise ValueError(
            "The draft keeps a recurrent state, which cannot forget the mask tokens of parallel drafting; pass "
            'drafter="autoregressive".'
        )
    if not isinstance(info.mask_token, int) or not 0 <= info.mask_token < info.vocab_size:
        raise ValueError(
            f"The draft's `pard_token` is {info.mask_token!r}, which is not in its vocabulary of {info.vocab_size} "
            'tokens; correct its config, or pass drafter="autoregressive".'
        )
    return kind
