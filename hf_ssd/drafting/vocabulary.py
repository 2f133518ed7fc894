"""The map between the tokens of target and draft. All code outside the draft model works with the target's tokens."""

import torch
from torch.nn.functional import pad

MOST_PADDING = 128  # by which the vocabulary sizes of a family differ, and pass if there are no tokenizers to compare


class Vocabulary:
    """The tokens of target and draft. Without a translation both use the same ids, and one may have more of them."""

    def __init__(self, size: int, draft_size: int, translation: "Translation | None" = None, device=None):
        self.size, self.draft_size, self.translation = size, draft_size, translation
        self.common = min(size, draft_size)  # of the target's tokens, which the draft may propose
        if translation is not None:
            self.common = int(translation.is_common.sum())
            first = torch.tensor([pieces[0] if pieces else 0 for pieces in translation.pieces])
            self.first_pieces = first.to(device)
            self.sources = torch.where(translation.is_common, first, draft_size).to(device)

    def to_draft(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """Returns a draft token for each target token. A token that the draft lacks is replaced by another token."""
        if self.translation is not None:
            return self.first_pieces[tokens]
        return tokens if self.size <= self.draft_size else torch.where(tokens < self.draft_size, tokens, 0)

    def to_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Turns logits `(..., draft_size)` into those of the target's tokens, -inf for tokens that the draft lacks."""
        if self.translation is not None:
            return pad(logits, (0, 1), value=-torch.inf)[..., self.sources]
        if self.size <= self.draft_size:
            return logits[..., : self.size]
        return pad(logits, (0, self.size - self.draft_size), value=-torch.inf)

    def encode(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """Translates a text token by token, so a text that grows keeps the draft's tokens of its beginning."""
        if self.translation is None:
            return self.to_draft(tokens)
        pieces = [piece for token in tokens.tolist() for piece in self.translation.pieces[token]]
        return torch.tensor(pieces, dtype=torch.long, device=tokens.device)


class Translation:
    """Translates each token of the target's tokenizer into tokens of the draft's tokenizer."""

    def __init__(self, pieces: list[list[int]], is_common: torch.BoolTensor):
        self.pieces, self.is_common = pieces, is_common

    def to_tensor(self) -> torch.LongTensor:
        """Returns integers: the number of tokens, `is_common` of all, how many pieces each has, and all pieces."""
        lengths = torch.tensor([len(pieces) for pieces in self.pieces])
        values = torch.tensor([piece for pieces in self.pieces for piece in pieces], dtype=torch.long)
        return torch.cat([torch.tensor([len(lengths)]), self.is_common.long(), lengths, values])

    @classmethod
    def from_tensor(cls, tensor: torch.LongTensor, draft_size: int) -> "Translation":
        """Raises `ValueError` unless [`~Translation.to_tensor`] can have made these integers for such a draft."""
        size = int(tensor[0]) if len(tensor) else 0
        common, lengths, values = tensor[1 : 1 + size], tensor[1 + size : 1 + 2 * size], tensor[1 + 2 * size :]
        fits = 0 < size and len(lengths) == size and bool((lengths >= 0).all()) and int(lengths.sum()) == len(values)
        fits = fits and bool(((common == 0) | ((common == 1) & (lengths == 1))).all())
        if not fits or (len(values) and not 0 <= int(values.min()) <= int(values.max()) < draft_size):
            raise ValueError(f"{len(tensor)} integers are not the tokens of one vocabulary in another of {draft_size}")
        return cls([part.tolist() for part in values.split(lengths.tolist())], common.bool())
