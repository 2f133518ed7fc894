"""A draft model with recurrent layers, which keeps the states of each row after several of its tokens."""

import torch
from transformers import PreTrainedModel

from ..devices import from_host
from .branches import Branches
from .ragged import RaggedCache
from .recurrent import RecurrentModel
from .row_store import RowStore
from .support import empty_cache


class RecurrentDraft(RecurrentModel):
    """A [`RecurrentModel`] that drafts after the `tokens` of its rows. Its passes run eagerly."""

    def __init__(self, model: PreTrainedModel, tokens: RowStore, cache: RaggedCache | None = None, **options):
        super().__init__(model, cache or RaggedCache(empty_cache(model)), tokens, **options)
        self.cache.shares_columns = self.has_grouped_heads

    @property
    def bytes_of_a_row(self) -> int:
        """The size of a row's states, known after the first pass."""
        return sum(one[0].nbytes for one in self.cache.current_states())

    def feed(self, verified: list[int], count: int, wanted: int) -> torch.Tensor:
        """Feeds each row up to `count` tokens after its verified ones. Returns raw logits of the last `wanted`."""
        # 1. Start from the last states that all rows have at the same distance from their last verified token.
        rows = self.computed(list(range(len(verified))))
        distances = ({column - verified[row] + 1 for column in self.states[row]} for row in rows)
        known = [distance for distance in set.intersection(*distances) if 0 <= distance <= count + 1 - wanted]
        at = [max(column for column in states if column < end) for states, end in zip(self.states, verified)]
        if known:
            at = [n - 1 + max(known) for n in verified]

        # 2. Otherwise feed the tokens before the last verified one, until all rows lack equally many of them.
        while len(lacking := {verified[row] - 1 - at[row] for row in rows}) > 1:
            fewest = min(lacking - {0})
            self._feed(at, fewest, verified, torch.tensor([fewest - 1]))
            at = [n + fewest if n + fewest < end else n for n, end in zip(at, verified)]

        # 3. Feed these tokens with the last verified one, and each further token in a pass of its own.
        logits, ends = [], [n + count for n in verified]
        for tokens in (1 + max(0, *lacking), *[1] * (count - max(known, default=0))):
            logits.append(self._feed(at, tokens, ends, torch.tensor([tokens - 1])))
            at = [n + tokens for n in at]
        return torch.cat(logits[-wanted:], dim=1)


class RecurrentBranches(Branches):
    """[`Branches`] of a [`RecurrentDraft`], with states and logits of each depth. Recurrent layers see them as rows."""

    decoder: RecurrentDraft

    def __init__(self, decoder: RecurrentDraft, forks: torch.LongTensor, base: int, depth: int):
        super().__init__(decoder, forks, base, depth)
        self.rows = decoder.computed(list(range(len(decoder.states))))
        self.columns = decoder.computed(forks).tolist()  # the same as `forks`, on the host
        self.current = [
            decoder.states[row][column] for row, columns in zip(self.rows, self.columns) for column in columns
        ]
        self.states: list[list[torch.Tensor]] = []
        self.logits: list[torch.Tensor] = []

    def grow(self, tokens):
        cache = self.decoder.cache
        cache.set_states(self.decoder.copies(self.current))
        cache.branches = self.count
        try:
            logits = super().grow(tokens)
        finally:
            cache.branches = 1
        self.states.append(cache.current_states())
        self.current = [(self.states[-1], place) for place in range(len(self.current))]
        self.logits.append(logits)
        return logits

    def adopt(self, chosen: list[int], forks: list[int]) -> tuple[list[int], torch.Tensor | None]:
        """Takes in chosen branches that have these forks. Returns their rows, and raw logits, arbitrary for others."""
        decoder, device, depths = self.decoder, self.decoder.device, range(self.depth)
        now, places = decoder.computed(list(range(len(chosen)))), {row: place for place, row in enumerate(self.rows)}
        rows = [row for row in now if chosen[row] >= 0 and self.columns[places[row]][chosen[row]] == forks[row]]
        if not rows or not self.depth:
            return [], None
        first = {row: self.base + chosen[row] for row in rows}
        moves = [(row, first[row] + depth * self.count, forks[row] + depth) for row in rows for depth in depths]
        decoder.cache.move_columns(moves)
        index = from_host([places[row] * self.count + chosen[row] for row in rows], device)
        for depth in depths:
            states = [one[index.to(one.device)] for one in self.states[depth]]
            for place, row in enumerate(rows):
                decoder.states[row][forks[row] + depth + 1] = states, place
        of_all, of_rows = torch.arange(len(chosen), device=device), from_host([max(0, one) for one in chosen], device)
        return rows, torch.stack([logits[of_all, of_rows] for logits in self.logits], dim=1)
