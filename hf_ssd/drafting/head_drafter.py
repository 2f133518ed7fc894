"""Drafting with a head, in turn with its target or ahead of it (Appendix E of the paper)."""

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from ..devices import from_host
from .drafter import Completion, Drafter
from .heads.base import Head
from .needs import DrafterNeeds
from .outcome_candidates import OutcomeCandidates
from .verified_prefix import VerifiedPrefix
from .vocabulary import Vocabulary


class HeadPrefix(VerifiedPrefix):
    """
    The verified tokens as a head reads them. Column `c` holds the second token of a pair, `c + 1`, and the state of the
    token before it, so a row has one column less than tokens. (A prompt of one token keeps it, because a pass feeds at
    least one column.) Passes return states.
    """

    def __init__(self, model: Head, prompts, column_limit, earlier=None, vocabulary=None, **options):
        super().__init__(model, prompts, column_limit, earlier, vocabulary, **options)
        self.known = [0] * len(prompts)  # tokens of each row whose features have come
        self.shared = list(self.fed)  # first columns of each row that were fed in the previous call, with features
        size = model.config.hidden_size
        # What each column reads: the target's fused features, the head's own output, or zeros until features have come.
        self.states = torch.zeros(*self.inputs.shape, size, dtype=model.dtype, device=self.device)
        for row, count in enumerate(self.shared):
            if count:
                self.states[row, :count] = earlier.states[row, :count]

    def _texts(self, prompts):
        self.skipped = [int(len(prompt) > 1) for prompt in prompts]
        return [self.vocabulary.to_draft(prompt[skipped:]) for prompt, skipped in zip(prompts, self.skipped)]

    def _shared(self, earlier, row):
        return min(super()._shared(earlier, row), earlier.known[row] + 1 - earlier.skipped[row])

    def _at(self, columns):
        self._reserve()
        order = torch.arange(len(columns), device=self.device)[:, None]
        return self.decoder.view.inputs(self.inputs.gather(1, columns), self.states[order, columns])

    def _results(self, states):
        return states

    def _reserve(self) -> None:
        missing = self.inputs.shape[1] - self.states.shape[1]
        if missing > 0:
            self.states = pad(self.states, (0, 0, 0, missing))

    def write_states(self, states: torch.Tensor, behind: int) -> None:
        """Writes the states `(batch_size, count, hidden_size)` that columns read, `behind` columns after the prefix."""
        self._reserve()
        columns = from_host(self.columns, self.device)[:, None] + behind
        columns = columns + torch.arange(states.shape[1], device=self.device)
        self.states[torch.arange(len(columns), device=self.device)[:, None], columns] = states

    def take_features(self, receive: Callable[[int, int], torch.Tensor], goes_on: list[bool]) -> None:
        """See [`Drafter.take_features`]. All columns of a row that goes on have features afterwards."""
        counts = [n - 1 - known if more else 0 for n, known, more in zip(self.lengths, self.known, goes_on)]
        model = self.decoder.view
        fused = model.fuse(receive(sum(counts), model.config.target_width).to(self.device))
        self._reserve()
        for row, of_row in enumerate(fused.split(counts)):
            if counts[row]:
                first = self.known[row] + 1 - self.skipped[row]
                self.states[row, first : first + counts[row]] = of_row
                self.fed[row] = min(self.fed[row], max(first, self.shared[row]))
                self.known[row] += counts[row]


