"""A draft model with recurrent layers, and its branches.

A recurrent state cannot be rolled back, and no mask hides a token that it has read. So a draft keeps the states of each
row after several of its tokens, and a pass starts from copies of some of them. Branches are rows of the batch in the
recurrent layers. In layers with attention they are further queries of their row, whose cached columns they share.
"""

import torch
from transformers import DynamicCache, PreTrainedModel

from ..devices import from_host
from .branches import Branches
from .cached_model import CachedModel
from .recurrent import RecurrentCache

# The states of all recurrent layers that a pass has left, each of shape (batch_size, ...), and the row in them.
States = tuple[list[torch.Tensor], int]


class RecurrentDraft(CachedModel):
    """A [`CachedModel`] with recurrent layers that drafts. Its passes run eagerly."""

    cache: RecurrentCache

    def __init__(self, model: PreTrainedModel, rows: int, cache: RecurrentCache | None = None, **options):
        empty = DynamicCache(config=model.config.get_text_config(decoder=True))
        super().__init__(model, cache or RecurrentCache(empty), **options)
        self.cache.shares_columns = self.has_grouped_heads
        # For each row, the states after some numbers of its columns; `None` after none of them.
        self.states: list[dict[int, States | None]] = [{0: None} for _ in range(rows)]

    @property
    def bytes_of_a_row(self) -> int:
        """The size of a row's states, known after the first pass."""
        return sum(one[0].nbytes for one in self.cache.current_states())

    def feed(self, inputs: torch.LongTensor, verified: list[int], count: int, wanted: int) -> torch.Tensor:
        """
        Feeds each row its tokens up to `count` tokens after its verified ones, and keeps the states after each token
        from the last verified one on. Returns the raw logits of the last `wanted` tokens, at most `count + 1`.
        """
        # 1. Start from the last states that all rows have at the same distance from their last verified token.
        rows = self.computed(list(range(len(verified))))
        distances = ({column - verified[row] + 1 for column in self.states[row]} for row in rows)
        known = [distance for distance in set.intersection(*distances) if 0 <= distance <= count + 1 - wanted]
        at = {row: max(n for n in self.states[row] if n < verified[row]) for row in rows}
        if known:
            at = {row: verified[row] - 1 + max(known) for row in rows}

        # 2. Otherwise feed the tokens before the last verified one, until all rows lack equally many of them.
        while len(lacking := {verified[row] - 1 - at[row] for row in rows}) > 1:
            fewest = min(lacking - {0})
            self._step(inputs, at, fewest, [row for row in rows if verified[row] - 1 - at[row] >= fewest])

        # 3. Feed these tokens with the last verified one, and each further token in a pass of its own.
        first = 1 + max(0, *lacking)
        passes = [first, *[1] * (count - max(known, default=0))]
        return torch.cat([self._step(inputs, at, tokens, rows) for tokens in passes][-wanted:], dim=1)

    def _step(self, inputs: torch.LongTensor, at: dict[int, int], count: int, moved: list[int]) -> torch.Tensor:
        """Feeds `count` tokens from column `at[row]` on, and moves `at` for the rows in `moved`, which have so many."""
        starts = [at.get(row, 0) for row in range(len(self.states))]
        columns = from_host(starts, self.device)[:, None] + torch.arange(count, device=self.device)
        self.start_from([self.states[row][column] for row, column in at.items()])
        tokens = inputs.gather(1, columns.clamp(max=inputs.shape[1] - 1))
        logits = self.extend(tokens, starts, logits_to_keep=from_host([count - 1], self.device))
        left = self.cache.current_states()
        for place, row in enumerate(at):
            if row in moved:
                at[row] += count
                self.states[row][at[row]] = left, place
            else:  # the columns after `at` were overwritten
                self.forget(row, at[row])
        return logits

    def start_from(self, sources: list[States | None]) -> None:
        """Lets the next pass start from copies of these states, one for each row of its batch."""
        groups: dict[int, tuple[list[torch.Tensor], list[int], list[int]]] = {}
        for place, source in enumerate(sources):
            states, row = source or (None, 0)
            _, places, rows = groups.setdefault(id(states), (states, [], []))
            places.append(place)
            rows.append(row)
        current = self.cache.current_states()
        if not current:  # before the first pass
            return
        on_device = [(states, *from_host([places, rows], self.device)) for states, places, rows in groups.values()]
        new = [one.new_zeros(len(sources), *one.shape[1:]) for one in current]
        for states, places, rows in on_device:
            for index, one in enumerate(new if states is not None else ()):
                one[places.to(one.device)] = states[index][rows.to(one.device)]
        self.cache.set_states(new)

    def forget(self, row: int, valid: int, needed: int | None = None) -> None:
        """Forgets states after more than `valid` columns, and all but the last of those after at most `needed`."""
        kept = {column: states for column, states in self.states[row].items() if column <= valid}
        if needed is not None:
            last = max(column for column in kept if column <= needed)
            kept = {column: states for column, states in kept.items() if column >= last}
        self.states[row] = kept


class RecurrentBranches(Branches):
    """Branches of a [`RecurrentDraft`], which keep the states and logits of each depth. See [`Branches`]."""

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
        self.decoder.start_from(self.current)
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
        """
        Copies the columns of each row's chosen branch, if that has this fork, to the columns after the fork, and keeps
        its states. Negative: no branch. Returns the rows whose branch was taken, and raw logits `(batch_size, depth,
        vocab_size)`, arbitrary for other rows.
        """
        decoder = self.decoder
        device = self.decoder.device
        depths = range(self.depth)
        now, places = decoder.computed(list(range(len(chosen)))), {row: place for place, row in enumerate(self.rows)}
        rows = [row for row in now if chosen[row] >= 0 and self.columns[places[row]][chosen[row]] == forks[row]]
        if not rows or not self.depth:
            return [], None
        source = [[self.base + depth * self.count + chosen[row] for depth in depths] for row in rows]
        to = [[forks[row] + depth for depth in depths] for row in rows]
        decoder.cache.copy_between_columns([now.index(row) for row in rows], source, to)
        index = from_host([places[row] * self.count + chosen[row] for row in rows], device)
        for depth in depths:
            states = [one[index.to(one.device)] for one in self.states[depth]]
            for place, row in enumerate(rows):
                decoder.states[row][forks[row] + depth + 1] = states, place
        of_all, of_rows = torch.arange(len(chosen), device=device), from_host([max(0, one) for one in chosen], device)
        return rows, torch.stack([logits[of_all, of_rows] for logits in self.logits], dim=1)
