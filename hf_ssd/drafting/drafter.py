"""The interface of drafters, which propose tokens, and the parts that they share."""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel

from .. import devices
from ..cache.support import attention_layout
from ..config import SSDConfig
from ..devices import from_host
from ..rounds import Plan, Speculation, padded
from . import siblings
from .outcome_candidates import OutcomeCandidates
from .recurrent_prefix import RecurrentPrefix
from .sampling import DraftSampler
from .verified_prefix import VerifiedPrefix
from .vocabulary import Vocabulary


class Drafter(ABC):
    """
    Proposes tokens after the verified prefix of each row. In a round, `candidates` and `grow` are called while the
    target verifies; then `commit`, and either `complete`, if tokens are missing, or `take_speculation`. The tokens
    proposed after an outcome depend on the outcome and the seed alone, and not on whether they were prepared.
    """

    one_pass = False  # whether a pass over mask tokens gives all tokens of a speculation
    # Whether it reads hidden states of the target, at the layers that the model names. Then a speculation that is
    # prepared is not the one that would be drafted just in time.
    reads_target = False
    prefix_class = VerifiedPrefix

    def __init__(
        self,
        model: PreTrainedModel,
        config: SSDConfig,
        generation_config: GenerationConfig,  # the target's, whose warpers and penalties apply to proposals too
        prompts: list[torch.LongTensor],  # without padding, at least one token each
        seed: int,
        earlier: VerifiedPrefix | None = None,  # of the previous call, whose cache is used if this call continues it
        prompt_length: int | None = None,  # of the longest prompt, if rows already contain generated tokens
        num_workers: int = 1,  # drafts that prepare a budget each
        vocabulary: Vocabulary | None = None,  # if the target has another one than the draft
    ):
        self.device = devices.of_model(model)
        limit = generation_config.max_length
        options = {"cuda_graphs": config.cuda_graphs, "pack_weights": config.pack_weights}
        kind = RecurrentPrefix if attention_layout(model).recurrent else self.prefix_class
        self.prefix = kind(model, prompts, limit, earlier, vocabulary, **options)
        self.vocabulary = self.prefix.vocabulary
        self.vocab_size = self.vocabulary.size  # of the target; all code outside the draft model uses its tokens
        longest = prompt_length or max(self.prefix.lengths)
        self._sampler = functools.partial(DraftSampler, model, config)
        self.sampler = self._sampler(generation_config, longest, seed, self.vocab_size, num_workers)
        self.samplers = [self.sampler] * len(prompts)  # of each row
        self.uses_q = config.uses_q(generation_config.do_sample)
        self.possible = self.vocabulary.common  # how many tokens the draft can propose
        # The speculation (batch_size, lookahead) that is being verified.
        self.drafted = torch.zeros(len(prompts), 0, dtype=torch.long, device=self.device)

    @abstractmethod
    def begin(self) -> None:
        """Reads the prompts, while the target does the same."""

    def candidates(self, from_fallback: list[bool], count: int) -> OutcomeCandidates:
        """Ranks `count` bonus tokens after each accepted count of the speculation that is being verified."""
        logits = self._logits(self._outputs(from_fallback))
        scores = self._process(logits, self.prefix.ends() + torch.arange(logits.shape[1]))
        noise, luck = self._noise(scores)
        return OutcomeCandidates.of(scores, logits, self.drafted, from_fallback, count, self.possible, noise, luck)

    @abstractmethod
    def grow(self, accepted: list[list[int]], bonus: list[list[int]], plan: Plan) -> Iterator[tuple]:
        """
        Proposes tokens after each outcome, for all outcomes `(batch_size, N)` together, in one or more forward passes.
        Accepted counts are negative for a place that holds no outcome.

        Yields after each pass the arguments of [`~hf_ssd.drafting.speculation_cache.SpeculationCache.append`] for the
        next T tokens of each outcome; `None` when asked while the tokens are still on their way to the host.
        """

    def commit(self, kept: list[int], tokens: list[list[int]], branches: list[int]) -> None:
        """
        Takes in the new tokens of each row, none for a row that is left out from now on. The first `kept` of them are
        the first of its last speculation. `branches` were prepared for the outcome, -1 for a miss.
        """
        self.prefix.decoder.leave_out([not of_row for of_row in tokens])
        self.prefix.grow(tokens, kept)
        for sampler in {*self.samplers}:
            sampler.forget_before([length - 1 for length in self.prefix.lengths])

    def read(self, row: int, start: int, tokens: list[int], options: GenerationConfig | None, seed: int) -> None:
        """
        Reads the next tokens of a row that joins, which begins to take part in the passes with the settings that come
        with its last tokens. [`~Drafter.take_speculation`] must follow then.
        """
        self.prefix.read(row, start, tokens, options is not None)
        if options is not None:
            place = self.vocab_size, self.sampler.num_workers, row
            sampler = self._sampler(options, self.prefix.lengths[row], seed, *place)
            self.samplers[row] = sampler if sampler.noise or sampler.processors else self.sampler  # for greedy decoding
            self.forget_speculation()

    @abstractmethod
    def complete(self, ready: Speculation, width: int, plan: Plan) -> tuple[Speculation, int]:
        """
        Drafts the missing tokens just in time: all tokens of a row that missed, and the rest for a row whose branch was
        only partly grown. The result, `width` tokens of each row, becomes the speculation that is verified next.
        Returns it and the number of forward passes.
        """

    def take_speculation(self, tokens: list[list[int]]) -> None:
        """Takes in the tokens, `lookahead` of each row, that are verified next."""
        self.drafted = from_host(tokens, self.device)
        self.prefix.write(self.drafted)

    def forget_speculation(self) -> None:
        """Forgets what it computed along the speculation, because other tokens are verified in some rows."""
        self.prefix.forget_speculation()

    # ---------------------------------------------------------------- for all kinds

    @abstractmethod
    def _outputs(self, from_fallback: list[bool]) -> torch.Tensor:
        """Returns the outputs of passes after 0 to K tokens of the speculation, `(batch_size, K + 1, ...)`."""

    def _logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the target's logits for the outputs of passes."""
        return self.vocabulary.to_target(outputs).float()

    def _process(self, logits: torch.Tensor, lengths: torch.LongTensor) -> torch.Tensor:
        """Applies the warpers to logits `(batch_size, N, vocab_size)` after `lengths` `(batch_size, N)` tokens."""
        histories = None
        if any(sampler.need_history for sampler in self.samplers):
            histories = self.prefix.ids.values[:, None].expand(-1, lengths.shape[1], -1)
        rows = list(range(len(logits)))
        return self._each(rows, lambda sampler, _, *of_rows: (sampler.process(*of_rows),), logits, histories, lengths)[
            0
        ]

    def _noise(self, scores: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """
        Returns the noise of bonus tokens after all positions, 1 for rows that are drawn without noise, and the luck of
        the drafted tokens. The speculation does not change any more, so both may be looked at.
        """
        starts = [length - 1 for length in self.prefix.lengths]
        if all(sampler.noise is None for sampler in self.samplers):
            return None, None

        def noise(sampler: DraftSampler, rows: list[int], scores: torch.Tensor):
            found = sampler.bonus_noise(rows, starts, scores.shape[1])
            found = torch.ones_like(scores) if found is None and len({*self.samplers}) > 1 else found
            return found, sampler.luck(rows, starts, scores.shape[1] - 1)

        return self._each(list(range(len(scores))), noise, scores)

    def _each(self, rows: list[int], step: Callable, *of_rows: torch.Tensor | None) -> tuple:
        """
        Returns the tensors that `step(sampler, rows, *of_rows)` returns, taken for the rows of each sampler. `of_rows`
        have an element for each of the rows, and so have the results.
        """
        groups: dict[DraftSampler, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(self.samplers[row], []).append(place)
        if len(groups) == 1:
            return step(self.samplers[rows[0]], rows, *of_rows)
        parts = []
        for sampler, places in groups.items():
            of_group = [None if one is None else one[places] for one in of_rows]
            parts.append(step(sampler, [rows[place] for place in places], *of_group))
        order = from_host([place for places in groups.values() for place in places], self.device).argsort()
        return tuple(None if one[0] is None else torch.cat(one)[order] for one in zip(*parts))

    def _to_host(self, tokens: torch.LongTensor, probabilities: torch.FloatTensor | None) -> tuple[list, list | None]:
        """
        Returns tokens `(...)` as lists and, if warpers may set probabilities to 0, for each token the number of tokens
        with a probability above 0 in its distribution. The host waits for the device once.
        """
        supports = self.sampler.supports(probabilities)
        on_host = devices.to_host(tokens, *[] if supports is None else [supports])
        return on_host[0].tolist(), None if supports is None else on_host[1].tolist()

    def _draw(self, logits, lengths: torch.LongTensor, starts: list[list[int]], depth: int, plan: Plan, histories):
        """
        Draws the token number `depth` of each row's branches from logits `(batch_size, N, vocab_size)`, for the rows
        that are computed. For `lengths` and `histories` see [`DraftSampler.process`]. Returns the results of
        [`DraftSampler.draw`] and, if the plan has trees, that of [`~hf_ssd.drafting.siblings.beside`].
        """
        decoder = self.prefix.decoder

        def drawn(sampler: DraftSampler, rows: list[int], logits, histories, lengths):
            scores = sampler.process(logits, histories, lengths)
            noise = None if sampler.noise is None else sampler.noise.gather(rows, starts, depth)
            tokens, probabilities = sampler.draw(scores, noise, depth, plan)
            return tokens, probabilities, siblings.beside(scores, noise, tokens) if plan.nodes else None

        computed = map(decoder.computed, (logits, histories, lengths))
        found = self._each(self.prefix.rows, drawn, *computed)
        return tuple(None if one is None else decoder.of_all_rows(one) for one in found)

    def _histories(self, count: int, behind: int) -> torch.LongTensor | None:
        """
        Returns the verified tokens `(batch_size, count, columns)` for `count` branches of each row, with room for
        `behind` more tokens; `None` if no warper reads them.
        """
        if not any(sampler.need_history for sampler in self.samplers):
            return None
        ids = self.prefix.ids.values
        return pad(ids, (0, behind))[:, None].repeat(1, count, 1)


class Completion:
    """A speculation that is completed token by token. Rows keep the tokens that are ready."""

    def __init__(self, drafter: "Drafter", ready: Speculation, width: int):
        known = [tokens[:width] for tokens in ready.tokens]
        self.drafter, self.ready = drafter, ready
        self.first = min(map(len, known))  # index of the first token that is missing in any row
        self.own = from_host([len(tokens) for tokens in known], drafter.device)
        self.tokens = from_host(padded(known, width), drafter.device)
        self.beside = [list(of_row[:width]) for of_row in ready.beside or [[]] * len(known)]
        self.ahead = ready.probabilities
        self.probabilities = [] if self.ahead is None else [self.ahead[:, : self.first]]

    def add(
        self,
        depth: int,
        token: torch.LongTensor,
        probability: torch.FloatTensor | None = None,
        beside: torch.LongTensor | None = None,
    ) -> None:
        """Gives each row that lacks token `depth` its `token` `(batch_size, 1)`, drawn from `probability`."""
        if beside is not None:
            for of_row, new in zip(self.beside, beside.tolist()):
                of_row += new[: depth == len(of_row)]
        is_missing = self.own <= depth
        self.tokens[:, depth] = torch.where(is_missing, token[:, 0], self.tokens[:, depth])
        if probability is not None:
            if self.ahead is not None and depth < self.ahead.shape[1]:
                ahead = self.ahead[:, depth : depth + 1]
                probability = torch.where(is_missing[:, None, None], probability, ahead)
            self.probabilities.append(probability)

    def speculation(self) -> Speculation:
        """Returns the result. The host waits until the device has computed it."""
        q = torch.cat(self.probabilities, dim=1) if self.probabilities else None
        tokens, supports = self.drafter._to_host(self.tokens, q)
        support = self.drafter.vocab_size if supports is None else max(map(max, supports))
        found = dataclasses.replace(self.ready, tokens=tokens, probabilities=q, support=support)
        found.beside = self.beside
        return found