class HeadDrafter(Drafter):
    """
    A head. While the target verifies a speculation, there are no features of its tokens, so outcomes are
    prepared on the head's own states, up to `2 * lookahead` steps from the last features. Features come with the
    outcome, and the tokens they belong to are fed again. So a speculation that was prepared differs from one that is
    drafted just in time: which one is verified depends on the outcome, never on the noise that it is drawn with.

    Args:
        model ([`~hf_ssd.drafting.heads.base.Head`]): The head.
        others: See [`Drafter`].
    """

    needs = DrafterNeeds(hidden_states=True)
    prefix_class = HeadPrefix

    def __init__(self, model: Head, *others, **options):
        super().__init__(model, *others, **options)
        self.possible = min(self.vocab_size, model.config.draft_vocab_size)
        self.known: list[torch.Tensor] = []  # the states after 0, 1, ... tokens of the speculation
        self.grown: list[torch.Tensor] = []  # the states of the branches, token by token
        self.ahead: torch.Tensor | None = None  # of the branches that became the speculation, if all rows hit
        self.goes_on = [True] * len(self.prefix.lengths)

    def begin(self):
        """Reads nothing yet: the features of the prompts come with the first outcome."""

    def candidates(self, from_fallback, count, plan):
        lookahead, prefix = self.drafted.shape[1], self.prefix
        if self.ahead is not None and not self.known and self.ahead.shape[1] >= lookahead > 0:
            prefix.write_states(self.ahead[:, :lookahead], 0)
            self.known = list(prefix.feed(lookahead, wanted=lookahead + 1).split(1, dim=1))
        for depth in range(len(self.known), lookahead + 1):
            self._advance(depth)
        logits = self._logits(torch.cat(self.known[: lookahead + 1], dim=1))
        scores = self._process(logits, prefix.ends() + torch.arange(lookahead + 1))
        return OutcomeCandidates.of(scores, logits, self.drafted, from_fallback, count, self.possible)

    def grow(self, accepted, bonus, plan):
        prefix, tokens = self.prefix, from_host(bonus, self.device)
        taken = torch.tensor(accepted).clamp(min=0)
        starts = prefix.ends() + taken
        columns, places = from_host(starts, self.device), starts.tolist()
        branches = prefix.branches(taken, self.drafted.shape[1], plan.lookahead)
        histories = self._histories(starts.shape[1], plan.lookahead + 1)
        order = torch.arange(len(tokens), device=self.device)[:, None]
        states = torch.cat(self.known, dim=1)[order, from_host(taken, self.device)]
        self.grown = []
        for depth in range(plan.lookahead):
            if histories is not None:
                histories.scatter_(2, (columns + depth)[:, :, None], tokens[:, :, None])
            inputs = prefix.decoder.view.inputs(self.vocabulary.to_draft(tokens), states)
            states = branches.grow(inputs)
            self.grown.append(states)
            scores = self.sampler.process(self._logits(states), histories, starts + depth + 1)
            tokens, probabilities = self._draw(scores, places, depth, plan)
            probabilities = None if probabilities is None else probabilities[:, :, None]
            on_host, supports = self._to_host(tokens[:, :, None], probabilities)
            yield on_host, probabilities, supports

    def commit(self, kept, tokens, branches):
        super().commit(kept, tokens, branches)
        self.goes_on = [bool(of_row) for of_row in tokens]
        self.known, grown, self.grown, self.ahead = [], self.grown, [], None
        if grown and all(branch >= 0 or not of_row for of_row, branch in zip(tokens, branches)):
            index = from_host([max(0, branch) for branch in branches], self.device)
            self.ahead = torch.stack(grown, dim=2)[torch.arange(len(tokens), device=self.device), index]

    def take_features(self, receive):
        self.prefix.take_features(receive, self.goes_on)

    def forget_speculation(self):
        super().forget_speculation()
        self.known = self.known[:1]  # after the last verified token

    def complete(self, ready, width, plan):
        prefix, done = self.prefix, Completion(self, ready, width)
        prefix.write(done.tokens)
        starts = [[length - 1] for length in prefix.lengths]
        for depth in range(width):
            states = self._advance(depth)
            if depth >= done.first:
                scores = self._process(self._logits(states), prefix.ends(depth))
                done.add(depth, *self._draw(scores, starts, depth, plan))
                prefix.write(done.tokens[:, depth : depth + 1], depth)
        self.drafted = done.tokens
        return done.speculation(), width

    def _draw(self, scores: torch.Tensor, starts: list[list[int]], depth: int, plan):
        """Draws a token of each row's branches. See [`DraftSampler.draw`]."""
        noise = self.sampler.noise_at(range(len(starts)), starts, depth)
        return self.sampler.draw(scores, noise, depth, plan)

    def _advance(self, depth: int) -> torch.Tensor:
        """Returns the states `(batch_size, 1, hidden_size)` after `depth` tokens of the speculation, the next ones."""
        if depth:
            self.prefix.write_states(self.known[depth - 1], depth - 1)
        self.known.append(self.prefix.feed(depth, wanted=1))
        return self.known[depth]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns logits of the target's tokens."""
        return Vocabulary.to_target(self.vocabulary, self.prefix.decoder.view.logits(states).float())
