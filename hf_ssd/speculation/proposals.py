"""From the draft model's logits to proposed tokens and what they were drawn from."""

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..argmax import argmax
from ..config import SSDConfig
from ..logits_processing import needs_history, process_branches
from .planner import Plan, planned_fan_outs
from .sampling import SpeculationNoise, draw, saguaro

SCALED_BUDGET = 16  # outcomes that Saguaro sampling scales for where the clock chooses the budget but not the tokens


class Proposals:
    """
    Draws tokens as the target's generation config asks for: the same warpers and penalties, greedily or at random.

    Args:
        model (`PreTrainedModel`): The draft model.
        config (`SSDConfig`): The user's settings.
        generation_config (`GenerationConfig`): The target's.
        prompt_length (`int`): Of the longest row.
        seed (`int`): Seed of the randomness.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SSDConfig,
        generation_config: GenerationConfig,
        prompt_length: int,
        seed: int,
    ):
        self.config, self.device = config, model.device
        self.vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self.processors = draft_processors(model, generation_config, prompt_length)
        self.need_history = needs_history(self.processors)
        self.noise = SpeculationNoise(seed, self.vocab_size, self.device) if generation_config.do_sample else None

    def process(self, scores: torch.Tensor, histories: torch.LongTensor | None, lengths: torch.LongTensor):
        """
        Applies the warpers.

        Args:
            scores (`torch.FloatTensor` of shape `(batch_size, N, vocab_size)`): Raw scores.
            histories (`torch.LongTensor` of shape `(batch_size, N, columns)`, *optional*): The tokens before each; not
                needed if `need_history` is `False`.
            lengths (`torch.LongTensor` of shape `(batch_size, N)`): How many of them count. On the CPU.
        """
        if not self.processors:
            return scores
        flat = scores.flatten(0, 1)
        histories = histories.flatten(0, 1) if self.need_history else None
        return process_branches(self.processors, flat, histories, lengths.flatten()).view_as(scores)

    def propose(self, scores: torch.Tensor, starts: list[list[int]], depth: int, plan: Plan):
        """
        Draws tokens.

        Args:
            scores (`torch.FloatTensor` of shape `(batch_size, N, vocab_size)`): After the warpers.
            starts (`list[list[int]]`): Position of the bonus token that each speculation follows.
            depth (`int`): Which of its tokens this is.
            plan ([`~hf_ssd.speculation.planner.Plan`]): Says how Saguaro sampling is to scale.

        Returns:
            Tokens `(batch_size, N)` and the distributions `(batch_size, N, vocab_size)` that they were drawn from, or
            `None` if the most likely ones were taken.
        """
        if self.noise is None:
            return argmax(scores), None
        fan_outs = self._fan_outs(plan)
        probabilities = saguaro(scores.softmax(-1), fan_outs[min(depth, len(fan_outs) - 1)], plan.saguaro_c)
        return draw(probabilities, self.noise.gather(starts, depth)), probabilities

    def _fan_outs(self, plan: Plan) -> list[int]:
        """
        For how many guesses after each accepted count Saguaro sampling scales. With a fixed lookahead a seed repeats
        the tokens, so a budget that the clock has chosen plays no part.
        """
        budget = plan.budget
        if self.config.lookahead != "auto":
            budget = SCALED_BUDGET if self.config.budget == "auto" else self.config.budget
        budget = max(1, budget * plan.drafts)
        return planned_fan_outs(plan.lookahead, budget, plan.acceptance_rate, plan.power_law_exponent)

    def forget_before(self, starts: list[int]) -> None:
        """Drops what no later draft can need."""
        if self.noise is not None:
            self.noise.forget_before(starts)


def draft_processors(model: PreTrainedModel, generation_config: GenerationConfig, prompt_length: int):
    """
    Rebuilds the target's processors from its generation config with transformers' own code. Processors that the user
    made are not among them: the draft proposes without, which costs acceptance and nothing else.

    Returns:
        `LogitsProcessorList`, empty when decoding greedily without penalties.
    """
    model._prepare_special_tokens(generation_config, True, device=model.device)
    return model._get_logits_processor(
        generation_config=generation_config,
        input_ids_seq_length=prompt_length,
        encoder_input_ids=None,
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList(),
        device=model.device,
        model_kwargs={},
    )
