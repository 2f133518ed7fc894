"""Drafts token by token, with any causal language model."""

import torch

from .. import devices
from ..cache.branches import Branches
from ..devices import from_host
from .drafter import Completion, Drafter


class AutoregressiveDrafter(Drafter):
    """A causal language model that takes a forward pass for each token."""

    branches: Branches | None = None  # those that were grown for the next outcome

    def grow(self, accepted, bonus, plan):
        prefix, tokens = self.prefix, from_host(bonus, self.device)
        taken = torch.tensor(accepted).clamp(min=0)
        starts = prefix.ends(taken)
        forks, base = torch.tensor(prefix.columns)[:, None] + taken, max(prefix.columns) + self.drafted.shape[1]
        self.branches = prefix.branches_kind(prefix.decoder, forks, base, plan.lookahead)
        histories = self._histories(starts.shape[1], plan.lookahead + 1)
        columns, coming = None if histories is None else from_host(starts, self.device), []
        for depth in range(plan.lookahead):
            if histories is not None:
                histories.scatter_(2, (columns + depth)[:, :, None], tokens[:, :, None])
            logits = self._logits(self._feed_branches(tokens, taken))
            tokens, *others = self._draw(logits, starts + depth + 1, starts.tolist(), depth, plan, histories)
            probabilities, beside = (None if one is None else one[:, :, None] for one in others)
            supports = self.sampler.supports(probabilities) if beside is None else beside
            copy = devices.HostCopy(tokens[:, :, None], *[] if supports is None else [supports])
            coming.append((copy, probabilities))
            # The device has a pass more than the host has seen, so it does not rest between two passes.
            while coming and (len(coming) > 1 or depth + 1 == plan.lookahead or coming[0][0].has_arrived()):
                if coming[0][0].has_arrived():
                    copy, of_tokens = coming.pop(0)
                    on_host, others = (*copy.lists(), None)[:2]
                    yield (on_host, of_tokens, *((None, others) if plan.nodes else (others, None)))
                else:
                    yield None

    def commit(self, kept, tokens, branches):
        super().commit(kept, tokens, branches)
        grown, self.branches = self.branches, None
        known = None if grown is None else self.prefix.adopt(grown, branches)
        self.known = [] if known is None else [known]

    def complete(self, ready, width, plan):
        prefix, done, passes = self.prefix, Completion(self, ready, width), 0
        prefix.write(done.tokens)
        starts = [[length - 1] for length in prefix.lengths]
        if self.known:
            self.known = [torch.cat(self.known, dim=1)[:, : done.first]]
        for depth in range(done.first, width):  # rows that already have tokens feed them: the cache needs them
            passes += self._know(depth)
            logits = self._logits(self.known[-1][:, -1:])
            done.add(depth, *self._draw(logits, prefix.ends(depth), starts, depth, plan, self._histories(1, 0)))
            prefix.write(done.tokens[:, depth : depth + 1], depth)
        self.drafted = done.tokens
        return done.speculation(), passes

    def _feed_branches(self, tokens: torch.LongTensor, taken: torch.LongTensor) -> torch.Tensor:
        """Feeds the next token of each branch, of which `taken` tokens of the speculation are the first."""
        return self.branches.grow(self.vocabulary.to_draft(tokens))
