"""Draft-side sampling: the distributions of drafted tokens, and randomness that depends on a token's place alone."""

import copy

import torch
from transformers import GenerationConfig, PreTrainedModel, TemperatureLogitsWarper

from .. import devices
from ..argmax import argmax
from ..config import COUPLED
from ..logits_processing import needs_history, process_branches
from ..noise import ACCEPTANCE, BONUS, DRAFTED, Noise, places
from ..rounds import Plan
from .cache_shapes import best_fan_out
from .request import SessionRequest

SCALED_BUDGET = 16  # replaces an automatic budget in Saguaro sampling, so that tokens do not depend on measured times


def saguaro(probabilities: torch.Tensor, fan_out: int, c: float) -> torch.Tensor:
    """
    Makes the `fan_out` most likely tokens less likely by C (Definition 14), so that rejections favour those for which
    the next speculation is prepared (Theorem 15). Distributions that would be all 0 stay as they are.
    """
    if c == 1 or fan_out == 0:
        return probabilities
    top = probabilities.topk(min(fan_out, probabilities.shape[-1]), dim=-1)
    scaled = probabilities.scatter(-1, top.indices, top.values * c)
    total = scaled.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, scaled / total, probabilities)


class SpeculationNoise:
    """The noise of drafted tokens, that of their place: a speculation is the same drafted ahead or just in time."""

    def __init__(self, noise: Noise, device: torch.device, first_row: int = 0):
        self.noise, self.device, self.first_row = noise, device, first_row  # the row whose noise is that of row 0
        self.known: dict[tuple[int, int, int, int], torch.Tensor] = {}

    def gather(self, rows: list[int], starts: list[list[int]], depth: int) -> torch.Tensor:
        """Returns the noise of shape `(len(rows), count, vocab_size)` for `count` starts of each of these rows."""
        return self.at(DRAFTED, [[(row, start, depth) for start in starts[row]] for row in rows])

    def of_acceptance(self, rows: list[int], starts: list[int], lookahead: int) -> torch.Tensor:
        """Returns the numbers `(len(rows), lookahead)`, on the CPU, with which the target accepts tokens."""
        of_rows = torch.tensor([[row - self.first_row, starts[row]] for row in rows])
        return self.noise.uniform(places(ACCEPTANCE, of_rows[:, :1], of_rows[:, 1:], torch.arange(lookahead)))

    def at(self, purpose: int, of_rows: list[list[tuple[int, int, int]]]) -> torch.Tensor:
        """Returns the noise `(len(of_rows), N, vocab_size)` of N places of each row."""
        place_of, first = self.noise.drawn_at, self.first_row
        wanted = [place_of(purpose, row - first, *place) for of_row in of_rows for row, *place in of_row]
        new = [place for place in dict.fromkeys(wanted) if place not in self.known]
        if new:
            found = self.noise.exponential(devices.from_host([places(*place) for place in new], self.device))
            self.known.update(zip(new, found))
        return torch.stack([self.known[place] for place in wanted]).view(len(of_rows), -1, self.noise.vocab_size)

    def forget_before(self, starts: list[int]) -> None:
        """Drops the noise of speculations that start before these positions."""
        first = self.first_row
        self.known = {place: found for place, found in self.known.items() if place[2] >= starts[place[1] + first]}


