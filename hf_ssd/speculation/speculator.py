"""The draft's work in one call of generate(), without any communication."""

import math
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig, PreTrainedModel

from .. import devices
from ..cache.branches import Branches
from ..cache.speculation import Speculation, SpeculationCache
from ..config import SSDConfig
from ..devices import from_host
from .backups import Backups, join
from .experience import Experience
from .fallback import Backup
from .forks import Forks
from .lessons import Lesson, Lessons
from .planner import BACKUPS, GUESSES, PREPARED, Plan, Round
from .proposals import Proposals
from .trunk import SKIPPED, Trunk


class Speculator:
    """
    Drafts for a batch of rows: ahead of time for the likely outcomes ([`~Speculator.prepare`]), and just in time for
    the outcomes that were not prepared ([`~Speculator.answer`]). With `asynchronous=False` it never prepares, and is
    the draft of ordinary speculative decoding.

    With a fixed lookahead and the primary fallback, what it answers depends on the outcomes alone, not on what had
    been prepared.

    Args:
        model (`PreTrainedModel`): The draft model.
        config (`SSDConfig`): What to prepare, or that it is to be planned.
        generation_config (`GenerationConfig`): The target's. Its warpers and penalties shape the proposals too.
        prompts (`list[torch.LongTensor]`): The prompt of each row without padding, at least one token each.
        seed (`int`): Seed of the draft's randomness.
        experience ([`Experience`], *optional*): What earlier calls have taught.
        custom_backup ([`~hf_ssd.speculation.fallback.Backup`], *optional*): The user's own fallback.
        earlier ([`Trunk`], *optional*): That of the call before, whose cache serves again where this one continues it.
        share (`tuple[int, int]`, *optional*): Which of how many drafts this one is. Each prepares its share of the
            outcomes of all their budgets together.
        prompt_length (`int`, *optional*): Of the longest row, if some of its tokens were generated; all by default.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SSDConfig,
        generation_config: GenerationConfig,
        prompts: list[torch.LongTensor],
        seed: int,
        experience: Experience | None = None,
        custom_backup: Backup | None = None,
        share: tuple[int, int] = (0, 1),
        earlier: Trunk | None = None,
        prompt_length: int | None = None,
    ):
        self.config, self.device, self.share = config, model.device, share
        self.trunk = Trunk(model, prompts, generation_config.max_length, earlier)
        limit = generation_config.max_length
        self.longest_call = math.inf if limit is None else limit - max(self.trunk.lengths)  # rounds
        self.vocab_size = vocab_size = model.config.get_text_config(decoder=True).vocab_size
        experience = Experience() if experience is None else experience
        self.planner, shape = experience.of(config, generation_config, len(prompts), vocab_size, share[1])
        self.plan = self.planner.plan()
        if self.planner.adapts_tokens or custom_backup or self.plan.fallback != "primary":
            # What was learned in a call with the same seed must not meet the same noise again.
            seed += 1_000_003 * (experience.calls - 1)
        longest = prompt_length or max(self.trunk.lengths)
        self.proposals = Proposals(model, config, generation_config, longest, seed)
        self.backups = Backups(vocab_size, seed, custom_backup)
        self.lessons = Lessons(self.planner, shape, self.trunk, self.backups.ngram)
        self.finished = [False] * len(prompts)
        self.drafted = torch.zeros(len(prompts), 0, dtype=torch.long, device=self.device)
        self.sources = [PREPARED] * len(prompts)  # where each row's speculation came from
        self.known_logits: list[torch.Tensor] = []  # after the first tokens of the speculation, if already computed
        self.answered = self.outcome_came = 0.0
        self.forks: Forks | None = None
        self.prepared: SpeculationCache | None = None
        self.lesson: Lesson | None = None  # of the round whose outcome was looked up last

    def prefill(self) -> None:
        """Feeds the prompts, while the target does the same. If the call is all rest, they would only be in its way."""
        if self.rest < self.longest_call:
            self.feed()

    def feed(self) -> None:
        """Feeds the verified tokens that the draft model has not seen yet."""
        self.known_logits = [self.trunk.feed(0, wanted=1)]

    @property
    def rest(self) -> int:
        """For how many rounds after the next one this draft need not be asked: it would propose nothing."""
        return self.planner.rest if self.share[1] == 1 else 0

    @property
    def rest_seconds(self) -> float:
        """How long that is to take."""
        return self.planner.rest_seconds

    # ---------------------------------------------------------------- ahead of time

    def prepare(self, is_due: Callable[[], bool] = lambda: False, plan: Plan | None = None) -> None:
        """
        Drafts the next speculation for the likely outcomes of the one that is being verified.

        Args:
            is_due (`Callable[[], bool]`): Whether the outcome is there. Then the branches stay as they are.
            plan ([`~hf_ssd.speculation.planner.Plan`], *optional*): What to do, if another draft plans.
        """
        self.lessons.teach_what_is_due()
        self.plan = plan = self.planner.plan() if plan is None else plan
        if not self.config.asynchronous or plan.lookahead == 0 or plan.budget == 0:
            return
        lookahead = self.drafted.shape[1]

        # 1. Feed what is not in the trunk yet; now there are logits to fork from after each accepted count.
        known = sum(logits.shape[1] for logits in self.known_logits)
        if known <= lookahead:
            self.known_logits.append(self.trunk.feed(lookahead, wanted=lookahead + 1 - known))
        logits = torch.cat(self.known_logits, dim=1).float()
        if is_due() and not self.planner.is_repeatable:
            return

        # 2. Choose the outcomes.
        scores = self._process_trunk(logits, self.trunk.ends() + torch.arange(lookahead + 1))
        from_backup = [source in BACKUPS for source in self.sources]
        budget = plan.total_budget
        self.forks = Forks.of(scores, logits, self.drafted, from_backup, max(budget, GUESSES))
        accepted, bonus = self.forks.outcomes(
            self.lessons.shape.fan_outs(self.forks, budget), self.share, self.trunk.decoder.fewest_tokens
        )
        prepared, tokens = SpeculationCache(from_host(accepted, self.device), bonus), bonus

        # 3. Grow all branches together, one token of each per forward pass.
        starts = self.trunk.ends() + accepted.clamp(min=0)
        columns = from_host(starts, self.device)
        branches = Branches(self.trunk.decoder, columns, max(self.trunk.lengths) + lookahead, plan.lookahead)
        histories = self._branch_histories(starts) if self.proposals.need_history else None
        places = starts.tolist()
        self.prepared = prepared
        if self.answered:
            self.lessons.note(self.planner.observe_choice, time.perf_counter() - self.answered)
        for depth in range(plan.lookahead):
            if is_due():
                return
            began = time.perf_counter()
            if histories is not None:
                histories.scatter_(2, (columns + depth)[:, :, None], tokens[:, :, None])
            scores = branches.grow(tokens).float()
            scores = self.proposals.process(scores, histories, starts + depth + 1)
            tokens, probabilities = self.proposals.propose(scores, places, depth, plan)
            prepared.append(tokens, probabilities)
            self._observe(self.planner.observe_branches, len(self.trunk.rows) * tokens.shape[1], began)
        self.lessons.teach_at_leisure(is_due)
        if not is_due():
            self.planner.think()

    @property
    def prepared_budget(self) -> int:
        """How many outcomes of each row are prepared."""
        return 0 if self.prepared is None else min(self.prepared.accepted.shape[1], self.plan.budget)

    # ---------------------------------------------------------------- the answer

    def answer(
        self, accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float = 0.0, verified: int | None = None
    ) -> Speculation:
        """Returns the next speculation of each row, and moves on to verify it. See [`~Speculator.look_up`]."""
        return self.complete(self.look_up(accepted, bonus, seconds, verified))

    def look_up(
        self, accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float = 0.0, verified: int | None = None
    ) -> Speculation:
        """
        Takes in an outcome, and returns what was prepared for it. What is verified next is then to be settled by
        [`~Speculator.complete`], or by [`~Speculator.follow`] if another draft did it.

        Args:
            accepted (`torch.LongTensor` of shape `(batch_size,)`): How many tokens of the last speculation the target
                accepted, or `SKIPPED` for a row that is finished.
            bonus (`torch.LongTensor` of shape `(batch_size,)`): The token that follows them.
            seconds (`float`, *optional*): How long the target took to find out.
            verified (`int`, *optional*): How many tokens of the last speculation it looked at; all by default.
        """
        began = time.perf_counter()
        counts, tokens = accepted.tolist(), bonus.tolist()
        accepted, bonus = from_host(accepted, self.device), from_host(bonus, self.device)
        if self.prepared is not None:
            ready = self.prepared.lookup(accepted, bonus)
        else:
            nothing = torch.zeros(len(accepted), 0, dtype=torch.long, device=self.device)
            ready = Speculation(nothing, None, torch.zeros(len(accepted), dtype=torch.bool))
        self.finished = [k == SKIPPED for k in counts]
        self.trunk.decoder.leave_out(self.finished)
        self.lesson = None
        if verified is None or verified == self.drafted.shape[1]:  # the end of a call teaches nothing
            round_ = self._round(counts, seconds, began)
            self.lesson = Lesson(round_, tokens, self.trunk.lengths, self.forks)
        self.trunk.grow(counts, bonus)
        self.proposals.forget_before([n - 1 for n in self.trunk.lengths])
        self.known_logits = []
        return ready

    def catch_up(self, accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float) -> None:
        """Takes in the outcome of a round in which this draft was not asked, and nothing was proposed."""
        ready = self.look_up(accepted, bonus, seconds)
        if self.lesson is not None:
            round_ = self.lesson.round
            round_.elapsed, round_.transit = seconds, None
        self.follow(ready.tokens[:, :0], [False] * len(ready.hits), "primary")
        self.lessons.teach()
        self.answered = self.outcome_came = 0.0  # what comes now was not waited for

    def end(self) -> None:
        """The call is over: learns what there was no time for."""
        self.lessons.teach()

    def complete(self, ready: Speculation, known: list[int] | None = None) -> Speculation:
        """
        Drafts just in time what is missing, and moves on to verify the result.

        Args:
            ready ([`~hf_ssd.cache.speculation.Speculation`]): What was prepared, by this draft or by others.
            known (`list[int]`, *optional*): How many of each row's tokens there are. All of them by default, in rows
                that hit.

        Returns:
            The speculations to verify. Distributions of tokens that were ready are those of `ready`.
        """
        grown, hits = ready.tokens.shape[1], ready.hits.tolist()
        known = [grown if hit else 0 for hit in hits] if known is None else known
        known = [math.inf if finished else n for n, finished in zip(known, self.finished)]  # finished rows lack nothing
        missed = [row for row, finished in enumerate(self.finished) if not finished and not hits[row]]
        source, backup = "primary", None
        if missed and self.forks is not None:  # if nothing was prepared, the draft is asked, as in speculative decoding
            source, backup = self.backups.of(self.plan.fallback)
        if backup is not None:
            proposal = backup.propose(self.trunk.ids, self.trunk.lengths, missed, self.plan.lookahead)
            ready = join(ready, missed, proposal, self.vocab_size, self.proposals.noise is not None)
            width = ready.tokens.shape[1]
            known = [width if row in missed else min(n, width) for row, n in enumerate(known)]
        alone = backup is not None and not any(hits)  # then its proposals are as long as it likes
        width = ready.tokens.shape[1] if alone else self.planner.lookahead(known)
        speculation = self._continue(ready, known, width)
        self.follow(speculation.tokens, hits, source)
        return speculation

    def follow(self, tokens: torch.LongTensor, hits: list[bool], source: str) -> None:
        """
        Moves on to verify a speculation.

        Args:
            tokens (`torch.LongTensor` of shape `(batch_size, lookahead)`): The tokens.
            hits (`list[bool]`): Which rows had been prepared, by this draft or another.
            source (`str`): Where those of the others come from; see [`~hf_ssd.speculation.planner.Round`].
        """
        if self.lesson is not None:
            self.lesson.round.hits = hits
            self.lessons.add(self.lesson)
            self.lesson = None
        self.sources = [PREPARED if hit else source for hit in hits]
        self.prepared, self.forks = None, None
        self.drafted = from_host(tokens, self.device)
        self.trunk.write(self.drafted, self.trunk.lengths)
        self.answered = time.perf_counter()

    def _round(self, counts: list[int], seconds: float, began: float) -> Round:
        """What there is to learn of the round whose outcome came at `began`, except which rows hit."""
        round_ = Round(self.drafted.shape[1], counts, [], self.sources, seconds=seconds)
        if self.outcome_came:
            round_.elapsed = began - self.outcome_came
        self.outcome_came = began
        waited = self.plan.lookahead == 0 or self.plan.budget == 0 or not self.config.asynchronous
        if self.forks is not None:
            round_.budget = self.prepared_budget * self.share[1]
        elif not waited:
            round_.seconds = 0.0  # it was neither prepared for nor waited for
            return round_
        if self.answered:
            round_.transit = max(0.0, began - self.answered - seconds)
        return round_

    def _continue(self, ready: Speculation, known: list[float], width: int) -> Speculation:
        """
        Drafts just in time what is missing of speculations of `width` tokens: everything for a row that missed, the
        rest for a row whose branch was half grown, nothing if all is there. Rows that have their tokens feed them:
        their trunk needs them anyway.
        """
        grown = ready.tokens.shape[1]
        ready_depth = min(width, *known)
        tokens = ready.tokens.new_zeros(len(known), width)
        tokens[:, :grown] = ready.tokens[:, :width]
        probabilities = [] if ready.probabilities is None else [ready.probabilities[:, :ready_depth]]
        self.trunk.write(tokens, self.trunk.lengths)
        own = from_host(known, self.device)
        starts = [[n - 1] for n in self.trunk.lengths]
        for depth in range(ready_depth, width):
            began, fed = time.perf_counter(), len(self.trunk.rows) * self.trunk.lacks(depth)
            logits = self.trunk.feed(depth, wanted=1 if self.known_logits else depth + 1)
            self.known_logits.append(logits)
            scores = self._process_trunk(logits[:, -1:].float(), self.trunk.ends(depth))
            token, probability = self.proposals.propose(scores, starts, depth, self.plan)
            tokens[:, depth] = torch.where(own <= depth, token[:, 0], tokens[:, depth])
            self.trunk.write(tokens[:, depth : depth + 1], [n + depth for n in self.trunk.lengths])
            if probability is not None:
                if depth < grown:
                    ahead = ready.probabilities[:, depth : depth + 1]
                    probability = torch.where((own <= depth)[:, None, None], probability, ahead)
                probabilities.append(probability)
            self._observe(self.planner.observe_step, fed, began)
        return Speculation(tokens, torch.cat(probabilities, dim=1) if probabilities else None, ready.hits)

    def _observe(self, observe: Callable[[int, float], None], tokens: int, began: float) -> None:
        devices.synchronize(self.device)  # so that it is known, and an outcome that is due is noticed in time
        self.lessons.note(observe, tokens, time.perf_counter() - began)

    def _process_trunk(self, logits: torch.Tensor, lengths: torch.LongTensor) -> torch.Tensor:
        histories = self.trunk.ids[:, None].expand(-1, lengths.shape[1], -1) if self.proposals.need_history else None
        return self.proposals.process(logits, histories, lengths)

    def _branch_histories(self, starts: torch.LongTensor) -> torch.LongTensor:
        ids = self.trunk.ids
        room = torch.zeros(len(ids), self.plan.lookahead + 1, dtype=torch.long, device=self.device)
        return torch.cat([ids, room], dim=1)[:, None].repeat(1, starts.shape[1], 1)
