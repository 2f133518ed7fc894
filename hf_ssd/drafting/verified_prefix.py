"""The verified tokens of each row, which all branches share, and their place in the draft's cache."""

import torch
from transformers import PreTrainedModel

from ..cache.branches import extend_with_branches
from ..cache.cached_model import CachedModel
from ..cache.ragged import RaggedCache
from ..devices import from_host
from ..rounds import FINISHED

WORTH_KEEPING = 64  # tokens that all rows share with an earlier call, before its cache is used again


class VerifiedPrefix:
    """
    Rows of different lengths, without padding: column and position are one. Behind its prefix a row has the speculation
    that is being verified.

    Args:
        model (`PreTrainedModel`): The draft model.
        prompts (`list[torch.LongTensor]`): The prompt of each row, at least one token each.
        column_limit (`int`, *optional*): See [`~hf_ssd.cache.cached_model.CachedModel`].
        earlier ([`VerifiedPrefix`], *optional*): Of the call before, with the same model. Where this one continues
            its text, as in a chat, its cache is taken over.

    Attributes:
        ids (`torch.LongTensor` of shape `(batch_size, capacity)`): The tokens.
        lengths (`list[int]`): Verified tokens of each row, with the one that the next outcome follows.
        fed (`list[int]`): Columns of each row, speculation included, whose keys and values are in the cache.
        decoder (`CachedModel`): The draft model and its cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[torch.LongTensor],
        column_limit: int | None,
        earlier: "VerifiedPrefix | None" = None,
    ):
        self.device = model.device
        self.lengths = [len(prompt) for prompt in prompts]
        self.fed = [0] * len(prompts)
        width = max(self.lengths)
        self.ids = torch.zeros(len(prompts), width + 256, dtype=torch.long, device=self.device)
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = prompt
        cache = RaggedCache()
        if earlier is not None and len(earlier.lengths) == len(prompts):
            shared = [self._shared(earlier, row) for row in range(len(prompts))]
            if min(shared) >= WORTH_KEEPING:
                self.fed, cache = shared, earlier.decoder.cache
                cache.take_back()
        self.decoder = CachedModel(model, cache, column_limit=column_limit)

    def _shared(self, earlier: "VerifiedPrefix", row: int) -> int:
        """Returns how many columns of an earlier prefix's cache hold what this one begins with; never all of it."""
        most = min(earlier.fed[row], self.lengths[row] - 1)
        differ = (earlier.ids[row, :most] != self.ids[row, :most]).nonzero()
        return int(differ[0]) if len(differ) else most

    @property
    def rows(self) -> list[int]:
        """The rows that are fed."""
        return list(range(len(self.lengths))) if self.decoder.cache.rows is None else self.decoder.cache.rows

    def ends(self, count: int = 0) -> torch.LongTensor:
        """Returns the column behind each row's prefix and `count` more tokens: `(batch_size, 1)`, on the CPU."""
        return torch.tensor(self.lengths)[:, None] + count

    def write(self, tokens: torch.LongTensor, starts: list[int]) -> None:
        """Writes tokens `(batch_size, M)` into the rows, from the given columns on."""
        stop = max(starts) + tokens.shape[1]
        if stop > self.ids.shape[1]:
            room = torch.zeros(len(self.ids), max(256, stop), dtype=torch.long, device=self.device)
            self.ids = torch.cat([self.ids, room], dim=1)
        columns = from_host(starts, self.device)[:, None] + torch.arange(tokens.shape[1], device=self.device)
        self.ids.scatter_(1, columns, tokens)

    def grow(self, accepted: list[int], bonus: torch.LongTensor) -> None:
        """Takes in the accepted tokens, which stand in their places already, and the bonus token `(batch_size,)`."""
        moved = [n if k == FINISHED else n + k for n, k in zip(self.lengths, accepted)]
        self.write(bonus[:, None], moved)
        self.fed = [min(fed, n) for fed, n in zip(self.fed, moved)]
        self.lengths = [m if k == FINISHED else m + 1 for m, k in zip(moved, accepted)]

    def lacks(self, count: int) -> int:
        """Returns how many tokens [`~VerifiedPrefix.feed`] would feed to each row."""
        return max(self.lengths[row] + count - self.fed[row] for row in self.rows)

    def feed(self, count: int, wanted: int) -> torch.Tensor:
        """
        Feeds each row up to `count` tokens behind its prefix. Rows that lack fewer columns than others feed some once
        more, which changes nothing; rows too short for that write columns beyond their end, which are written again
        before they are seen.

        Args:
            count (`int`): How many tokens of the speculation to feed.
            wanted (`int`): How many of the last columns of each row to return logits for.

        Returns:
            `torch.FloatTensor` of shape `(batch_size, wanted, vocab_size)`: Raw logits, in the model's dtype.
        """
        ends = [n + count for n in self.lengths]
        tokens, starts, width = self._next(count, wanted)
        places = [end - wanted - start for end, start in zip(ends, starts)]
        if min(places) == max(places):
            kept, place = torch.arange(places[0], places[0] + wanted, device=self.device), None
        else:
            kept, place = (torch.tensor(places)[:, None] + torch.arange(wanted)).unique(return_inverse=True)
            kept, place = from_host(kept, self.device), from_host(place, self.device)
        logits = self.decoder.extend(tokens, starts, logits_to_keep=kept)
        self._have_fed(count)
        return logits if place is None else logits[torch.arange(len(ends), device=self.device)[:, None], place]

    def feed_with_branches(self, count: int, forks: torch.LongTensor, branches: torch.LongTensor) -> torch.Tensor:
        """
        Feeds each row up to `count` tokens behind its prefix as [`~VerifiedPrefix.feed`] does, and in the same pass
        whole branches, which leave nothing behind.

        Args:
            count (`int`): How many tokens of the speculation to feed.
            forks (`torch.LongTensor` of shape `(batch_size, N)`): Columns that each branch sees besides its own.
            branches (`torch.LongTensor` of shape `(batch_size, N, T)`): Their tokens.

        Returns:
            `torch.FloatTensor` of shape `(batch_size, N, T, vocab_size)`: Raw logits of the branches.
        """
        tokens, starts, width = self._next(count, 1)
        base = max(max(self.lengths) + count, max(starts) + width)
        logits = extend_with_branches(self.decoder, tokens, starts, forks, branches, base)
        self._have_fed(count)
        return logits

    def forget_speculation(self) -> None:
        """What was fed behind the prefix is written again before it is seen."""
        self.fed = [min(fed, length) for fed, length in zip(self.fed, self.lengths)]

    def _next(self, count: int, at_least: int) -> tuple[torch.LongTensor, list[int], int]:
        """Returns the tokens to feed to each row, the column of the first one, and how many they are."""
        width = max(at_least, self.lacks(count), self.decoder.fewest_tokens)
        starts = [max(0, n + count - width) for n in self.lengths]
        columns = from_host(starts, self.device)[:, None] + torch.arange(width, device=self.device)
        return self.ids.gather(1, columns), starts, width

    def _have_fed(self, count: int) -> None:
        for row in self.rows:
            self.fed[row] = self.lengths[row] + count
