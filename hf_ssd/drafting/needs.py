"""What a drafter needs of a draft model, and what is known of a model before it is loaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftInfo:
    """
    A draft model as the target's side knows it. A worker tells it as it is.

    Args:
        vocab_size (`int`): Number of its tokens.
        mask_token (`int`, *optional*): Of a model that was trained to guess several tokens ahead.
        positions (`int`, *optional*): How many it has, if it has no more and is loaded.
    """

    vocab_size: int
    mask_token: int | None = None
    positions: int | None = None

    @classmethod
    def of(cls, config, positions: int | None = None) -> "DraftInfo":
        """Reads it from a model's config."""
        vocab_size = config.get_text_config(decoder=True).vocab_size
        return cls(vocab_size, getattr(config, "pard_token", None), positions)


@dataclass(frozen=True)
class DrafterNeeds:
    """
    What a kind of drafter declares.

    Args:
        one_pass (`bool`): Whether all tokens of a speculation come from one forward pass, or one from each. The planner
            counts passes by it.
        mask_token (`bool`): Whether the model must have a mask token.
    """

    one_pass: bool = False
    mask_token: bool = False

    def fits(self, info: DraftInfo) -> bool:
        """Whether the model has all of it, so that `drafter="auto"` may choose this kind."""
        return info.mask_token is not None or not self.mask_token

    def check(self, info: DraftInfo) -> None:
        """
        Raises:
            `ValueError`: the model lacks something, or has it wrong.
        """
        if not self.mask_token:
            return
        if info.mask_token is None:
            raise ValueError(
                "The draft was not trained to draft in parallel: its config has no `pard_token`. Leave out "
                'drafter="parallel", or choose a PARD model.'
            )
        if not isinstance(info.mask_token, int) or not 0 <= info.mask_token < info.vocab_size:
            raise ValueError(
                f"The draft's `pard_token` is {info.mask_token!r}, which is not in its vocabulary of {info.vocab_size} "
                'tokens; correct its config, or pass drafter="autoregressive".'
            )
