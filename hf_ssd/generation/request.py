"""A request of a running batch."""

import contextlib
import threading
from collections.abc import Callable

import torch
from transformers import GenerationConfig

from ..cache.joining import JoiningRow
from .call_rows import CallRows
from .target import Target


class Request:
    """
    A row that is to join a running batch: its prompt without padding, the settings and seed that its draft gets, and a
    function that makes its [`CallRows`] of one row once its place is known. `on_change` is called in the thread that
    decodes, after each round that gave it tokens and when it has ended.
    """

    def __init__(
        self,
        prompt: list[int],
        padding: int,
        options: GenerationConfig,
        seed: int,
        rows: Callable[[Callable], CallRows],
        on_change: Callable[["Request"], None] = lambda request: None,
    ):
        self.prompt, self.padding, self.options, self.seed, self.on_change = prompt, padding, options, seed, on_change
        self.rows = rows(self._verify_alone)
        self.target: Target | None = None  # once it has a place
        self.row = -1
        self.read = 0  # tokens of the prompt that the target has read
        self.known = 0  # of these, whose columns are copies
        self.reader: JoiningRow | None = None
        self.output: torch.LongTensor | None = None
        self.error: BaseException | None = None
        self.is_cancelled = False  # set in any thread
        self.has_ended = threading.Event()

    @property
    def length(self) -> int:
        """Tokens of the row, padding included."""
        return self.rows.sequences.lengths[0]

    @property
    def text(self) -> list[int]:
        """The tokens of the row, without padding. Columns of all but the last are in the target's cache."""
        sequences = self.rows.sequences
        return self.prompt + sequences.ids[0, sequences.prompt_length : self.length].tolist()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the request with its output, or with an error."""
        if self.has_ended.is_set():
            return
        try:
            if error is None:
                self.output = self.rows.finish()
            self.error = error
        except Exception as raised:  # by the streamer
            self.error = raised
        # Nothing of it waits until Python collects cycles, least of all the target's cache.
        self.target = self.reader = self.rows.verify_alone = None
        self.has_ended.set()
        with contextlib.suppress(Exception):
            self.on_change(self)

    def _verify_alone(self, rows: list[int], place: int, lengths: list[int]) -> torch.Tensor:
        of_all = list(self.target.rows.lengths)
        of_all[self.row] = lengths[0]
        return self.target.verify_alone([self.row], place, of_all)[self.row : self.row + 1]
