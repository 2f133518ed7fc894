"""Values of rows that grow by different amounts."""

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..devices import from_host

ROOM = 256  # spare columns


class RowStore:
    """Values of each row, tokens or states, in the tensor `values` of shape `(batch_size, capacity, ...)`."""

    def __init__(self, values: torch.Tensor):
        self.values = values

    @classmethod
    def of(cls, texts: list[torch.LongTensor]) -> "RowStore":
        """Returns texts of different lengths as rows."""
        return cls(pad(pad_sequence(texts, batch_first=True), (0, ROOM)))

    def reserve(self, width: int) -> None:
        rows, capacity, *size = self.values.shape
        if width > capacity:
            self.values = torch.cat([self.values, self.values.new_zeros(rows, max(ROOM, width), *size)], dim=1)

    def write(self, new: torch.Tensor, starts: list[int]) -> None:
        """Writes new values `(batch_size, count, ...)` into the rows, from column `starts` of each row on."""
        self.reserve(max(starts) + new.shape[1])
        columns = from_host(starts, new.device)[:, None] + torch.arange(new.shape[1], device=new.device)
        self.values[self._rows(), columns] = new

    def put(self, row: int, start: int, new: torch.Tensor) -> int:
        """Writes new values `(count, ...)` into one row, from a column on. Returns the column after them."""
        self.reserve(start + len(new))
        self.values[row, start : start + len(new)] = new
        return start + len(new)

    def at(self, columns: torch.LongTensor) -> torch.Tensor:
        """Returns the values in these columns `(batch_size, count)` of each row."""
        return self.values[self._rows(), columns]

    def _rows(self) -> torch.LongTensor:
        return torch.arange(len(self.values), device=self.values.device)[:, None]
