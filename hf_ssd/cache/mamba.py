"""Passes in which Mamba-2 layers compute several tokens as they compute a single token."""

import math

from torch import nn
from transformers.utils import logging

from .model_runner import Runner

SHORTEST_CHUNK = 16  # tokens; the chunks of Mamba-2's kernels are powers of 2

logger = logging.get_logger(__name__)


class RecurrentRunner(Runner):
    """
    Runs passes eagerly. transformers bounds the step sizes of Mamba-2 only where several tokens are computed; these
    passes have no bounds, except the first one, which reads the prompts. The chunks to which transformers pads the
    tokens are short; chunks only group the arithmetic. All of this is changed in the view alone.
    """

    def __init__(self, other: Runner):
        if type(other) is not Runner:  # the others have no static storage for states
            name = type(other.model).__name__
            logger.warning_once(f"{name} has recurrent layers, so its steps run uncompiled and uncaptured.")
        super().__init__(other.model, other.cache, other.view)
        layers = [layer for layer in self.view.modules() if is_mamba(layer)]
        self.of_model = {layer: (layer.chunk_size, layer.time_step_limit) for layer in layers}

    def run(self, inputs, logits_to_keep=None):
        branches = self.cache.branches
        if branches > 1:  # rows of a batch, whose single tokens stand in `inputs` as tokens of one row
            inputs = {name: _of_branches(value, branches) for name, value in inputs.items()}
        tokens = inputs["input_ids"].shape[1]
        for layer, (size, limit) in self.of_model.items():
            layer.chunk_size = min(size, max(SHORTEST_CHUNK, 1 << (tokens - 1).bit_length()))
            layer.time_step_limit = limit if self.cache.is_empty else (0.0, math.inf)
        logits = super().run(inputs, logits_to_keep)
        return logits if branches == 1 else logits.view(-1, branches, logits.shape[-1])


def _of_branches(value, branches: int):
    """Returns an input of rows as an input of branches: tokens, columns and positions, or a mask with a query each."""
    if isinstance(value, dict):
        return {name: _of_branches(one, branches) for name, one in value.items()}
    if value is None or value.dim() < 4:
        return value if value is None else value.flatten(-2).unsqueeze(-1)
    return value.transpose(1, 2).flatten(0, 1).unsqueeze(1)


def is_mamba(module: nn.Module) -> bool:
    """Whether a module is a Mamba-2 layer, whose settings these passes change."""
    return "time_step_limit" in vars(module) and "chunk_size" in vars(module)
