"""The layers of a ragged cache: keys and values in storage that is allocated ahead, and states of recurrent layers."""

import copy

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionLayer

# Storage has unused columns after the columns in use: when it grows, ROOM columns or ROOM_SHARE of the columns in use,
# whichever is more. They lie between the rows, and the farther the rows are apart, the longer it takes to read them.
ROOM, ROOM_SHARE = 32, 1 / 8


class RaggedLayer(DynamicLayer):
    """A layer with attention. It does not refer to its cache, which would be a cycle of memory."""

    def __init__(self, count: int | None = None, rows: int | None = None):
        super().__init__()
        self.count = count  # rows of the storage; by default those of the first pass
        self.rows = rows  # first rows of the storage, which passes compute; by default all
        self.width = 0  # columns in use
        # The keys by which sparse attention chooses a query's columns, stored as those of one head, without values.
        self.indexer: RaggedLayer | None = None
        self.window: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        rows = self.count or len(key_states)  # unused columns are zeros: masked values must be finite too
        self.keys, self.values = (  # (rows, heads, capacity, head_dim)
            states.new_zeros((rows, states.shape[1], 0, states.shape[3])) for states in (key_states, value_states)
        )

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, placement=None):
        """Writes the new columns where `placement` says, or at the end, and returns all columns that are seen."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count = self.width, key_states.shape[2]
        columns, width = placement or (None, start + count)
        if self.window is None:
            self.width = width
            self._reserve(width)
        keys, values = self.window or self._view(width)
        for storage, states in ((keys, key_states), (values, value_states)):
            if columns is None:
                storage.narrow(2, start, count).copy_(states)
            else:
                rows = torch.arange(len(columns), device=storage.device)[:, None]
                storage[rows, :, columns.to(storage.device)] = states.transpose(1, 2)
        return keys, values

    def update_indexer(self, keys: torch.Tensor, placement=None) -> torch.Tensor:
        """Writes new keys `(rows, new_tokens, head_dim)` of the indexer, and returns those that are seen."""
        if self.indexer is None:
            self.indexer = RaggedLayer(self.count, self.rows)
        keys = keys.unsqueeze(1)
        return self.indexer.update(keys, keys[..., :0], placement)[0].squeeze(1)

    def open_window(self, width: int | None, rows: int | None) -> None:
        self.rows, self.window = rows, None
        if width is not None:
            self._reserve(width + 1)  # never all columns: torch.compile treats a view of the whole differently
            self.window = self._view(width)

    def take_row(self, place: int, theirs: "RaggedLayer") -> None:
        """Copies the only row of another layer to a place of this one."""
        if theirs.indexer is not None:
            self.indexer = self.indexer or RaggedLayer(self.count, self.rows)
            self.indexer.take_row(place, theirs.indexer)
        if not theirs.is_initialized:
            return
        if not self.is_initialized:
            self.lazy_initialization(theirs.keys, theirs.values)
        self.width = max(self.width, theirs.width)
        self._reserve(self.width)
        for storage, states in ((self.keys, theirs.keys), (self.values, theirs.values)):
            storage[place] = 0
            storage[place, :, : theirs.width] = states[0, :, : theirs.width]

    def of_row(self, place: int, width: int) -> "RaggedLayer":
        """Returns a layer of one row, with copies of the first `width` columns of the row that stands at `place`."""
        copied = copy.copy(self)
        copied.count = copied.rows = copied.window = None
        if self.indexer is not None:
            copied.indexer = self.indexer.of_row(place, width)
        if self.is_initialized:
            row = slice(place, place + 1)
            copied.keys, copied.values = (storage[row, :, :width].clone() for storage in (self.keys, self.values))
            copied.width = width
        return copied

    def _view(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[: self.rows, :, :width], self.values[: self.rows, :, :width]

    def _reserve(self, width: int) -> None:
        capacity = self.keys.shape[2]
        if width > capacity:
            extra = width + max(ROOM, int(ROOM_SHARE * width)) - capacity
            self.keys, self.values = (pad(storage, (0, 0, 0, extra)) for storage in (self.keys, self.values))

    def get_seq_length(self) -> int:
        return self.width


class RecurrentRaggedLayer(RaggedLayer, LinearAttentionLayer):
    """A layer that has attention and states."""

    def __init__(self, number_of_states: int):
        RaggedLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *keys_and_values, **states) -> None:
        kind = RaggedLayer if keys_and_values else LinearAttentionLayer
        kind.lazy_initialization(self, *keys_and_values, **states)


def empty_layer(theirs: CacheLayerMixin) -> CacheLayerMixin:
    """Returns a layer for the same layer of a model as a layer of transformers."""
    if isinstance(theirs, LinearAttentionLayer):
        kind = RecurrentRaggedLayer if isinstance(theirs, DynamicLayer) else LinearAttentionLayer
        return kind(theirs.number_of_states)
    return RaggedLayer() if isinstance(theirs, DynamicLayer) else type(theirs)()  # theirs if it has no cache


def copy_states(source: Cache, to: Cache) -> None:
    """Copies the states of all recurrent layers from a cache to another cache of the same model."""
    for ours, theirs in zip(source.layers, to.layers):
        if isinstance(ours, LinearAttentionLayer):
            for name in vars(LinearAttentionLayer()).keys() - {"record_past"}:
                value = getattr(ours, name)
                if isinstance(value, dict):
                    value = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in value.items()}
                setattr(theirs, name, value)
