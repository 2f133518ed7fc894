"""Models with recurrent layers, which are fed again from *checkpoints*: docs/design.md says how (the *refeed*)."""

import math

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..devices import from_host
from .cached_model import CachedModel
from .graphs import are_wanted, power_of_two
from .ragged import RaggedCache
from .row_store import RowStore
from .support import empty_cache
from .view import is_mamba

# Tokens fed again, of all rows together, that take about as long as a pass of their own; docs/design.md says more.
WORTH_A_PASS = 128
SHORTEST_CHUNK = 16  # tokens; the chunks of Mamba-2's kernels are powers of 2

logger = logging.get_logger(__name__)
# The states of all recurrent layers that a pass has left, each of shape (batch_size, ...), and the row in them.
States = tuple[list[torch.Tensor], int]


class NoState(RuntimeError):
    """Raised for a model with recurrent layers whose cache does not get their states."""


class RecurrentModel(CachedModel):
    """A [`CachedModel`] with recurrent layers, of a cache with the prompts, or of an empty cache and `tokens`."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: RaggedCache,
        tokens: RowStore | None = None,
        cuda_graphs: bool | str = False,
        **options,
    ):
        super().__init__(model, cache, **options)
        if self.is_compiled or are_wanted(model, cuda_graphs):  # there is no static storage for states
            name = type(model).__name__
            logger.warning_once(f"{name} has recurrent layers, so its steps run uncompiled and uncaptured.")
        self.of_mamba = {
            layer: (layer.chunk_size, layer.time_step_limit) for layer in self.view.modules() if is_mamba(layer)
        }
        # For each row, the states after some numbers of its columns; `None` after none of them.
        self.states: list[dict[int, States | None]]
        if tokens is None:
            left, columns = cache.current_states(), cache.get_seq_length()
            if not left:
                raise NoState("it keeps no recurrent state in its cache")
            self.tokens = RowStore(torch.zeros(len(left[0]), columns, dtype=torch.long, device=self.device))
            self.states = [{columns: (left, row)} for row in range(len(left[0]))]
        else:
            self.tokens = tokens
            self.states = [{0: None} for _ in tokens.values]
        self.first = list(self.states)  # a call may end at a token before the last checkpoint
        self.reads_prompts = False
        self.refed = 0  # tokens, of all rows together, fed again since refeeds were shortened last

    @property
    def checkpoints(self) -> list[int]:
        """The first column of each row that its checkpoint has not read."""
        return [min(of_row) for of_row in self.states]

    def extend(self, tokens: torch.LongTensor, lengths: list[int]) -> torch.Tensor:
        """See [`CachedModel.extend`]. The first `lengths` columns of each row are verified from now on."""
        # 1. Keep the states of the last pass as checkpoints of rows in which all tokens of that pass are verified.
        self.tokens.write(tokens, lengths)
        rows, count = self.computed(list(range(len(lengths)))), tokens.shape[1]
        self._keep_last(rows, lengths)

        # 2. If refeeds have cost as much as a pass, shorten them by a pass over verified tokens alone, over the number
        #    of tokens that saves the most.
        refeeds = [n - checkpoint for n, checkpoint in zip(lengths, self.checkpoints)]
        waiting = [refeeds[row] for row in rows]
        if max(waiting) and self.refed >= WORTH_A_PASS:
            self._commit(rows, lengths, max(waiting, key=lambda n: n * sum(other >= n for other in waiting)))
            refeeds, self.refed = [n - checkpoint for n, checkpoint in zip(lengths, self.checkpoints)], 0
        longest = max(refeeds[row] for row in rows)
        self.refed = self.refed + longest * len(rows) if longest else 0

        # 3. Feed the tokens after the checkpoints and the new tokens, whose logits stand at different places.
        new = torch.zeros(len(lengths), count, dtype=torch.long)
        new[rows] = torch.tensor(refeeds)[rows, None] + torch.arange(count)
        kept, places = new[rows].unique(return_inverse=True)
        logits = self._feed(self.checkpoints, longest + count, [n + count for n in lengths], kept)
        order = torch.arange(len(lengths), device=logits.device)[:, None]
        if self.features is not None:
            self.features = self.features[order, from_host(new, logits.device)]
        new[rows] = places
        return logits[order, from_host(new, logits.device)]

    def run(self, inputs, logits_to_keep=None):
        branches = self.cache.branches
        if branches > 1:  # rows of a batch, whose single tokens stand in `inputs` as tokens of one row
            inputs = {name: _of_branches(value, branches) for name, value in inputs.items()}
        tokens, is_prefill = inputs["input_ids"].shape[1], self.reads_prompts or not self.cache.storage
        # transformers pads tokens to a chunk, which only groups the arithmetic, and bounds Mamba-2's step sizes only
        # where it computes several tokens at once: in plain generation those of the prompts.
        for layer, (size, limit) in self.of_mamba.items():
            layer.chunk_size = min(size, max(SHORTEST_CHUNK, power_of_two(tokens)))
            layer.time_step_limit = limit if is_prefill else (0.0, math.inf)
        logits = super().run(inputs, logits_to_keep)
        return logits if branches == 1 else logits.view(-1, branches, logits.shape[-1])

    def of_one_row(self, cache=None, known=()):
        tokens = RowStore(from_host(list(known), self.device)[None])
        states = None if cache is None else (cache.current_states(), 0)
        cache = RaggedCache(empty_cache(self.model)) if cache is None else cache
        reader = RecurrentModel(self.model, cache, tokens, **self._of_one_row())
        reader.states = [{len(known): states}]
        reader.length, reader.reads_prompts = len(known), True
        return reader

    def reusable(self, row, count):
        return max((column for column in self.states[row] if column <= count), default=0)

    def of_row(self, row, count):
        cache = super().of_row(row, count)
        cache.set_states(self.copies([self.states[row][count]]))
        return cache

    def _read(self, tokens):
        self.tokens.write(tokens, [self.length])
        end = self.length + tokens.shape[1]
        self._feed([self.length], tokens.shape[1], [end], torch.zeros(1, dtype=torch.long))
        self.forget(0, end, end)

    def take_row(self, row, other):
        super().take_row(row, other)
        self.states[row] = {other.length: other.states[0][other.length]}
        self.tokens.put(row, 0, other.tokens.values[0, : other.length])

    def finish(self, output, fed, columns_before):
        rows, last = list(range(len(output))), columns_before + output.shape[1] - 1
        self.cache.take_back()
        self.states = [first | now for first, now in zip(self.first, self.states)]
        self._keep_last(rows, [columns_before + count for count in fed])
        self.tokens.write(output, [columns_before] * len(rows))
        while min(self.checkpoints) < last:
            self._commit(rows, [last] * len(rows), min(last - n for n in self.checkpoints if n < last))
        self.cache.set_states(self.copies([self.states[row][last] for row in rows]))

    def _commit(self, rows: list[int], ends: list[int], count: int) -> None:
        """Moves checkpoints forward by `count` tokens, for the rows that have so many verified tokens before `ends`."""
        self._feed(self.checkpoints, count, ends, torch.zeros(1, dtype=torch.long))
        self._keep_last(rows, ends)

    def _keep_last(self, rows: list[int], columns: list[int]) -> None:
        """Keeps the last states of each row after at most so many columns."""
        for row in rows:
            self.forget(row, columns[row], columns[row])

    def _feed(self, at: list[int], count: int, ends: list[int], logits_to_keep: torch.LongTensor) -> torch.Tensor:
        """Feeds `count` tokens to each row after its states at `at` columns; those from `ends` on are fillers."""
        columns = from_host(at, self.device)[:, None] + torch.arange(count, device=self.device)
        # The last token is repeated: any other might have values that are not finite.
        columns = columns.minimum(from_host(ends, self.device)[:, None] - 1)
        rows = self.computed(list(range(len(at))))
        sources = [self.states[row][at[row]] for row in rows]
        if len({id(source and source[0]) for source in sources}) > 1:
            # One tensor of all rows: the tensors of many passes would each keep the states of all rows.
            together = self.copies(sources)
            sources = [(together, place) for place in range(len(rows))]
        for row, source in zip(rows, sources):
            self.forget(row, at[row])  # the columns after these are overwritten
            self.states[row][at[row]] = source
        self.cache.set_states(self.copies(sources))
        logits = super().extend(self.tokens.at(columns), at, from_host(logits_to_keep, self.device))
        left = self.cache.current_states()
        if not left:
            raise NoState("it keeps no recurrent state in its cache")
        for place, row in enumerate(rows):
            if at[row] + count <= ends[row]:
                self.states[row][at[row] + count] = left, place
        return logits

    def copies(self, sources: list[States | None]) -> list[torch.Tensor]:
        """Returns a copy of these states for each row of a batch; an empty list before the first pass."""
        passes = [source[0] for source in sources if source]
        states = passes[0] if passes else self.cache.current_states()
        if len(passes) == len(sources) and all(of_pass is states for of_pass in passes):
            rows = from_host([row for _, row in sources], self.device)
            return [one[rows.to(one.device)] for one in states]
        return [
            torch.stack([source[0][index][source[1]] if source else torch.zeros_like(one[0]) for source in sources])
            for index, one in enumerate(states)
        ]

    def forget(self, row: int, valid: int, needed: int | None = None) -> None:
        """Forgets states after more than `valid` columns, and all but the last of those after at most `needed`."""
        kept = {column: states for column, states in self.states[row].items() if column <= valid}
        if needed is not None:
            last = max(column for column in kept if column <= needed)
            kept = {column: states for column, states in kept.items() if column >= last}
        self.states[row] = kept


def _of_branches(value, branches: int):
    """Returns an input of rows as an input of branches: tokens, columns and positions, or a mask with a query each."""
    if isinstance(value, dict):
        return {name: _of_branches(one, branches) for name, one in value.items()}
    if value is None or value.dim() < 4:
        return value if value is None else value.flatten(-2).unsqueeze(-1)
    return value.transpose(1, 2).flatten(0, 1).unsqueeze(1)
