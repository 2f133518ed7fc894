"""From the draft model's logits to proposed tokens and what they were drawn from."""

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..argmax import argmax
from ..logits_processing import needs_history, process_branches
from .planner import Plan
from .sampling import SpeculationNoise, draw, saguaro


class Proposals:
    """
    Draws tokens as the target's generation config asks for: the same warpers and penalties, greedily or at random.

    Args:
        model (`PreTrainedModel`): The draft model.
        generation_config (`GenerationConfig`): The target's.
        prompt_length (`int`): Of the longest row.
        seed (`int`): Seed of the randomness.
    """

    def __init__(self, model: PreTrainedModel, generation_config: GenerationConfig, prompt_length: int, seed: int):
        self.device = model.device
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
        fan_out = plan.fan_outs[min(depth, len(plan.fan_outs) - 1)]
        probabilities = saguaro(scores.softmax(-1), fan_out, plan.saguaro_c)
        return draw(probabilities, self.noise.gather(starts, depth)), probabilities

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
