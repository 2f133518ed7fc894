"""Draft-side sampling: the distributions of drafted tokens, and randomness that depends on a token's place alone."""

import copy
import functools

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper

from .. import devices
from ..argmax import argmax
from ..config import COUPLED, SSDConfig
from ..logits_processing import needs_history, process_branches
from ..noise import ACCEPTANCE, BONUS, DRAFTED, Noise, places
from ..rounds import Plan
from ..theory import geometric_fan_out
from .cache_shapes import allocate

SCALED_BUDGET = 16  # replaces an automatic budget in Saguaro sampling, so that tokens do not depend on measured times


def saguaro(probabilities: torch.Tensor, fan_out: int, c: float) -> torch.Tensor:
    """
    Saguaro sampling (Definition 14): the `fan_out` most likely tokens of distributions `(..., vocab_size)` become less
    likely by the factor C between 0 and 1. The target then accepts fewer drafted tokens, but rejects in favour of
    exactly those tokens, for which the next speculation is prepared: acceptance is traded for hits (Theorem 15). A
    distribution whose probabilities would all become 0 (C = 0 and no other tokens) stays as it is.
    """
    if c == 1 or fan_out == 0:
        return probabilities
    top = probabilities.topk(min(fan_out, probabilities.shape[-1]), dim=-1)
    scaled = probabilities.scatter(-1, top.indices, top.values * c)
    total = scaled.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, scaled / total, probabilities)


class SpeculationNoise:
    """
    The noise of drafted tokens, which is that of their place. A speculation is therefore the same whether it was
    drafted ahead or just in time. The outcome of a round decides which speculation is prepared, how long it is and
    where it comes from. These decisions never depend on the noise that the speculation is drawn with, because its start
    is a later one.
    """

    def __init__(self, noise: Noise, device: torch.device, first_row: int = 0):
        self.noise, self.device, self.first_row = noise, device, first_row  # the row whose noise is that of row 0
        self.known: dict[tuple[int, int, int, int], torch.Tensor] = {}

    def gather(self, rows: list[int], starts: list[list[int]], depth: int) -> torch.Tensor:
        """Returns the noise of shape `(len(rows), count, vocab_size)` for `count` starts of each of these rows."""
        first = self.first_row
        return self._at([[(DRAFTED, row - first, start, depth) for start in starts[row]] for row in rows])

    def of_bonus(self, rows: list[int], starts: list[int], counts: int) -> torch.Tensor:
        """Returns the noise `(len(rows), counts, vocab_size)` of bonus tokens after accepted counts of these rows."""
        first = self.first_row
        return self._at([[(BONUS, row - first, starts[row], depth) for depth in range(counts)] for row in rows])

    def of_acceptance(self, rows: list[int], starts: list[int], lookahead: int) -> torch.Tensor:
        """Returns the numbers `(len(rows), lookahead)` that decide whether the target accepts these rows' tokens."""
        first, depths = self.first_row, range(lookahead)
        at = [[places(ACCEPTANCE, row - first, starts[row], depth) for depth in depths] for row in rows]
        return self.noise.uniform(devices.from_host(at, self.device))

    def _at(self, of_rows: list[list[tuple]]) -> torch.Tensor:
        wanted = [self.noise.drawn_at(*place) for of_row in of_rows for place in of_row]
        new = [place for place in dict.fromkeys(wanted) if place not in self.known]
        if new:
            found = self.noise.exponential(devices.from_host([places(*place) for place in new], self.device))
            self.known.update(zip(new, found))
        return torch.stack([self.known[place] for place in wanted]).view(len(of_rows), -1, self.noise.vocab_size)

    def forget_before(self, starts: list[int]) -> None:
        """Drops the noise of speculations that start before the given position of each row."""
        first = self.first_row
        self.known = {place: found for place, found in self.known.items() if place[2] >= starts[place[1] + first]}


