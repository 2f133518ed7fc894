"""The facts that are known of a draft model before it is loaded."""

from dataclasses import dataclass

from ..cache.support import is_recurrent

OF_HEADS = ("target_layers", "target_keys", "target_width")


@dataclass(frozen=True)
class DraftInfo:
    """What the target's process knows of a draft model. A worker sends the facts of the model that it loaded."""

    vocab_size: int
    mask_token: int | None = None  # of a model that was trained to guess several tokens ahead
    positions: int | None = None  # their number, if the model is loaded and it is limited
    recurrent: bool = False  # whether some layers keep a recurrent state
    target_layers: tuple[int, ...] = ()  # of the target, whose hidden states the model reads
    target_keys: tuple[int, ...] = ()  # layers of the target whose keys and values the model reads
    target_width: int = 0  # size of these hidden states, keys and values of a token together

    def __post_init__(self):
        for name in ("target_layers", "target_keys"):  # lists where they came as JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def of(cls, config, positions: int | None = None) -> "DraftInfo":
        vocab_size = config.get_text_config(decoder=True).vocab_size
        of_heads = {name: getattr(config, name) for name in OF_HEADS if hasattr(config, name)}
        return cls(vocab_size, getattr(config, "pard_token", None), positions, is_recurrent(config), **of_heads)
