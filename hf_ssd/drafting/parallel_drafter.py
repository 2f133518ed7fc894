"""All tokens of a speculation in one pass: parallel drafts (PARD; An et al., ICLR 2026), and heads that fill blocks."""

import torch

from ..devices import from_host
from .drafter import Completion, Drafter
from .head_drafter import HeadPrefix
from .verified_prefix import VerifiedPrefix


class ParallelDrafter(Drafter):
    """
    A causal language model that was trained to guess several tokens ahead, fed a bonus token and mask tokens. The
    distribution of each token depends on the outcome, and not on the tokens drawn before it.
    """

    one_pass = True
    grown: torch.Tensor | None = None  # the outputs of all branches, which were grown for the next outcome

    def _outputs(self, from_fallback):
        if any(from_fallback) or self._known_width <= self.drafted.shape[1]:
            self.known = []
        return super()._outputs(from_fallback)

    def grow(self, accepted, bonus, plan):
        bonus, taken = from_host(bonus, self.device), torch.tensor(accepted).clamp(min=0)
        starts = self.prefix.ends(taken)
        histories = self._histories(taken.shape[1], plan.lookahead + 1)
        if histories is not None:
            histories.scatter_(2, from_host(starts, self.device)[:, :, None], bonus[:, :, None])
        branches = self.vocabulary.to_draft(bonus)[:, :, None].repeat(1, 1, plan.lookahead + 1)
        branches[:, :, 1:] = self.prefix.decoder.view.config.pard_token
        forks = from_host(torch.tensor(self.prefix.columns)[:, None] + taken, self.device)
        self.grown = self.prefix.feed_with_branches(self.drafted.shape[1], forks, branches)
        drawn = self._draw_all(self.grown, histories, starts, range(plan.lookahead), plan)
        tokens, *others = zip(*drawn)
        probabilities, beside = (None if of_all[0] is None else torch.stack(of_all, dim=2) for of_all in others)
        on_host, supports = self._to_host(torch.stack(tokens, dim=2), probabilities)
        yield on_host, probabilities, supports, None if beside is None else beside.tolist()

    def commit(self, kept, tokens, branches):
        super().commit(kept, tokens, branches)
        known, self.grown = self._of_hits(self.grown, tokens, branches), None
        self.known = [] if known is None else [known]

    def complete(self, ready, width, plan):
        prefix, done, guessed = self.prefix, Completion(self, ready, width), self._guess(width)
        self.known = [guessed]
        prefix.forget_speculation()  # mask tokens never stay in the cache
        starts, depths = prefix.ends() - 1, range(done.first, width)
        drawn = self._draw_all(guessed[:, None], self._histories(1, 0), starts, depths, plan)
        for depth, tokens in zip(depths, drawn):
            done.add(depth, *tokens)
        self.drafted = done.tokens
        prefix.write(self.drafted)
        return done.speculation(), 1

    def _guess(self, width: int) -> torch.Tensor:
        """Returns the outputs for the next `width` tokens of each row, and the token after them, from mask tokens."""
        columns, mask_token = self.prefix.columns, self.prefix.decoder.view.config.pard_token
        self.prefix.inputs.write(torch.full((len(columns), width), mask_token, device=self.device), columns)
        return self.prefix.feed(width, wanted=width + 1)

    def _draw_all(self, outputs: torch.Tensor, histories, starts: torch.LongTensor, depths: range, plan):
        """Draws the tokens of some depths from outputs `(batch_size, N, T, ...)`, as [`Drafter._draw`] does."""
        for depth in depths:  # marginal distributions: warpers do not see the tokens that are drawn before
            lengths = starts + 1 + (depth if histories is None else 0)
            yield self._draw(self._logits(outputs[:, :, depth]), lengths, starts.tolist(), depth, plan, histories)


class BlockPrefix(HeadPrefix):
    """The verified tokens as such a head reads them: column `c` has token `c` and its state, zeros until it comes."""

    block = 1  # columns, from that of the last verified token on, which see each other

    def _texts(self, prompts):
        return VerifiedPrefix._texts(self, prompts)

    def _column(self, row, token):
        return token

    def _decoder(self, model, continues, **options):
        return super()._decoder(model, continues, **{**options, "column_limit": None})  # blocks go beyond the text

    def _next(self, count, at_least):
        inputs, starts, width = super()._next(count, at_least)
        behind = from_host([n + self.block - 2 - start for n, start in zip(self.columns, starts)], self.device)
        inputs[:, :, -1] = (behind[:, None] - torch.arange(width, device=self.device)).clamp(min=0)
        return inputs, starts, width


class BlockDrafter(ParallelDrafter):
    """A head that is fed the last verified token and mask tokens, in blocks of at least the size of its training."""

    reads_target = True
    prefix_class = BlockPrefix

    def _guess(self, width):
        self.prefix.block = max(self.prefix.decoder.view.config.block_size, width + 1)
        return super()._guess(self.prefix.block - 1)[:, 1 : width + 1]
