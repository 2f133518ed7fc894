"""A ragged cache with the states of recurrent layers beside the columns of layers with attention."""

import torch
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from .ragged import RaggedCache, RaggedLayer


class RecurrentRaggedLayer(RaggedLayer, LinearAttentionLayer):
    """A layer that has attention and states."""

    def __init__(self, number_of_states: int):
        RaggedLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *keys_and_values, **states) -> None:
        kind = RaggedLayer if keys_and_values else LinearAttentionLayer
        kind.lazy_initialization(self, *keys_and_values, **states)


class RecurrentCache(RaggedCache):
    """A [`RaggedCache`] with recurrent layers, with the contents of a cache of transformers for the same model."""

    can_be_cut = False  # the states have read all columns

    def __init__(self, theirs: Cache):
        super().__init__()
        # Rows of a pass's batch that are branches of a row. They write adjacent columns of it and see all its columns.
        self.branches = 1
        self.shares_columns = False  # whether attention takes keys and values of a row once for all its branches
        for layer in theirs.layers:
            if isinstance(layer, LinearAttentionLayer):
                kind = RecurrentRaggedLayer if isinstance(layer, DynamicLayer) else LinearAttentionLayer
                self.layers.append(kind(layer.number_of_states))
            else:  # transformers' own class if the layer has no cache
                self.layers.append(RaggedLayer() if isinstance(layer, DynamicLayer) else type(layer)())
        _copy_states(theirs, self)
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

    def take_row(self, row: int, theirs: RaggedCache) -> None:
        if not self.current_states():
            _copy_states(theirs, self)  # passes replace the states themselves
        super().take_row(row, theirs)

    def of_row(self, row: int, width: int) -> RaggedCache:
        copied = super().of_row(row, width)
        _copy_states(self, copied)
        return copied

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(one.nbytes for one in self.current_states())

    def copy_to(self, cache: Cache, length: int) -> Cache:
        super().copy_to(cache, length)
        _copy_states(self, cache)
        return cache


def _copy_states(source: Cache, to: Cache) -> None:
    """Copies the states of all recurrent layers from a cache to another cache of the same model."""
    for ours, theirs in zip(source.layers, to.layers):
        if isinstance(ours, LinearAttentionLayer):
            for name in vars(LinearAttentionLayer()).keys() - {"record_past"}:
                value = getattr(ours, name)
                if isinstance(value, dict):
                    value = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in value.items()}
                setattr(theirs, name, value)


def ragged_copy(theirs: Cache) -> RaggedCache:
    """Returns a ragged cache with the contents of a cache of transformers, for the same model."""
    is_recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in theirs.layers)
    return (RecurrentCache if is_recurrent else RaggedCache)(theirs)
