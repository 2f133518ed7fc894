"""The properties that a drafter needs of a draft model, and the facts that are known of a model before it is loaded."""

from dataclasses import dataclass

from ..cache.support import is_recurrent


@dataclass(frozen=True)
class DraftInfo:
    """
    The facts about a draft model that the target's process knows. A worker sends the facts about the model it loaded.

    Args:
        vocab_size (`int`): Size of the model's vocabulary.
        mask_token (`int`, *optional*): The mask token of a model that was trained to guess several tokens ahead.
        positions (`int`, *optional*): Number of positions, if the model is loaded and has a limited number of them.
        recurrent (`bool`): Whether some layers keep a recurrent state.
    """

    vocab_size: int
    mask_token: int | None = None
    positions: int | None = None
    recurrent: bool = False

    @classmethod
    def of(cls, config, positions: int | None = None) -> "DraftInfo":
        """Reads the facts from a model's config."""
        vocab_size = config.get_text_config(decoder=True).vocab_size
        return cls(vocab_size, getattr(config, "pard_token", None), positions, is_recurrent(config))


@dataclass(frozen=True)
class DrafterNeeds:
    """
    The properties that a kind of drafter declares.

    Args:
        one_pass (`bool`): Whether a single forward pass gives all tokens of a speculation, instead of a single token.
            The planner computes the number of passes from it.
        mask_token (`bool`): Whether the model must have a mask token.
    """

    one_pass: bool = False
    mask_token: bool = False

    def fits(self, info: DraftInfo) -> bool:
        """Whether the model has all needed properties, so that `drafter="auto"` may choose this kind."""
        return not self.mask_token or (info.mask_token is not None and not info.recurrent)

    def check(self, info: DraftInfo) -> None:
        """
        Raises:
            `ValueError`: the drafter needs a mask token, and the model has no mask token, or an invalid mask token, or
                a recurrent state, which cannot forget mask tokens.
        """
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
