"""A DynamicCache whose rows advance by different amounts, with the states of recurrent layers beside the columns."""

import copy
import functools
from collections.abc import Iterator

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ..devices import from_host
from .ragged_layers import RaggedLayer, copy_states, empty_layer


class RaggedCache(DynamicCache):
    """A `DynamicCache` in which each row has its own length. Finished rows can be left out of further passes."""

    def __init__(self, theirs: Cache | None = None):  # begins with the contents of a cache of transformers
        Cache.__init__(self, layers=[])
        self.count: int | None = None  # rows that may join; by default the rows are those of the first pass
        self.rows: list[int] | None = None  # that passes compute, in the order in which they stand; all by default
        self.left_out: list[int] = []  # the other rows, which stand after these
        self.window: int | None = None  # columns that passes see, if compiled or captured; else those in use
        self.placement: tuple[torch.LongTensor, int] | None = None
        # Rows of a pass's batch that are branches of a row. They write adjacent columns of it and see all its columns.
        self.branches = 1
        self.shares_columns = False  # whether attention takes keys and values of a row once for all its branches
        self.is_recurrent = theirs is not None and any(isinstance(one, LinearAttentionLayer) for one in theirs.layers)
        if self.is_recurrent:
            self.layers = list(map(empty_layer, theirs.layers))
            copy_states(theirs, self)
        if theirs is not None:
            self.copy_columns(theirs)

    @property
    def ragged(self) -> list[RaggedLayer]:
        """The layers that have columns, and their indexers."""
        layers = [layer for layer in self.layers if isinstance(layer, RaggedLayer)]
        return layers + [layer.indexer for layer in layers if layer.indexer is not None]

    @property
    def storage(self) -> list[torch.Tensor]:
        """The keys and values of all layers, `(rows, heads, capacity, head_dim)`. Empty before the first pass."""
        return [one for layer in self.ragged if layer.is_initialized for one in (layer.keys, layer.values)]

    def place(self, columns: slice | torch.LongTensor, width: int) -> None:
        """Sets what the next pass writes, a slice for all rows or columns `(batch_size, new_tokens)`, and its width."""
        if not isinstance(columns, slice):
            self.placement = columns, width
        else:  # append, so that the cache reports the right length to the model
            self.placement = None
            for layer in self.ragged:
                layer.width = columns.start

    def leave_out(self, finished: list[bool], fewest: int) -> None:
        """Leaves finished rows out of passes, which keep at least `fewest` rows, and see these as a view."""
        rows = list(range(len(finished))) if self.rows is None else self.rows
        count = max(fewest, sum(not finished[row] for row in rows))
        if count >= len(rows):
            return
        before = rows + self.left_out
        order, free = list(before), [place for place in range(count) if finished[rows[place]]]
        staying = [place for place in range(count, len(rows)) if not finished[rows[place]]]
        for one, other in zip(free, staying):  # moves as few rows as possible
            order[one], order[other] = order[other], order[one]
        self._arrange(before, order, count)

    def take_back(self) -> None:
        """Moves all rows back to their original places, and leaves none of them out."""
        if self.rows is not None:
            before = self.rows + self.left_out
            self._arrange(before, sorted(before), len(before))
            self.rows = None

    @property
    def bytes_of_a_column(self) -> int:  # of one row
        return sum(one[0, :, :1].nbytes for one in self.storage)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (*self.storage, *self.current_states()))

    @property
    def capacity(self) -> int:
        """Columns that the storage has."""
        return max((one.shape[2] for one in self.storage), default=0)

    def have_free_rows(self, count: int) -> None:
        """Lets an empty cache have this many rows, all of which are left out until they are taken."""
        self.rows, self.left_out, self.count = [], list(range(count)), count
        for layer in self.ragged:
            layer.count = count

    def take_row(self, row: int, theirs: "RaggedCache") -> None:
        """Lets a row that is left out take part, with the columns of another cache's only row. Others left out go."""
        if row in self.left_out:
            place = self.left_out.index(row)
            self.left_out[place] = self.left_out[0]
            self.rows, self.left_out = [*self.rows, row], self.left_out[1:]
        if not self.current_states():
            copy_states(theirs, self)  # passes replace the states themselves
        for index, layer in enumerate(theirs.layers):
            if isinstance(layer, RaggedLayer):
                self._layer(index).take_row(self.rows.index(row), layer)
        self._reopen()

    def of_row(self, row: int, width: int) -> "RaggedCache":
        """Returns a cache of one row, with copies of the first `width` columns of a row."""
        place, copied = self._at(row), RaggedCache()
        copied.is_recurrent = self.is_recurrent
        copied.layers = [
            layer.of_row(place, width) if isinstance(layer, RaggedLayer) else copy.copy(layer) for layer in self.layers
        ]
        copy_states(self, copied)
        return copied

    def _arrange(self, before: list[int], order: list[int], count: int) -> None:
        """Moves rows from the order `before` into another order, of which passes compute the first `count`."""
        places = [place for place, row in enumerate(order) if before[place] != row]
        rows = [before.index(order[place]) for place in places]
        for one, to, source in self._indexed(places, rows):
            one[to] = one[source]
        self.rows, self.left_out = order[:count], order[count:]
        self._reopen()

    def _indexed(self, *indices: list[int]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields the storage of each layer with these indices on its device, if there are any."""
        on_device = functools.cache(lambda device: [from_host(one, device) for one in indices])
        for one in self.storage if indices[0] else ():
            yield one, *on_device(one.device)

    def move_columns(self, moves: list[tuple[int, int, int]]) -> None:
        """Copies columns within rows, all at once: each of the `moves` is a row, its column and the place for it."""
        if self.rows is not None:
            moves = [(self.rows.index(row), *columns) for row, *columns in moves if row in self.rows]
        for one, rows, columns, places in self._indexed(*map(list, zip(*moves))) if moves else ():
            one[rows, :, places] = one[rows, :, columns]

    def clear_behind(self, rows: list[int], columns: list[int]) -> None:
        """Sets the columns of `rows` to zero from `columns[row]` on. `columns` has an element for every row."""
        for row in rows:
            for one in self.storage:
                one[self._at(row), :, columns[row] :] = 0

    def set_window(self, width: int | None) -> None:
        """Lets forward passes see the first `width` columns, or the columns in use if `width` is `None`."""
        if width != self.window:
            self.window = width
            self._reopen()

    def _at(self, row: int) -> int:
        """Returns the place at which a row stands."""
        return row if self.rows is None else (self.rows + self.left_out).index(row)

    def _reopen(self) -> None:
        for layer in self.ragged:
            layer.open_window(self.window, self.rows and len(self.rows))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        layer = self._layer(layer_idx)
        if self.branches == 1:
            return layer.update(key_states, value_states, self.placement)
        new = (one.unflatten(0, (-1, self.branches)).squeeze(3).transpose(1, 2) for one in (key_states, value_states))
        seen = layer.update(*new, self.placement)
        if self.shares_columns:
            return seen
        return tuple(one[:, None].expand(-1, self.branches, -1, -1, -1).flatten(0, 1) for one in seen)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return self._layer(layer_idx).update_indexer(indexer_key_states, self.placement)

    def _layer(self, index: int) -> RaggedLayer:
        while len(self.layers) <= index:
            self.layers.append(RaggedLayer(self.count, self.rows and len(self.rows)))
        return self.layers[index]

    # ---------------------------------------------------------------- states of recurrent layers

    def _places(self) -> list[tuple[dict[int, torch.Tensor], int]]:
        """Returns the dictionaries and keys under which transformers looks for the states, which passes change."""
        layers = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]
        both = [states for layer in layers for states in (layer.conv_states, layer.recurrent_states)]
        return [(states, index) for states in both for index in states if states[index] is not None]

    def current_states(self) -> list[torch.Tensor]:
        """Returns the states of all layers that the last forward pass left; an empty list if there was none."""
        return [states[index] for states, index in self._places()]

    def set_states(self, new: list[torch.Tensor]) -> None:
        """Lets the next forward pass start from these states, which it changes."""
        for (states, index), one in zip(self._places(), new, strict=True):
            states[index] = one

    # ---------------------------------------------------------------- to and from caches of transformers

    def copy_columns(self, cache: Cache) -> None:
        """Copies the columns of a cache of transformers. Those that a sliding layer dropped are zeros."""
        length = cache.get_seq_length()
        for index, layer in enumerate(cache.layers):
            if length and isinstance(layer, DynamicLayer) and layer.is_initialized:
                missing = (0, 0, length - layer.keys.shape[2], 0)
                self.update(pad(layer.keys, missing), pad(layer.values, missing), index)
                if getattr(layer, "indexer_keys", None) is not None:
                    self.update_indexer(layer.indexer_keys, index)

    def copy_to(self, cache: Cache, length: int) -> Cache:
        """Makes a cache of transformers hold exactly the first `length` columns of this cache, and returns it."""
        self.take_back()
        cache.reset()
        for index, layer in enumerate(self.layers):
            kept = cache.layers[index] if index < len(cache.layers) else None
            if isinstance(kept, DynamicSlidingWindowLayer):
                kept.record_past = False
            if isinstance(layer, RaggedLayer):
                if kept is not None:
                    kept.is_initialized = False  # in transformers 5.17, `reset` zeroes the columns and keeps them
                cache.update(layer.keys[:, :, :length].contiguous(), layer.values[:, :, :length].contiguous(), index)
                if layer.indexer is not None:
                    cache.update_indexer(layer.indexer.keys[:, 0, :length].contiguous(), index)
        copy_states(self, cache)
        return cache
