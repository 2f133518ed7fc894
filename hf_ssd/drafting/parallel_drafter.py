"""Parallel drafts (PARD; An et al., ICLR 2026): all tokens of a speculation in one forward pass."""

import torch

from ..devices import from_host
from .drafter import Completion, Drafter


class ParallelDrafter(Drafter):
    """
    A causal language model that was trained to guess several tokens ahead: fed a bonus token and K mask tokens, each
    position gives a token from its marginal distribution, in which warpers see no tokens drawn before it.
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
        for depth in depths:
            lengths = starts + 1 + (depth if histories is None else 0)
            yield self._draw(self._logits(outputs[:, :, depth]), lengths, starts.tolist(), depth, plan, histories)
