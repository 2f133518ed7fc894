"""Parallel drafts (PARD; An et al., ICLR 2026): all tokens of a speculation in one forward pass."""

import torch

from ..devices import from_host
from .draft_info import DraftInfo
from .drafter import Completion, Drafter


class ParallelDrafter(Drafter):
    """
    A causal language model that was trained to guess several tokens ahead: fed a bonus token and K mask tokens,
    position i gives the i-th token of the speculation, and the last position gives the token after it. Each token is
    drawn from its marginal distribution, which depends on the outcome but not on the tokens drawn before it. The
    branches of all outcomes are fed in a single pass, together with the speculation that is being verified unless an
    earlier pass has read that.

    Warpers that read the tokens before a position, such as repetition penalties, see the tokens up to the bonus token.
    """

    one_pass = True

    def __init__(self, model, *others, **options):
        super().__init__(model, *others, **options)
        self.mask_token = DraftInfo.of(model.config).mask_token
        # The outputs for the speculation's tokens and for the token after it, valid for the rows in `is_known`.
        self.marginals: torch.Tensor | None = None
        self.is_known = [False] * len(self.prefix.lengths)
        self.grown: torch.Tensor | None = None  # the same for all branches

    def begin(self):
        if self.prefix.rows:
            self._know(self.prefix.feed(0, wanted=1))

    def _outputs(self, from_fallback):
        lookahead = self.drafted.shape[1]
        is_known = all(self.is_known) and self.marginals.shape[1] > lookahead and not any(from_fallback)
        if not is_known:
            self._know(self.prefix.feed(lookahead, wanted=lookahead + 1))
        return self.marginals[:, : lookahead + 1]

    def grow(self, accepted, bonus, plan):
        bonus, taken = from_host(bonus, self.device), torch.tensor(accepted).clamp(min=0)
        starts, count = self.prefix.ends() + taken, taken.shape[1]
        histories = self._histories(count, plan.lookahead + 1)
        if histories is not None:
            histories.scatter_(2, from_host(starts, self.device)[:, :, None], bonus[:, :, None])
        branches = self.vocabulary.to_draft(bonus)[:, :, None].repeat(1, 1, plan.lookahead + 1)
        branches[:, :, 1:] = self.mask_token
        forks = from_host(self.prefix.forks(taken), self.device)
        self.grown = self.prefix.feed_with_branches(self.drafted.shape[1], forks, branches)
        drawn = self._draw_all(self.grown, histories, starts, range(plan.lookahead), plan)
        tokens, *others = zip(*drawn)
        probabilities, beside = (None if of_all[0] is None else torch.stack(of_all, dim=2) for of_all in others)
        on_host, supports = self._to_host(torch.stack(tokens, dim=2), probabilities)
        yield on_host, probabilities, supports, None if beside is None else beside.tolist()

    def commit(self, kept, tokens, branches):
        super().commit(kept, tokens, branches)
        self.is_known = [not of_row or branch >= 0 for of_row, branch in zip(tokens, branches)]
        if self.grown is None:
            self.is_known = [False] * len(tokens)
        else:
            index = from_host([max(0, branch) for branch in branches], self.device)
            self.marginals = self.grown[torch.arange(len(tokens), device=self.device), index]
        self.grown = None

    def read(self, row, start, tokens, options, seed):
        super().read(row, start, tokens, options, seed)
        self.is_known[row] = False

    def complete(self, ready, width, plan):
        prefix, done = self.prefix, Completion(self, ready, width)
        self._know(self._guess(width))
        prefix.forget_speculation()  # mask tokens never stay in the cache
        starts, depths = prefix.ends() - 1, range(done.first, width)
        drawn = self._draw_all(self.marginals[:, None], self._histories(1, 0), starts, depths, plan)
        for depth, tokens in zip(depths, drawn):
            done.add(depth, *tokens)
        self.drafted = done.tokens
        prefix.write(self.drafted)
        return done.speculation(), 1

    def _guess(self, width: int) -> torch.Tensor:
        """Returns the outputs for at least the next `width` tokens of each row, from a pass over mask tokens."""
        self._write_masks(width)
        return self.prefix.feed(width, wanted=width + 1)

    def _write_masks(self, count: int) -> None:
        columns = self.prefix.columns
        self.prefix.inputs.write(torch.full((len(columns), count), self.mask_token, device=self.device), columns)

    def _know(self, outputs: torch.Tensor) -> None:
        self.marginals, self.is_known = outputs, [True] * len(outputs)

    def _draw_all(self, outputs: torch.Tensor, histories, starts: torch.LongTensor, depths: range, plan):
        """
        Draws the tokens of some depths from outputs `(batch_size, N, T, ...)`, and yields the result of
        [`Drafter._draw`] for each depth. `starts` `(batch_size, N)`, on the CPU, are the positions of the bonus tokens.
        """
        for depth in depths:
            lengths = starts + 1 + (depth if histories is None else 0)
            yield self._draw(self._logits(outputs[:, :, depth]), lengths, starts.tolist(), depth, plan, histories)
