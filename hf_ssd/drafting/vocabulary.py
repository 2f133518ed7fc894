"""The map between the target's tokens and the draft's. All but the draft model itself works with the target's."""

import torch
from torch.nn.functional import pad


class Vocabulary:
    """
    Args:
        size (`int`): Tokens of the target.
        draft_size (`int`): Tokens of the draft.
        translation ([`Translation`], *optional*): Between different tokenizers. Without one, ids are the same, and the
            longer vocabulary has ids that the other lacks.
        device (`torch.device`, *optional*): Of the draft.

    Attributes:
        common (`int`): How many of the target's tokens the draft has, and may propose.
    """

    def __init__(self, size: int, draft_size: int, translation: "Translation | None" = None, device=None):
        self.size, self.draft_size, self.translation = size, draft_size, translation
        self.common = min(size, draft_size)
        if translation is not None:
            self.common = int(translation.is_common.sum())
            first = torch.tensor([pieces[0] if pieces else 0 for pieces in translation.pieces])
            self.first_pieces = first.to(device)
            self.sources = torch.where(translation.is_common, first, draft_size).to(device)

    def to_draft(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """Returns one token of the draft for each of the target's; any, if the draft lacks it."""
        if self.translation is not None:
            return self.first_pieces[tokens]
        return tokens if self.size <= self.draft_size else torch.where(tokens < self.draft_size, tokens, 0)

    def to_target(self, logits: torch.Tensor) -> torch.Tensor:
        """
        Returns the draft's logits `(..., draft_size)` of the target's tokens, `(..., size)`: -inf of tokens that the
        draft lacks. What only the draft has is left out before anything is drawn, so distributions are exact.
        """
        if self.translation is not None:
            return pad(logits, (0, 1), value=-torch.inf)[..., self.sources]
        if self.size <= self.draft_size:
            return logits[..., : self.size]
        return pad(logits, (0, self.size - self.draft_size), value=-torch.inf)

    def encode(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """Returns the draft's tokens for a text of the target's, token by token: what grows is not read again."""
        if self.translation is None:
            return self.to_draft(tokens)
        pieces = [piece for token in tokens.tolist() for piece in self.translation.pieces[token]]
        return torch.tensor(pieces, dtype=torch.long, device=tokens.device)


class Translation:
    """
    What each token of one tokenizer is in another.

    Args:
        pieces (`list[list[int]]`): For each of the target's tokens those of the draft that make up the same text.
        is_common (`torch.BoolTensor` of shape `(size,)`): Whether the draft has it as one token with the same string.
    """

    def __init__(self, pieces: list[list[int]], is_common: torch.BoolTensor):
        self.pieces, self.is_common = pieces, is_common

    def to_tensor(self) -> torch.LongTensor:
        """Returns it as integers: the number of tokens, whether each is common, how many pieces it has, the pieces."""
        lengths = torch.tensor([len(pieces) for pieces in self.pieces])
        values = torch.tensor([piece for pieces in self.pieces for piece in pieces], dtype=torch.long)
        return torch.cat([torch.tensor([len(lengths)]), self.is_common.long(), lengths, values])

    @classmethod
    def from_tensor(cls, tensor: torch.LongTensor, draft_size: int) -> "Translation":
        """
        Raises:
            `ValueError`: the integers are not what [`~Translation.to_tensor`] gives for a draft of this size.
        """
        size = int(tensor[0]) if len(tensor) else 0
        common, lengths, values = tensor[1 : 1 + size], tensor[1 + size : 1 + 2 * size], tensor[1 + 2 * size :]
        fits = 0 < size and len(lengths) == size and bool((lengths >= 0).all()) and int(lengths.sum()) == len(values)
        fits = fits and bool(((common == 0) | ((common == 1) & (lengths == 1))).all())
        if not fits or (len(values) and not 0 <= int(values.min()) <= int(values.max()) < draft_size):
            raise ValueError(f"{len(tensor)} integers are not the tokens of one vocabulary in another of {draft_size}")
        return cls([part.tolist() for part in values.split(lengths.tolist())], common.bool())
