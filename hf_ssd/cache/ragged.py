"""A DynamicCache whose rows advance by different amounts, in storage that is allocated ahead."""

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

WINDOW_STEP = 64  # columns by which a window grows


class RaggedLayer(DynamicLayer):
    """
    One layer of a [`RaggedCache`]. Keys and values have room to spare, of shape
    `(batch_size, num_heads, capacity, head_dim)`; the model sees the first columns as a view, never a copy.

    Room that holds nothing yet holds zeros: a masked column must still be a finite number.
    """

    def __init__(self, cache: "RaggedCache"):
        super().__init__()
        self.cache = cache
        self.width = 0
        self.window: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Writes the new columns where the cache was told to, and returns all columns that are in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.window is None:
            columns, width = self.cache.placement or (slice(self.width, self.width + key_states.shape[2]), None)
            self.width = max(self.width, columns.stop) if width is None else width
            self._reserve(self.width)
            keys, values = self.keys[:, :, : self.width], self.values[:, :, : self.width]
        else:
            columns, (keys, values) = self.cache.placement[0], self.window
        for storage, states in ((keys, key_states), (values, value_states)):
            if isinstance(columns, slice):
                storage[:, :, columns] = states
            else:
                rows = torch.arange(len(columns), device=storage.device)[:, None]
                storage[rows, :, columns.to(storage.device)] = states.transpose(1, 2)
        return keys, values

    def open_window(self, width: int | None) -> None:
        """Lets forward passes see the first `width` columns, or, if it is `None`, as many as are in use."""
        self.window = None
        if width is not None:
            self._reserve(width + 1)  # never all: to torch.compile, a view of everything is another kind of tensor
            self.window = self.keys[:, :, :width], self.values[:, :, :width]

    def _reserve(self, width: int) -> None:
        capacity = self.keys.shape[2]
        if width <= capacity:
            return
        extra = max(width, capacity + capacity // 2, self.cache.capacity) - capacity
        for name in ("keys", "values"):
            storage = getattr(self, name)
            room = storage.new_zeros((*storage.shape[:2], extra, storage.shape[3]))
            setattr(self, name, torch.cat([storage, room], dim=2))

    def get_seq_length(self) -> int:
        return self.width

    def crop(self, tokens_to_remove: int) -> None:
        self.width -= abs(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.width = 0


class RaggedCache(DynamicCache):
    """
    A `DynamicCache` in which each row has its own length. The tokens of a row always stand in consecutive columns, so
    there are no holes and nothing is ever compacted: a rejected token's column is simply written again.

    By default a forward pass appends, for all rows alike (a prefill). After [`~RaggedCache.place`] it writes where it
    is told. Sliding-window layers keep all their columns here, because rejected tokens must not push out old ones;
    their masks do the sliding.

    Args:
        capacity (`int`, *optional*, defaults to 256): Columns to allocate at first. More are added when needed.

    Attributes:
        window (`int`, *optional*): How many columns forward passes see, if they see more than those in use. Then
            nothing they do depends on a number that changes each time, as [`~hf_ssd.cache.compiled`] needs it.
    """

    def __init__(self, capacity: int = 256):
        Cache.__init__(self, layers=[])
        self.capacity = capacity
        self.window: int | None = None
        self.placement: tuple[slice | torch.LongTensor, int | None] | None = None

    def place(self, columns: slice | torch.LongTensor, width: int) -> None:
        """
        Says where the next forward pass writes.

        Args:
            columns (`slice` or `torch.LongTensor` of shape `(batch_size, new_tokens)`): A slice if all rows write to
                the same columns, otherwise the columns of each row.
            width (`int`): Columns that the forward pass sees. The mask hides those a row does not use.
        """
        if self.window is not None and isinstance(columns, slice):
            storage = self.layers[0].keys
            columns = torch.arange(columns.start, columns.stop, device=storage.device).repeat(len(storage), 1)
        self.placement = (columns, width if self.window is None else None)

    def open_window(self, width: int) -> int:
        """
        Lets forward passes see at least `width` columns until further notice.

        Returns:
            `int`: How many they see.
        """
        window = -(-width // WINDOW_STEP) * WINDOW_STEP
        if window != self.window:
            self.window = window
            for layer in self.layers:
                layer.open_window(window)
        return window

    def close_window(self) -> None:
        """Lets forward passes see the columns that are in use, and no more."""
        if self.window is not None:
            self.window = None
            for layer in self.layers:
                layer.open_window(None)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        while len(self.layers) <= layer_idx:
            self.layers.append(RaggedLayer(self))
        return self.layers[layer_idx].update(key_states, value_states)

    @classmethod
    def from_cache(cls, cache: Cache, capacity: int = 256) -> "RaggedCache":
        """Copies a cache of transformers. The columns that a sliding layer dropped come back as zeros."""
        ragged = cls(capacity=capacity)
        for index, layer in enumerate(cache.layers):
            if not layer.is_initialized:
                continue
            missing = cache.get_seq_length() - layer.keys.shape[2]
            pad = (0, 0, missing, 0)
            ragged.update(torch.nn.functional.pad(layer.keys, pad), torch.nn.functional.pad(layer.values, pad), index)
        return ragged

    def copy_to(self, cache: Cache, length: int) -> Cache:
        """Makes `cache`, one of transformers, hold the first `length` columns of this one, and returns it."""
        cache.reset()
        for index, layer in enumerate(self.layers):
            keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
            kept = cache.layers[index] if index < len(cache.layers) else None
            if isinstance(kept, DynamicSlidingWindowLayer):
                kept.record_past = False
            cache.update(keys.contiguous(), values.contiguous(), index)
        return cache
