"""Drafting with a head, in turn with its target or ahead of it (Appendix E of the paper)."""

import torch

from ..cache.row_store import RowStore
from ..devices import from_host
from .autoregressive_drafter import AutoregressiveDrafter
from .heads.base import Head
from .verified_prefix import VerifiedPrefix


class HeadPrefix(VerifiedPrefix):
    """
    The verified tokens as a head reads them. Column `c` holds the second token of a pair, `c + 1`, and the state of the
    token before it, so a row has one column less than tokens. (A prompt of one token keeps it, because a pass feeds at
    least one column.) Passes return states.
    """

    def __init__(self, model: Head, prompts, column_limit, earlier=None, vocabulary=None, **options):
        super().__init__(model, prompts, column_limit, earlier, vocabulary, **options)
        self.skipped = list(map(self._skips, prompts))
        self.known = [0] * len(prompts)  # tokens of each row whose features have come
        self.shared = list(self.fed)  # first columns of each row that were fed in the previous call, with features
        self.goes_on = [True] * len(prompts)
        size = *self.inputs.values.shape, model.config.hidden_size
        # What each column reads: the target's fused features, the head's own output, or zeros until features have come.
        self.states = RowStore(torch.zeros(size, dtype=model.dtype, device=self.device))
        for row, count in enumerate(self.shared):
            if count:
                self.states.values[row, :count] = earlier.states.values[row, :count]

    def _texts(self, prompts):
        return [self.vocabulary.to_draft(prompt[self._skips(prompt) :]) for prompt in prompts]

    def _skips(self, prompt: torch.LongTensor) -> int:
        """Returns how many first tokens of a prompt no column holds as the second token of its pair."""
        return int(len(prompt) > 1)

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
            prompt = self.ids.values[row, : self.lengths[row]]
            (text,), self.skipped[row] = self._texts([prompt]), self._skips(prompt)
            self.columns[row] = len(text)
            self.inputs.values[row, : len(text)] = text

    def _inputs_of(self, row, columns):
        return self.decoder.view.inputs(super()._inputs_of(row, columns), self.states.values[row, columns])

    def _shared(self, earlier, row):
        return min(super()._shared(earlier, row), earlier.known[row] + 1 - earlier.skipped[row])

    def grow(self, tokens, kept):
        super().grow(tokens, kept)
        self.goes_on = [bool(of_row) for of_row in tokens]

    def _at(self, columns):
        self.states.reserve(self.inputs.values.shape[1])
        return self.decoder.view.inputs(super()._at(columns), self.states.at(columns))

    def read_target(self, states):
        """
        Takes in the target's hidden states at the tokens that have none; finished rows have no part. The last token of
        a row has not been fed to the target yet, so it has none. All columns of a row that goes on have features
        afterwards.
        """
        counts = [n - 1 - known if more else 0 for n, known, more in zip(self.lengths, self.known, self.goes_on)]
        if not any(counts):  # no features have come
            return
        model = self.decoder.view
        states = states(sum(counts), model.config.target_width) if callable(states) else states
        fused = model.fuse(states.to(self.device))
        self.states.reserve(self.inputs.values.shape[1])
        for row, of_row in enumerate(fused.split(counts)):
            if counts[row]:
                first = self.known[row] + 1 - self.skipped[row]
                self.states.values[row, first : first + counts[row]] = of_row
                self.fed[row] = min(self.fed[row], max(first, self.shared[row]))
                self.known[row] += counts[row]
                if row in self.joining:
                    self._read(row, is_all=True)


class HeadDrafter(AutoregressiveDrafter):
    """
    A head. While the target verifies a speculation, there are no features of its tokens, so outcomes are
    prepared on the head's own states, up to `2 * lookahead` steps from the last features. Features come with the
    outcome, and the tokens they belong to are fed again. So a speculation that was prepared differs from one that is
    drafted just in time: which one is verified depends on the outcome, never on the noise that it is drawn with.
    """

    reads_target = True
    prefix_class = HeadPrefix

    def __init__(self, model: Head, *others, **options):
        super().__init__(model, *others, **options)
        self.possible = min(self.vocab_size, model.config.draft_vocab_size)
        self.grown: list[torch.Tensor] = []  # the states of the branches, token by token
        self.ahead: torch.Tensor | None = None  # of the branches that became the speculation, if all rows hit

    def begin(self):
        """Reads nothing yet: the features of the prompts come with the first outcome."""

    def commit(self, kept, tokens, branches):
        super().commit(kept, tokens, branches)
        grown, self.grown, self.ahead = self.grown, [], None
        if grown and all(branch >= 0 or not of_row for of_row, branch in zip(tokens, branches)):
            index = from_host([max(0, branch) for branch in branches], self.device)
            self.ahead = torch.stack(grown, dim=2)[torch.arange(len(tokens), device=self.device), index]

    def _outputs(self, from_fallback):
        lookahead = self.drafted.shape[1]
        if self.ahead is not None and not self.known and self.ahead.shape[1] >= lookahead > 0:
            self._write_states(self.ahead[:, :lookahead], 0)
            self.known = list(self.prefix.feed(lookahead, wanted=lookahead + 1).split(1, dim=1))
        return super()._outputs(from_fallback)

    def _know(self, count):
        first = len(self.known)
        for depth in range(first, count + 1):
            if depth:
                self._write_states(self.known[depth - 1], depth - 1)
            self.known.append(self.prefix.feed(depth, wanted=1))
        return len(self.known) - first

    def _write_states(self, states: torch.Tensor, behind: int) -> None:
        """Writes the states `(batch_size, count, hidden_size)` that columns read, `behind` columns after the prefix."""
        self.prefix.states.write(states, [column + behind for column in self.prefix.columns])

    def _feed_branches(self, tokens, taken):
        if self.grown:
            states = self.grown[-1]
        else:
            order = torch.arange(len(tokens), device=self.device)[:, None]
            states = torch.cat(self.known, dim=1)[order, from_host(taken, self.device)]
        inputs = self.prefix.decoder.view.inputs(self.vocabulary.to_draft(tokens), states)
        self.grown.append(self.branches.grow(inputs))
        return self.grown[-1]

    def _logits(self, outputs):
        return super()._logits(self.prefix.decoder.view.logits(outputs))
