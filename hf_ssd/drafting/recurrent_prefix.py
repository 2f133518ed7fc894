"""The verified tokens of each row for a draft model with recurrent layers."""

import functools

from .. import devices
from ..cache.recurrent_draft import RecurrentBranches, RecurrentDraft
from .verified_prefix import VerifiedPrefix

MEMORY_FOR_STATES, LARGEST = 0.5, 10**9  # share of the memory that is free after the prompts were read; most states


class RecurrentPrefix(VerifiedPrefix):
    """A [`VerifiedPrefix`] whose decoder keeps the states of each row after each token that may be its last token."""

    decoder: RecurrentDraft
    branches_kind = RecurrentBranches

    def _decoder(self, model, continues, **options):
        decoder = RecurrentDraft(model, self.inputs, continues and continues.decoder.cache, **options)
        if continues is not None:
            decoder.states = [{fed: states[fed]} for fed, states in zip(self.fed, continues.decoder.states)]
        return decoder

    def _shared(self, earlier, row):
        shared = super()._shared(earlier, row)
        return max((column for column in earlier.decoder.states[row] if column <= shared), default=0)

    def feed(self, count, wanted):
        logits = self.decoder.feed(self.columns, count, wanted)
        self._have_fed(count)
        return logits

    @functools.cached_property
    def free_memory(self) -> int | None:
        return devices.free_memory(self.device)

    @property
    def most_states(self):
        size = len(self.lengths) * self.decoder.bytes_of_a_row
        if not size or self.free_memory is None:  # no row has joined yet
            return LARGEST
        return max(1, min(LARGEST, int(MEMORY_FOR_STATES * self.free_memory / size)))

    def adopt(self, branches, chosen):
        adopted, logits = branches.adopt(chosen, [n - 1 for n in self.columns])
        for row in adopted:
            self.fed[row] = self.columns[row] - 1 + branches.depth
        return logits if adopted == self.rows else None

    def _free(self, rows):
        super()._free(rows)
        for row in rows:
            self.decoder.states[row] = {0: None}

    def forget_speculation(self):
        super().forget_speculation()
        self._forget()

    def _take_in(self, counts):
        super()._take_in(counts)
        self._forget()

    def _forget(self) -> None:
        """Forgets the states of rejected tokens, and of tokens long before the last token."""
        for row in self.rows:
            self.decoder.forget(row, self.fed[row], self.columns[row] - 1)