def draw(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.LongTensor:
    """Draws a token from each distribution `(..., vocab_size)`, as `torch.multinomial` does, with exponential noise."""
    return argmax(probabilities / noise)


class DraftSampler:
    """Draws tokens as the target's generation config asks for: by the same processors, greedily or at random."""

    def __init__(
        self,
        model: PreTrainedModel,
        request: SessionRequest,
        generation_config: GenerationConfig,
        prompt_length: int,
        seed: int,
        first_row: int = 0,
    ):
        self.config, self.num_workers = request.config, request.num_workers
        self.processors = draft_processors(model, generation_config, prompt_length)
        self.need_history = needs_history(self.processors)
        self.truncates = any(type(processor) is not TemperatureLogitsWarper for processor in self.processors)
        self.noise = None
        if generation_config.do_sample:
            noise = Noise(seed, request.vocab_size, self.config.verification == COUPLED)
            self.noise = SpeculationNoise(noise, devices.of_model(model), first_row)

    def process(self, scores: torch.Tensor, histories: torch.LongTensor | None, lengths: torch.LongTensor):
        """Applies the warpers to raw scores `(batch_size, N, vocab_size)` after the first `lengths` of `histories`."""
        # `(batch_size, N, columns)`, needed only where warpers read them; `lengths` are on the CPU.
        if not self.processors:
            return scores
        histories = histories.flatten(0, 1) if self.need_history else None
        return process_branches(self.processors, scores.flatten(0, 1), histories, lengths.flatten()).view_as(scores)

    def bonus_noise(self, rows: list[int], starts: list[int], counts: int) -> torch.Tensor | None:
        """Returns the noise of bonus tokens `(rows, counts, vocab_size)`; `None` without, or in Saguaro sampling."""
        if self.noise is None or self.config.saguaro_c != 1:  # q alone makes bonus tokens likely there
            return None
        return self.noise.at(BONUS, [[(row, starts[row], depth) for depth in range(counts)] for row in rows])

    def luck(self, rows: list[int], starts: list[int], lookahead: int) -> torch.Tensor | float:
        """Returns -log u - 1 `(rows, lookahead)` for the u that tokens are accepted with, of mean 0; 0 if greedy."""
        return 0.0 if self.noise is None else -self.noise.of_acceptance(rows, starts, lookahead).log() - 1

    def draw(self, scores: torch.Tensor, noise: torch.Tensor | None, depth: int, plan: Plan):
        """Draws token number `depth`, the most likely one without noise, and tells its distribution, if needed."""
        if noise is None:
            return argmax(scores), None
        if self.config.verification == COUPLED:
            return draw(scores.softmax(-1), noise), None
        fan_outs = self._fan_outs(plan)
        probabilities = saguaro(scores.softmax(-1), fan_outs[min(depth, len(fan_outs) - 1)], self.config.saguaro_c)
        return draw(probabilities, noise), probabilities

    def _fan_outs(self, plan: Plan) -> list[int]:
        """Returns how many most likely tokens Saguaro sampling scales after each accepted count (Theorem 12)."""
        budget = plan.budget
        if self.config.lookahead != "auto":  # a seed reproduces the tokens, so the budget must not depend on times
            budget = SCALED_BUDGET if self.config.budget == "auto" else self.config.budget
        priors = self.config.acceptance_rate, self.config.power_law_exponent
        return best_fan_out(plan.lookahead, max(1, budget * self.num_workers), *priors)

    def supports(self, probabilities: torch.FloatTensor | None) -> torch.LongTensor | None:
        """Counts the tokens with a probability above 0 in each distribution. `None` if no warper sets any to 0."""
        if probabilities is None or not self.truncates:
            return None
        # NaN counts as a chance. On a CPU torch compares into float32 four times as fast as into booleans.
        return torch.ne(probabilities, 0, out=torch.empty_like(probabilities)).sum(-1).long()


def draft_processors(model: PreTrainedModel, generation_config: GenerationConfig, prompt_length: int):
    """Returns the target's processors by its generation config, without those whose lack only lowers acceptance."""
    generation_config = copy.copy(generation_config)
    # Without the prompts, transformers would warn that it ignores these, although the target applies them.
    generation_config.encoder_repetition_penalty = generation_config.encoder_no_repeat_ngram_size = None
    generation_config.watermarking_config = None  # such a processor may keep a state
    model._prepare_special_tokens(generation_config, True, device=devices.of_model(model))
    return model._get_logits_processor(generation_config, prompt_length, device=devices.of_model(model))
