"""The interface of drafters, which propose tokens, and the parts that they share."""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel

from .. import devices
from ..cache.support import attention_layout
from ..config import COUPLED
from ..devices import from_host
from ..rounds import Plan, Speculation, padded
from . import siblings
from .outcome_candidates import OutcomeCandidates
from .recurrent_prefix import RecurrentPrefix
from .request import SessionRequest
from .sampling import DraftSampler
from .verified_prefix import VerifiedPrefix


class Drafter(ABC):
    """
    Proposes tokens after the verified prefix of each row. In a round, `candidates` and `grow` are called while the
    target verifies; then `commit`, and either `complete`, if tokens are missing, or `take_speculation`. The tokens
    after an outcome depend on the outcome and the seed alone, not on whether they were prepared.
    """

    one_pass = False  # whether a pass over mask tokens gives all tokens of a speculation
    reads_target = False  # whether it reads hidden states of the target. Then prepared speculations are others
    prefix_class = VerifiedPrefix

    def __init__(
        self,
        model: PreTrainedModel,
        request: SessionRequest,  # whose warpers and penalties apply to proposals too
        earlier: VerifiedPrefix | None = None,  # of the previous call, whose cache is used if this call continues it
    ):
        options, self.device = request.generation_config, devices.of_model(model)
        self.vocab_size = request.vocab_size  # of the target; all code outside the draft model uses its tokens
        kind = RecurrentPrefix if attention_layout(model).recurrent else self.prefix_class
        self.prefix = kind(model, request, earlier)
        self.vocabulary = self.prefix.vocabulary
        self._sampler = functools.partial(DraftSampler, model, request)
        self.sampler = self._sampler(options, request.prompt_length, request.seed)
        self.samplers = [self.sampler] * len(request.prompts)  # of each row
        self.uses_q = request.config.uses_q(options.do_sample)
        # How many tokens the draft can propose.
        self.possible = min(self.vocabulary.common, getattr(model.config, "draft_vocab_size", self.vocab_size))
        # The speculation (batch_size, lookahead) that is being verified, and the known outputs of passes (batch_size,
        # count, ...) after its first tokens.
        self.drafted = torch.zeros(len(request.prompts), 0, dtype=torch.long, device=self.device)
        self.known: list[torch.Tensor] = []

    def begin(self) -> None:
        """Reads the prompts, while the target does the same. A head has to wait for the features of the prompts."""
        if self.prefix.rows and not self.reads_target:
            self._know(0)

    def candidates(self, from_fallback: list[bool], count: int) -> OutcomeCandidates:
        """Ranks `count` bonus tokens after each accepted count of the speculation that is being verified."""
        logits, starts = self._logits(self._outputs(from_fallback)), [n - 1 for n in self.prefix.lengths]
        is_mixed, width = len({*self.samplers}) > 1, logits.shape[1]

        def ranked(sampler: DraftSampler, rows: list[int], logits, histories, lengths):
            scores = sampler.process(logits, histories, lengths)
            noise = sampler.bonus_noise(rows, starts, width)
            return scores, torch.ones_like(scores) if noise is None and is_mixed else noise

        of_rows = logits, self._histories(width, 0), self.prefix.ends(torch.arange(width))
        scores, noise = self._each(list(range(len(logits))), ranked, *of_rows)
        luck = None
        if self.sampler.config.verification != COUPLED:  # the speculation is settled, so its luck may be looked at
            luck = np.zeros((len(starts), width - 1))
            for sampler in {*self.samplers}:
                rows = [row for row, other in enumerate(self.samplers) if other is sampler]
                luck[rows] = sampler.luck(rows, starts, width - 1)
        return OutcomeCandidates.of(scores, logits, self.drafted, from_fallback, count, self.possible, noise, luck)

    @abstractmethod
    def grow(self, accepted: list[list[int]], bonus: list[list[int]], plan: Plan) -> Iterator[tuple]:
        """
        Proposes tokens after all outcomes `(batch_size, N)` together, of negative accepted counts where there is none.
        Yields the arguments of [`~speculation_cache.SpeculationCache.append`], or `None` while they are on their way.
        """

    def commit(self, kept: list[int], tokens: list[list[int]], branches: list[int]) -> None:
        """Takes in each row's new tokens, the first `kept` of them its speculation's. A branch is -1 for a miss."""
        self.prefix.decoder.leave_out([not of_row for of_row in tokens])
        self.prefix.grow(tokens, kept)
        for noise in {sampler.noise for sampler in self.samplers if sampler.noise is not None}:
            noise.forget_before([length - 1 for length in self.prefix.lengths])

    def read(self, row: int, start: int, tokens: list[int], options: GenerationConfig | None, seed: int) -> None:
        """Reads the next tokens of a row that joins. After the last tokens, `take_speculation` must follow."""
        self.prefix.read(row, start, tokens, options is not None)
        if options is not None:
            sampler = self._sampler(options, self.prefix.lengths[row], seed, row)
            self.samplers[row] = sampler if sampler.noise or sampler.processors else self.sampler  # for greedy decoding
            self.forget_speculation()
            self.known = []  # nothing after the tokens of this row

    @abstractmethod
    def complete(self, ready: Speculation, width: int, plan: Plan) -> tuple[Speculation, int]:
        """Drafts the missing tokens of `width` each, which are verified next. Returns them and the number of passes."""

    def take_speculation(self, tokens: list[list[int]]) -> None:
        """Takes in the tokens, `lookahead` of each row, that are verified next."""
        self.drafted = from_host(tokens, self.device)
        self.prefix.write(self.drafted)

    def forget_speculation(self) -> None:
        """Forgets what it computed along the speculation, because other tokens are verified in some rows."""
        self.prefix.forget_speculation()
        self.known = [outputs[:, :1] for outputs in self.known[:1]]  # after the last verified token

    def _know(self, count: int) -> int:
        """Gets to know the outputs after up to `count` tokens of the speculation. Returns the number of passes."""
        missing = count + 1 - self._known_width
        if missing > 0:
            self.known.append(self.prefix.feed(count, wanted=missing))
        return int(missing > 0)

    @property
    def _known_width(self) -> int:
        return sum(outputs.shape[1] for outputs in self.known)

    def _outputs(self, from_fallback: list[bool]) -> torch.Tensor:
        """Returns the outputs of passes after 0 to K tokens of the speculation, `(batch_size, K + 1, ...)`."""
        self._know(self.drafted.shape[1])
        return torch.cat(self.known, dim=1)[:, : self.drafted.shape[1] + 1]

    def _of_hits(self, grown: torch.Tensor | None, tokens: list[list[int]], branches: list[int]) -> torch.Tensor | None:
        """Returns the outputs of the branches that became the speculation, of those of N, if all rows hit."""
        if grown is None or any(branch < 0 for branch, of_row in zip(branches, tokens) if of_row):
            return None
        index = from_host([max(0, branch) for branch in branches], self.device)
        return grown[torch.arange(len(tokens), device=self.device), index]

    def _logits(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.reads_target:
            outputs = self.prefix.decoder.view.logits(outputs)
        return self.vocabulary.to_target(outputs).float()

    def _each(self, rows: list[int], step: Callable, *of_rows: torch.Tensor | None) -> tuple:
        """Returns the tensors that `step(sampler, rows, *of_rows)` returns, taken for the rows of each sampler."""
        groups: dict[DraftSampler, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(self.samplers[row], []).append(place)
        if len(groups) == 1:
            return step(self.samplers[rows[0]], rows, *of_rows)
        parts = []
        for sampler, places in groups.items():
            of_group = [None if one is None else one[places] for one in of_rows]
            parts.append(step(sampler, [rows[place] for place in places], *of_group))
        order = from_host(sum(groups.values(), []), self.device).argsort()
        return tuple(None if one[0] is None else torch.cat(one)[order] for one in zip(*parts))

    def _to_host(self, tokens: torch.LongTensor, probabilities: torch.FloatTensor | None) -> tuple[list, list | None]:
        """Returns tokens and what [`DraftSampler.supports`] counts as lists. The host waits for the device once."""
        supports = self.sampler.supports(probabilities)
        on_host = devices.to_host(tokens, *[] if supports is None else [supports])
        return on_host[0].tolist(), None if supports is None else on_host[1].tolist()

    def _draw(self, logits, lengths: torch.LongTensor, starts: list[list[int]], depth: int, plan: Plan, histories):
        """Draws token number `depth` of each branch by logits `(rows, N, vocab_size)`, as [`DraftSampler`] does."""
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
        """Returns `count` copies of the verified tokens, and room for `behind` more; `None` if no warper reads it."""
        if not any(sampler.need_history for sampler in self.samplers):
            return None
        return pad(self.prefix.ids.values, (0, behind))[:, None].repeat(1, count, 1)


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

    def add(self, depth: int, token: torch.LongTensor, probability: torch.FloatTensor | None, beside) -> None:
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
        return dataclasses.replace(self.ready, tokens=tokens, probabilities=q, support=support, beside=self.beside)