def draw(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.LongTensor:
    """
    Draws a token from each distribution `(..., vocab_size)` with exponential noise. The smallest of independent
    exponential variables with rates p is number i with probability p_i. `torch.multinomial` draws a single sample in
    the same way.
    """
    return argmax(probabilities / noise)


class DraftSampler:
    """Draws tokens as the target's generation config asks for: by the same processors, greedily or at random."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: SSDConfig,
        generation_config: GenerationConfig,
        prompt_length: int,
        seed: int,
        vocab_size: int,
        num_workers: int = 1,
        first_row: int = 0,
    ):
        self.config, self.num_workers, self.vocab_size = config, num_workers, vocab_size
        self.processors = draft_processors(model, generation_config, prompt_length)
        self.need_history = needs_history(self.processors)
        self.truncates = any(type(processor) is not TemperatureLogitsWarper for processor in self.processors)
        self.noise = None
        if generation_config.do_sample:
            noise = Noise(seed, vocab_size, config.verification == COUPLED)
            self.noise = SpeculationNoise(noise, devices.of_model(model), first_row)

    def process(self, scores: torch.Tensor, histories: torch.LongTensor | None, lengths: torch.LongTensor):
        """
        Applies the warpers to raw scores `(batch_size, N, vocab_size)`. The first `lengths` (on the CPU) of `histories`
        `(batch_size, N, columns)` are the tokens before each distribution, needed only where warpers read them.
        """
        if not self.processors:
            return scores
        flat = scores.flatten(0, 1)
        histories = histories.flatten(0, 1) if self.need_history else None
        return process_branches(self.processors, flat, histories, lengths.flatten()).view_as(scores)

    def bonus_noise(self, rows: list[int], starts: list[int], counts: int) -> torch.Tensor | None:
        """
        Returns the noise `(len(rows), counts, vocab_size)` with which the target draws the bonus token of these rows
        after each accepted count of speculations that begin at `starts`, which all rows have. `None` if it draws none,
        and in Saguaro sampling, which makes bonus tokens likely by q alone.
        """
        if self.noise is None or self.config.saguaro_c != 1:
            return None
        return self.noise.of_bonus(rows, starts, counts)

    def luck(self, rows: list[int], starts: list[int], lookahead: int) -> torch.Tensor | None:
        """
        Returns -log u - 1, `(len(rows), lookahead)`, for the numbers u with which the target accepts the tokens of
        speculations that begin at `starts`: those with u < p(x) / q(x). Its mean is 0, and it is 0 in greedy rows.
        `None` in coupled calls, which have no such numbers.
        """
        if self.config.verification == COUPLED:
            return None
        if self.noise is None:
            return torch.zeros(len(rows), lookahead)
        return -self.noise.of_acceptance(rows, starts, lookahead).log().float() - 1

    def draw(self, scores: torch.Tensor, noise: torch.Tensor | None, depth: int, plan: Plan):
        """
        Draws the token number `depth` of each speculation by processed scores `(batch_size, N, vocab_size)`, with the
        noise of [`SpeculationNoise.gather`], or `None` for the most likely tokens. Returns tokens `(batch_size, N)`,
        and the distributions that they were drawn from, `None` if verification needs none.
        """
        if noise is None:
            return argmax(scores), None
        if self.config.verification == COUPLED:
            return draw(scores.softmax(-1), noise), None
        fan_outs = self._fan_outs(plan)
        probabilities = saguaro(scores.softmax(-1), fan_outs[min(depth, len(fan_outs) - 1)], self.config.saguaro_c)
        return draw(probabilities, noise), probabilities

    def _fan_outs(self, plan: Plan) -> list[int]:
        """
        Returns the number of most likely tokens that Saguaro sampling scales after each accepted count (Theorem 12).
        With a fixed lookahead, a seed reproduces the tokens, so a budget that depends on measured times is not used.
        """
        budget = plan.budget
        if self.config.lookahead != "auto":
            budget = SCALED_BUDGET if self.config.budget == "auto" else self.config.budget
        priors = self.config.acceptance_rate, self.config.power_law_exponent
        return _planned_fan_outs(plan.lookahead, max(1, budget * self.num_workers), *priors)

    def supports(self, probabilities: torch.FloatTensor | None) -> torch.LongTensor | None:
        """Counts the tokens with a probability above 0 in each distribution. `None` if no warper sets any to 0."""
        if probabilities is None or not self.truncates:
            return None
        # NaN counts as a chance. On a CPU torch compares into float32 four times as fast as into booleans.
        return torch.ne(probabilities, 0, out=torch.empty_like(probabilities)).sum(-1).long()

    def forget_before(self, starts: list[int]) -> None:
        """Drops the noise before these positions. See [`SpeculationNoise.forget_before`]."""
        if self.noise is not None:
            self.noise.forget_before(starts)


@functools.lru_cache
def _planned_fan_outs(lookahead: int, budget: int, acceptance_rate: float, power_law_exponent: float) -> list[int]:
    return allocate(geometric_fan_out(lookahead, budget, acceptance_rate, power_law_exponent), budget)


def draft_processors(model: PreTrainedModel, generation_config: GenerationConfig, prompt_length: int):
    """
    Rebuilds the target's processors from its generation config with transformers' own code. Custom processors of the
    user are left out, and so are watermarks and processors that read the prompts as an encoder's input. The draft
    proposes without these processors, which only lowers acceptance.

    Returns:
        `LogitsProcessorList`, empty when decoding greedily without penalties.
    """
    generation_config = copy.copy(generation_config)
    # Without the prompts, transformers would warn that it ignores these, although the target applies them.
    generation_config.encoder_repetition_penalty = generation_config.encoder_no_repeat_ngram_size = None
    generation_config.watermarking_config = None  # such a processor may keep a state
    model._prepare_special_tokens(generation_config, True, device=devices.of_model(model))
    return model._get_logits_processor(
        generation_config=generation_config,
        input_ids_seq_length=prompt_length,
        encoder_input_ids=None,
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList(),
        device=devices.of_model(model),
        model_kwargs={},
    )
