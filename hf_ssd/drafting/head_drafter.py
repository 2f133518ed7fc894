"""Drafting with a head, in turn with its target or ahead of it (Appendix E of the paper)."""

import torch

from ..cache.row_store import RowStore
from ..devices import from_host
from .autoregressive_drafter import AutoregressiveDrafter
from .heads.base import Head
from .request import SessionRequest
from .verified_prefix import VerifiedPrefix


class HeadPrefix(VerifiedPrefix):
    """The verified tokens as a head reads them: column `c` holds token `c + 1` and the state of the token before it."""

    def __init__(self, model: Head, request: SessionRequest, earlier=None):
        super().__init__(model, request, earlier)
        self.known = [0] * len(request.prompts)  # tokens of each row whose features have come
        self.shared = list(self.fed)  # first columns of each row that were fed in the previous call, with features
        size = *self.inputs.values.shape, model.config.hidden_size
        # What each column reads: the target's fused features, the head's own output, or zeros until features have come.
        self.states = RowStore(torch.zeros(size, dtype=model.dtype, device=self.device))
        for row, count in enumerate(self.shared):
            if count:
                self.states.values[row, :count] = earlier.states.values[row, :count]

    def _texts(self, prompts):
        # A prompt of one token keeps it, because a pass feeds at least one column.
        return [self.vocabulary.to_draft(prompt[int(len(prompt) > 1) :]) for prompt in prompts]

    def _column(self, row: int, token: int) -> int:
        """Returns the column of a row that reads the state of a token."""
        return token + 1 - (self.lengths[row] - self.columns[row])

    def read(self, row, start, tokens, is_all):
        """Keeps the text of a row that joins. It is read once its features have come, with the row's first outcome."""
        if start == 0:
            self.known[row] = self.shared[row] = 0
            self.states.values[row] = 0
        super().read(row, start, tokens, is_all)

    def _read(self, row, is_all):
        if self.known[row]:
            super()._read(row, is_all)
        elif is_all:
            (text,) = self._texts([self.ids.values[row, : self.lengths[row]]])
            self.columns[row] = len(text)
            self.inputs.values[row, : len(text)] = text

    def _shared(self, earlier, row):
        return min(super()._shared(earlier, row), earlier._column(row, earlier.known[row]))

    def _inputs(self, rows, columns):
        self.states.reserve(self.inputs.values.shape[1])
        return self.decoder.view.inputs(super()._inputs(rows, columns), self.states.values[rows, columns])

    def write_states(self, states: torch.Tensor, behind: int) -> None:
        """Writes the states that columns read, from `behind` columns after each row's last one on."""
        self.states.write(states, [column + behind for column in self.columns])

    def read_target(self, outcome):
        """Takes in the target's hidden states at all tokens that have none, but the last one of each row."""
        counts = [n - 1 - known if new else 0 for n, known, new in zip(self.lengths, self.known, outcome.tokens)]
        if not any(counts):  # no features have come
            return
        model, states = self.decoder.view, outcome.states
        states = states(sum(counts), model.config.target_width) if callable(states) else states
        fused = model.fuse(states.to(self.device))
        self.states.reserve(self.inputs.values.shape[1])
        for row, of_row in enumerate(fused.split(counts)):
            if counts[row]:
                first = self._column(row, self.known[row])
                self.states.values[row, first : first + counts[row]] = of_row
                self.fed[row] = min(self.fed[row], max(first, self.shared[row]))
                self.known[row] += counts[row]
                if row in self.joining:
                    self._read(row, is_all=True)


class HeadDrafter(AutoregressiveDrafter):
    """A head, which prepares outcomes on its own states: what it drafts with features of the same tokens differs."""

    reads_target = True
    prefix_class = HeadPrefix

    grown: tuple[torch.Tensor, ...] = ()  # the states of the branches, token by token
    ahead: torch.Tensor | None = None  # of the branches that became the speculation, if all rows hit

    def commit(self, kept, tokens, branches):
        super().commit(kept, tokens, branches)
        self.ahead = self._of_hits(torch.stack(self.grown, dim=2) if self.grown else None, tokens, branches)
        self.grown = ()

    def _outputs(self, from_fallback):
        lookahead = self.drafted.shape[1]
        if self.ahead is not None and not self.known and self.ahead.shape[1] >= lookahead > 0:
            self.prefix.write_states(self.ahead[:, :lookahead], 0)
            self.known = list(self.prefix.feed(lookahead, wanted=lookahead + 1).split(1, dim=1))
        return super()._outputs(from_fallback)

    def _know(self, count):
        first = len(self.known)
        for depth in range(first, count + 1):
            if depth:
                self.prefix.write_states(self.known[depth - 1], depth - 1)
            self.known.append(self.prefix.feed(depth, wanted=1))
        return len(self.known) - first

    def _feed_branches(self, tokens, taken):
        if self.grown:
            states = self.grown[-1]
        else:
            order = torch.arange(len(tokens), device=self.device)[:, None]
            states = torch.cat(self.known, dim=1)[order, from_host(taken, self.device)]
        inputs = self.prefix.decoder.view.inputs(self.vocabulary.to_draft(tokens), states)
        self.grown += (self.branches.grow(inputs),)
        return self.grown[-1]
