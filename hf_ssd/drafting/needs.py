"""The properties that a drafter needs of a draft model, and the facts that are known of a model before it is loaded."""

from dataclasses import dataclass

from ..cache.support import is_recurrent


@dataclass(frozen=True)
class DraftInfo:
    """The facts about a draft model that the target's process knows. A worker sends those of the model it loaded."""

    vocab_size: int
    mask_token: int | None = None  # of a model that was trained to guess several tokens ahead
    positions: int | None = None  # their number, if the model is loaded and it is limited
    recurrent: bool = False  # whether some layers keep a recurrent state
    target_layers: tuple[int, ...] = ()  # of the target, whose hidden states the model reads
    target_keys: tuple[int, ...] = ()  # layers of the target whose keys and values the model reads
    target_width: int = 0  # size of these hidden states, keys and values of a token together
    drafts_in_turn: bool = False  # whether the model drafts in the target's process alone

    def __post_init__(self):
        for name in ("target_layers", "target_keys"):  # lists where they came as JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def of(cls, config, positions: int | None = None) -> "DraftInfo":
        """Reads the facts from a model's config."""
        vocab_size = config.get_text_config(decoder=True).vocab_size
        names = ("target_layers", "target_keys", "target_width", "drafts_in_turn")
        of_heads = {name: getattr(config, name) for name in names if hasattr(config, name)}
        mask_token = getattr(config, "pard_token", None)
        return cls(vocab_size, mask_token, positions, is_recurrent(config), **of_heads)


@dataclass(frozen=True)
class DrafterNeeds:
    """The properties that a kind of drafter declares."""

    one_pass: bool = False  # whether a forward pass gives all tokens of a speculation, as the planner must know
    mask_token: bool = False  # whether the model must have one
    # Whether the drafter reads the target's, at the layers that the model names. Such a model is made for one target.
    hidden_states: bool = False

    def fits(self, info: DraftInfo) -> bool:
        """Whether the model has all needed properties, so that `drafter="auto"` may choose this kind."""
        has_mask_token = not self.mask_token or (info.mask_token is not None and not info.recurrent)
        return has_mask_token and self.hidden_states == bool(info.target_layers)

    def check(self, info: DraftInfo) -> None:
        """
        Raises `ValueError` if the drafter needs a mask token, and the model has none, or an invalid one, or a recurrent
        state, which cannot forget mask tokens; or if only one of them reads hidden states.
        """
        if self.hidden_states != bool(info.target_layers):
            other = "reads" if info.target_layers else "does not read"
            raise ValueError(f"The draft {other} hidden states of the target; leave out `drafter`.")
        if self.hidden_states and self.mask_token != (info.mask_token is not None):
            fills = "fills" if info.mask_token is not None else "does not fill"
            raise ValueError(f"The draft {fills} a block of mask tokens in one pass; leave out `drafter`.")
        if not self.mask_token:
            return
        if info.mask_token is None:
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
