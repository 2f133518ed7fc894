"""Models that have recurrent layers, whose state sums up all previous tokens, beside layers with attention.

A recurrent state cannot be rolled back to an earlier token. So each row has a *checkpoint*: its states after a verified
token. A forward pass starts from a copy of the checkpoint. It is fed the verified tokens after the checkpoint again
(the *refeed*) and then the new tokens. If all new tokens are verified later, the states at the end of the pass become
the checkpoint; otherwise the checkpoint stays. When refeeds have taken as long as a pass, a pass over verified tokens
alone shortens them.

A checkpoint has only read tokens of its row. All rows of a pass are fed the same number of tokens. A row that has fewer
tokens is fed its last token again, which its own tokens never see, and its checkpoint stays.
"""

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from ..devices import from_host
from .cached_model import CachedModel
from .ragged import RaggedCache, RaggedLayer
from .row_store import RowStore

# Tokens fed again, of all rows together, that take about as long as a pass of their own; docs/design.md says more.
WORTH_A_PASS = 128


class RecurrentLayer(LinearAttentionLayer):
    """The states of a layer. Forward passes change a copy, in the attributes that transformers reads."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept: list[torch.Tensor] = []  # the checkpoint: (batch_size, ...), rows in their original order

    def copy_checkpoint(self, rows: list[int] | None) -> None:
        """Lets the next forward pass start from a copy of the checkpoint of these rows, or of all of them."""
        for (states, index), kept in zip(self.places(), self.kept):
            states[index] = kept.clone() if rows is None else kept[from_host(rows, kept.device)]

    def keep(self, rows: list[int], places: list[int]) -> None:
        """Makes the states in these places, which the last forward pass left, the checkpoint of these rows."""
        for (states, index), kept in zip(self.places(), self.kept):
            kept[from_host(rows, kept.device)] = states[index][from_host(places, kept.device)]

    def keep_all(self) -> None:
        """Makes the states that the last forward pass left the checkpoint of all rows."""
        self.kept = [states[index] for states, index in self.places()]

    def places(self) -> list[tuple[dict[int, torch.Tensor], int]]:
        """Returns the dictionaries and keys under which transformers looks for the states."""
        both = (self.conv_states, self.recurrent_states)
        return [(states, index) for states in both for index in states if states[index] is not None]


class RecurrentRaggedLayer(RaggedLayer, RecurrentLayer):
    """A layer that has attention and states."""

    def __init__(self, *args, **kwargs):
        RaggedLayer.__init__(self)
        RecurrentLayer.__init__(self, *args, **kwargs)

    def lazy_initialization(self, *keys_and_values, **states) -> None:
        kind = RaggedLayer if keys_and_values else RecurrentLayer
        kind.lazy_initialization(self, *keys_and_values, **states)


class RecurrentCache(RaggedCache):
    """A [`RaggedCache`] with recurrent layers, with the contents of a cache of transformers for the same model."""

    def __init__(self, theirs: Cache):
        super().__init__()
        # Rows of a pass's batch that are branches of a row. They write adjacent columns of it and see all its columns.
        self.branches = 1
        self.shares_columns = False  # whether attention takes keys and values of a row once for all its branches
        for layer in theirs.layers:
            if isinstance(layer, LinearAttentionLayer):
                kind = RecurrentRaggedLayer if isinstance(layer, DynamicLayer) else RecurrentLayer
                self.layers.append(kind(layer.number_of_states))
                _copy_states(layer, self.layers[-1])
            else:  # transformers' own class if the layer has no cache
                self.layers.append(RaggedLayer() if isinstance(layer, DynamicLayer) else type(layer)())
        self.recurrent = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]
        self.copy_columns(theirs)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if self.branches == 1:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        new = [
            states.unflatten(0, (-1, self.branches)).squeeze(3).transpose(1, 2) for states in (key_states, value_states)
        ]
        seen = super().update(*new, layer_idx, *args, **kwargs)
        if self.shares_columns:
            return seen
        return tuple(one[:, None].expand(-1, self.branches, -1, -1, -1).flatten(0, 1) for one in seen)

    def current_states(self) -> list[torch.Tensor]:
        """Returns the states of all layers that the last forward pass left; an empty list if there was none."""
        return [states[index] for layer in self.recurrent for states, index in layer.places()]

    def set_states(self, new: list[torch.Tensor]) -> None:
        """Lets the next forward pass start from these states, which it changes."""
        places = [place for layer in self.recurrent for place in layer.places()]
        for (states, index), one in zip(places, new, strict=True):
            states[index] = one

    def copy_between_columns(self, places: list[int], source: list[list[int]], to: list[list[int]]) -> None:
        """Copies columns within rows: for each row that stands at one of `places`, columns `source` to columns `to`."""
        for layer in self.ragged:
            rows, source_columns, columns = from_host([[[p] * len(to[0]) for p in places], source, to], layer.device)
            for storage in (layer.keys, layer.values):
                storage[rows, :, columns] = storage[rows, :, source_columns]

    def copy_to(self, cache: Cache, length: int) -> Cache:
        super().copy_to(cache, length)
        for ours, theirs in zip(self.layers, cache.layers):
            if isinstance(ours, RecurrentLayer):
                ours.copy_checkpoint(None)
                _copy_states(ours, theirs)
        return cache


def _copy_states(source: LinearAttentionLayer, to: LinearAttentionLayer) -> None:
    for name in vars(LinearAttentionLayer()).keys() - {"record_past"}:
        value = getattr(source, name)
        if isinstance(value, dict):
            value = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in value.items()}
        setattr(to, name, value)


class RecurrentModel(CachedModel):
    """A [`CachedModel`] with recurrent layers, used after the prefill."""

    cache: RecurrentCache

    def __init__(self, model: PreTrainedModel, cache: RecurrentCache, *args, **kwargs):
        super().__init__(model, cache, *args, **kwargs)
        for layer in cache.recurrent:
            layer.keep_all()
        kept = [state for layer in cache.recurrent for state in layer.kept]
        if not kept:
            raise RuntimeError("it keeps no recurrent state in its cache")
        rows, columns = len(kept[0]), cache.get_seq_length()
        self.checkpoints = [columns] * rows  # the first column of each row that its checkpoint has not read
        # The first column that the states after the last pass have not read, if they have read only their row's tokens.
        self.reached: dict[int, int] = {}
        self.refed = 0  # tokens, of all rows together, fed again since refeeds were shortened last
        self.passed: list[int] = []  # the rows of the last pass, in the order in which they stood
        self.first: list[list[torch.Tensor]] | None = None
        self.tokens = RowStore(torch.zeros(rows, columns, dtype=torch.long, device=self.device))

    def extend(self, tokens: torch.LongTensor, lengths: list[int], logits_to_keep=None) -> torch.Tensor:
        """See [`CachedModel.extend`]. The first `lengths` columns of each row are verified from now on."""
        # 1. Take in the states of the last pass for rows in which all tokens of that pass are verified.
        self.tokens.write(tokens, lengths)
        rows, count = self.computed(list(range(len(lengths)))), tokens.shape[1]
        self._take_in(rows, lengths)

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
        wanted = torch.arange(count) if logits_to_keep is None else logits_to_keep.cpu()
        kept, places = (torch.tensor(refeeds)[:, None] + wanted)[rows].unique(return_inverse=True)
        logits = self._feed([n + count for n in lengths], longest + count, kept)
        of_all = places.new_zeros(len(lengths), len(wanted))
        of_all[rows] = places
        order = torch.arange(len(lengths), device=logits.device)[:, None]
        if self.features is not None:  # those of the new tokens, which follow the refeed
            new = [[(n if row in rows else 0) + i for i in range(count)] for row, n in enumerate(refeeds)]
            self.features = self.features[order, from_host(new, logits.device)]
        return logits[order, from_host(of_all, logits.device)]

    def remember_prefill(self) -> None:
        """Keeps the checkpoints after the prefill, for a call that may end at a token before the last checkpoint."""
        self.first = [[state.clone() for state in layer.kept] for layer in self.cache.recurrent]
        self.prompt = list(self.checkpoints)

    def finish(self, output: torch.LongTensor, verified: list[int], columns_before: int) -> None:
        """
        Moves the checkpoint of each row to the last token of `output`, which is not fed, because no token follows it.
        `verified` tokens of each row were fed before; `columns_before` is the cache's length before the output.
        """
        rows, last = list(range(len(output))), columns_before + output.shape[1] - 1
        verified = [columns_before + count for count in verified]
        self._take_in(rows, verified)
        self.cache.take_back()
        for row in rows:
            if self.checkpoints[row] > verified[row]:
                for layer, first in zip(self.cache.recurrent, self.first):
                    for kept, state in zip(layer.kept, first):
                        kept[row] = state[row]
                self.checkpoints[row] = self.prompt[row]
        self.tokens.write(output.to(self.device), [columns_before] * len(rows))
        while min(self.checkpoints) < last:
            self._commit(rows, [last] * len(rows), min(last - n for n in self.checkpoints if n < last))

    def _commit(self, rows: list[int], ends: list[int], count: int) -> None:
        """Moves checkpoints forward by `count` tokens, for the rows that have so many verified tokens before `ends`."""
        ends = [n + count if n + count <= end else n for n, end in zip(self.checkpoints, ends)]
        self._feed(ends, count, torch.zeros(1, dtype=torch.long))
        self._take_in(rows, ends)

    def _feed(self, ends: list[int], count: int, logits_to_keep: torch.LongTensor) -> torch.Tensor:
        """Feeds `count` tokens after its checkpoint to each row, of which only the tokens before `ends` are its own."""
        columns = from_host(self.checkpoints, self.device)[:, None] + torch.arange(count, device=self.device)
        # The last one is repeated: any other token might have values that are not finite.
        columns = columns.minimum(from_host(ends, self.device)[:, None] - 1)
        for layer in self.cache.recurrent:
            layer.copy_checkpoint(self.cache.rows)
        kept = from_host(logits_to_keep, self.device)
        logits = super().extend(self.tokens.at(columns), self.checkpoints, kept)
        self.passed = self.computed(list(range(len(ends))))
        self.reached = {row: ends[row] for row in self.passed if self.checkpoints[row] + count == ends[row]}
        return logits

    def _take_in(self, rows: list[int], verified: list[int]) -> None:
        """Makes the states of the last pass the checkpoint of rows whose verified tokens end where the states do."""
        taken = [row for row in rows if self.reached.get(row) == verified[row]]
        for layer in self.cache.recurrent if taken else ():
            if taken == self.passed == list(range(len(self.checkpoints))):
                layer.keep_all()
            else:
                layer.keep(taken, [self.passed.index(row) for row in taken])
        for row in taken:
            self.checkpoints[row] = verified[row]
        self.reached = {}


def ragged_copy(theirs: Cache) -> RaggedCache:
    """Returns a ragged cache with the contents of a cache of transformers, for the same model."""
    is_recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in theirs.layers)
    return RecurrentCache(theirs) if is_recurrent else RaggedCache.from_cache(theirs)


def cached_model(model: PreTrainedModel, cache: RaggedCache, **options) -> CachedModel:
    """Returns the [`CachedModel`] for a cache that holds the prompts."""
    return (RecurrentModel if isinstance(cache, RecurrentCache) else CachedModel)(model, cache, **options)
