"""Drafts token by token, with any causal language model."""

import torch

from .. import devices
from ..cache.branches import Branches
from ..devices import from_host
from .drafter import Completion, Drafter
from .outcome_candidates import OutcomeCandidates


class AutoregressiveDrafter(Drafter):
    """A causal language model that takes a forward pass for each token. For the arguments see [`Drafter`]."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.known_logits: list[torch.Tensor] = []  # after the first tokens of the speculation, if known
        self.branches: Branches | None = None  # those that were grown for the next outcome

    def begin(self):
        self.known_logits = [self.prefix.feed(0, wanted=1)]

    def candidates(self, from_fallback, count, plan):
        lookahead = self.drafted.shape[1]
        known = sum(logits.shape[1] for logits in self.known_logits)
        if known <= lookahead:
            self.known_logits.append(self.prefix.feed(lookahead, wanted=lookahead + 1 - known))
        logits = torch.cat(self.known_logits, dim=1)[:, : lookahead + 1].float()
        scores = self._process(logits, self.prefix.ends() + torch.arange(lookahead + 1))
        return OutcomeCandidates.of(scores, logits, self.drafted, from_fallback, count, self.vocabulary.common)

    def grow(self, accepted, bonus, plan):
        prefix, tokens, vocabulary = self.prefix, from_host(bonus, self.device), self.vocabulary
        taken = torch.tensor(accepted).clamp(min=0)
        starts = prefix.ends() + taken
        places = starts.tolist()
        self.branches = branches = prefix.branches(taken, self.drafted.shape[1], plan.lookahead)
        histories = self._histories(starts.shape[1], plan.lookahead + 1)
        columns, coming = None if histories is None else from_host(starts, self.device), []
        for depth in range(plan.lookahead):
            if histories is not None:
                histories.scatter_(2, (columns + depth)[:, :, None], tokens[:, :, None])
            choice = self._choice(places, depth, plan, histories, starts + depth + 1)
            tokens, probabilities = (*branches.grow(vocabulary.to_draft(tokens), choice), None)[:2]
            probabilities = None if probabilities is None else probabilities[:, :, None]
            supports = self.sampler.supports(probabilities)
            copy = devices.HostCopy(tokens[:, :, None], *[] if supports is None else [supports])
            coming.append((copy, probabilities))
            # The device has a pass more than the host has seen, so it does not rest between two passes.
            while coming and (len(coming) > 1 or depth + 1 == plan.lookahead or coming[0][0].has_arrived()):
                if coming[0][0].has_arrived():
                    copy, of_tokens = coming.pop(0)
                    on_host, of_supports = (*copy.lists(), None)[:2]
                    yield on_host, of_tokens, of_supports
                else:
                    yield None

    def commit(self, kept, tokens, branches):
        super().commit(kept, tokens, branches)
        grown, self.branches = self.branches, None
        known = None if grown is None else self.prefix.adopt(grown, branches)
        self.known_logits = [] if known is None else [known]

    def forget_speculation(self):
        super().forget_speculation()
        self.known_logits = [logits[:, :1] for logits in self.known_logits[:1]]  # after the last verified token

    def complete(self, ready, width, plan):
        prefix, done = self.prefix, Completion(self, ready, width)
        prefix.write(done.tokens)
        starts = [[length - 1] for length in prefix.lengths]
        if self.known_logits:
            self.known_logits = [torch.cat(self.known_logits, dim=1)[:, : done.first]]
        for depth in range(done.first, width):  # rows that already have tokens feed them: the cache needs them
            choice = self._choice(starts, depth, plan, self._histories(1, 0), prefix.ends(depth), keeps_logits=True)
            known = sum(logits.shape[1] for logits in self.known_logits)
            logits, *chosen = prefix.feed(depth, depth + 1 - known, choice)
            self.known_logits.append(logits)
            done.add(depth, *chosen)
            prefix.write(done.tokens[:, depth : depth + 1], depth)
        self.drafted = done.tokens
        return done.speculation(), width - done.first
