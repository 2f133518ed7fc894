"""What proposes tokens: the interface of drafters, and the autoregressive one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from transformers import GenerationConfig, PreTrainedModel

from .. import devices
from ..cache.branches import Branches
from ..config import SSDConfig
from ..devices import from_host
from ..rounds import Plan, Speculation
from .outcome_candidates import OutcomeCandidates
from .sampling import DraftSampler
from .verified_prefix import VerifiedPrefix


class Drafter(ABC):
    """
    Proposes tokens behind the verified prefix of each row. A round is `candidates` and `grow` while the target
    verifies, then `commit`, `complete` for what had not grown, and `verify`.

    Attributes:
        prefix ([`VerifiedPrefix`]): The verified tokens of each row.
        drafted (`torch.LongTensor` of shape `(batch_size, lookahead)`): The speculation that is being verified.
        vocab_size (`int`): Number of tokens.
        sampled (`bool`): Whether tokens are drawn, so that distributions are told with them.
    """

    prefix: VerifiedPrefix
    drafted: torch.LongTensor
    vocab_size: int
    sampled: bool

    @abstractmethod
    def begin(self) -> None:
        """Reads the prompts, while the target does the same."""

    @abstractmethod
    def candidates(self, from_fallback: list[bool], count: int) -> OutcomeCandidates:
        """
        Reads the speculation that is being verified, and ranks the bonus tokens after each accepted count.

        Args:
            from_fallback (`list[bool]`): Which rows' speculations did not come from this drafter.
            count (`int`): How many tokens to rank.
        """

    @abstractmethod
    def grow(self, accepted: torch.LongTensor, bonus: torch.LongTensor, plan: Plan) -> Iterator[tuple]:
        """
        Proposes tokens behind each outcome, all outcomes together, one token of each at a time.

        Args:
            accepted, bonus (`torch.LongTensor` of shape `(batch_size, N)`): The outcomes. Accepted counts are on the
                CPU, and negative for a place that holds no outcome.
            plan ([`~hf_ssd.rounds.Plan`]): Says how many tokens, and what they are drawn from.

        Yields:
            Tokens `(batch_size, N)`, and the distributions `(batch_size, N, vocab_size)` that they were drawn from or
            `None`. After each, the device has computed them.
        """

    @abstractmethod
    def commit(self, accepted: list[int], bonus: torch.LongTensor) -> None:
        """
        Takes in an outcome: accepted count of each row, `FINISHED` for a row that is left out from now on, and bonus
        tokens `(batch_size,)` on this drafter's device.
        """

    @abstractmethod
    def complete(self, ready: Speculation, width: int, plan: Plan) -> tuple[Speculation, int]:
        """
        Drafts just in time what is missing: everything for a row that missed, the rest for a row whose branch was half
        grown.

        Args:
            ready ([`~hf_ssd.rounds.Speculation`]): What is there, `known` tokens of each row.
            width (`int`): Tokens of the result.
            plan ([`~hf_ssd.rounds.Plan`]): What tokens are drawn from.

        Returns:
            The speculation, and how many forward passes it took.
        """

    @abstractmethod
    def verify(self, tokens: torch.LongTensor) -> None:
        """Takes in which tokens `(batch_size, lookahead)` are verified next."""


class AutoregressiveDrafter(Drafter):
    """
    A causal language model, one forward pass for each token. What it proposes after an outcome is a function of the
    outcome and the seed alone, so it does not matter whether it was prepared.

    Args:
        model (`PreTrainedModel`): The draft model.
        config (`SSDConfig`): The user's settings.
        generation_config (`GenerationConfig`): The target's. Its warpers and penalties shape the proposals too.
        prompts (`list[torch.LongTensor]`): The prompt of each row without padding, at least one token each.
        seed (`int`): Seed of the randomness.
        earlier ([`VerifiedPrefix`], *optional*): That of the call before, whose cache serves again where this call
            continues its text.
        prompt_length (`int`, *optional*): Of the longest row, if some of its tokens were generated; all by default.
        num_workers (`int`, *optional*): How many drafts prepare a budget each.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SSDConfig,
        generation_config: GenerationConfig,
        prompts: list[torch.LongTensor],
        seed: int,
        earlier: VerifiedPrefix | None = None,
        prompt_length: int | None = None,
        num_workers: int = 1,
    ):
        self.device = model.device
        self.prefix = VerifiedPrefix(model, prompts, generation_config.max_length, earlier)
        longest = prompt_length or max(self.prefix.lengths)
        self.sampler = DraftSampler(model, config, generation_config, longest, seed, num_workers)
        self.vocab_size, self.sampled = self.sampler.vocab_size, self.sampler.noise is not None
        self.drafted = torch.zeros(len(prompts), 0, dtype=torch.long, device=self.device)
        self.known_logits: list[torch.Tensor] = []  # behind the first tokens of the speculation, if computed already

    def begin(self):
        self.known_logits = [self.prefix.feed(0, wanted=1)]

    def candidates(self, from_fallback, count):
        lookahead = self.drafted.shape[1]
        known = sum(logits.shape[1] for logits in self.known_logits)
        if known <= lookahead:
            self.known_logits.append(self.prefix.feed(lookahead, wanted=lookahead + 1 - known))
        logits = torch.cat(self.known_logits, dim=1).float()
        scores = self._process(logits, self.prefix.ends() + torch.arange(lookahead + 1))
        return OutcomeCandidates.of(scores, logits, self.drafted, from_fallback, count)

    def grow(self, accepted, bonus, plan):
        prefix, tokens = self.prefix, bonus
        starts = prefix.ends() + accepted.clamp(min=0)
        columns, places = from_host(starts, self.device), starts.tolist()
        base = max(prefix.lengths) + self.drafted.shape[1]
        branches = Branches(prefix.decoder, columns, base, plan.lookahead)
        histories = None
        if self.sampler.need_history:
            room = torch.zeros(len(prefix.ids), plan.lookahead + 1, dtype=torch.long, device=self.device)
            histories = torch.cat([prefix.ids, room], dim=1)[:, None].repeat(1, starts.shape[1], 1)
        for depth in range(plan.lookahead):
            if histories is not None:
                histories.scatter_(2, (columns + depth)[:, :, None], tokens[:, :, None])
            scores = self.sampler.process(branches.grow(tokens).float(), histories, starts + depth + 1)
            tokens, probabilities = self.sampler.draw(scores, places, depth, plan)
            devices.synchronize(self.device)
            yield tokens, probabilities

    def commit(self, accepted, bonus):
        self.prefix.decoder.leave_out([k < 0 for k in accepted])
        self.prefix.grow(accepted, bonus)
        self.sampler.forget_before([length - 1 for length in self.prefix.lengths])
        self.known_logits = []

    def complete(self, ready, width, plan):
        prefix, known, grown = self.prefix, ready.known, ready.tokens.shape[1]
        first = min(width, *known)
        tokens = ready.tokens.new_zeros(len(known), width)
        tokens[:, :grown] = ready.tokens[:, :width]
        probabilities = [] if ready.probabilities is None else [ready.probabilities[:, :first]]
        prefix.write(tokens, prefix.lengths)
        own = from_host([min(n, width) for n in known], self.device)
        starts, steps = [[length - 1] for length in prefix.lengths], width - first
        for depth in range(first, width):  # rows that have their tokens feed them: the prefix needs them anyway
            logits = prefix.feed(depth, wanted=1 if self.known_logits else depth + 1)
            self.known_logits.append(logits)
            scores = self._process(logits[:, -1:].float(), prefix.ends(depth))
            token, probability = self.sampler.draw(scores, starts, depth, plan)
            tokens[:, depth] = torch.where(own <= depth, token[:, 0], tokens[:, depth])
            prefix.write(tokens[:, depth : depth + 1], [length + depth for length in prefix.lengths])
            if probability is not None:
                if depth < grown and ready.probabilities is not None:
                    ahead = ready.probabilities[:, depth : depth + 1]
                    probability = torch.where((own <= depth)[:, None, None], probability, ahead)
                probabilities.append(probability)
        q = torch.cat(probabilities, dim=1) if probabilities else None
        if steps:
            devices.synchronize(self.device)  # so that it is known what the steps took
        return Speculation(tokens, q, ready.record, [width] * len(known)), steps

    def verify(self, tokens):
        self.drafted = from_host(tokens, self.device)
        self.prefix.write(self.drafted, self.prefix.lengths)

    def _process(self, logits: torch.Tensor, lengths: torch.LongTensor) -> torch.Tensor:
        histories = None
        if self.sampler.need_history:
            histories = self.prefix.ids[:, None].expand(-1, lengths.shape[1], -1)
        return self.sampler.process(logits, histories, lengths)
