"""Draft-side sampling: what a token is drawn from, and randomness that depends on the place alone."""

import numpy as np
import torch

from .. import devices
from ..argmax import argmax

# The second word of the cipher's counter: what the numbers are for. The first one counts them, the others are a place.
NOISE, RANDOM_BACKUP = 0, 1


def saguaro(probabilities: torch.Tensor, fan_out: int, c: float) -> torch.Tensor:
    """
    Saguaro sampling (Definition 14): the draft's `fan_out` most likely tokens become less likely by the factor C. The
    target then accepts fewer drafted tokens, but rejects in favour of exactly those tokens, for which the next
    speculation is prepared: acceptance is traded for hits (Theorem 15).

    Args:
        probabilities (`torch.FloatTensor` of shape `(..., vocab_size)`): The draft's distributions q.
        fan_out (`int`): F, how many bonus tokens are guessed after this position.
        c (`float`): C between 0 and 1. 1 changes nothing.

    Returns:
        `torch.FloatTensor` of the same shape: the distributions to draw from, and to verify with. A distribution of
        which nothing would be left (C = 0 and no other tokens) stays as it is.
    """
    if c == 1 or fan_out == 0:
        return probabilities
    top = probabilities.topk(min(fan_out, probabilities.shape[-1]), dim=-1)
    scaled = probabilities.scatter(-1, top.indices, top.values * c)
    total = scaled.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, scaled / total, probabilities)


class SpeculationNoise:
    """
    Noise that is a function of (seed, row, start, depth), one number for each token of the vocabulary, where `start` is
    the position of the bonus token that a speculation follows. A speculation is therefore the same whether it was
    drafted ahead or just in time.

    The noise of one start belongs to the one speculation that is verified there: a later speculation of the same
    position starts elsewhere and draws anew. So what is decided by the outcome of a round, which speculation is
    prepared, how long it is and where it comes from, never depends on the noise that it is drawn with.

    Args:
        seed (`int`): Drawn by the target, so that `set_seed` reproduces a run.
        vocab_size (`int`): Length of the noise.
        device (`torch.device`): Where the draft model is.
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device):
        self.seed, self.vocab_size, self.device = seed, vocab_size, device
        draws_there = device.type != "cpu" and devices.has_float64(device)
        self.generator = torch.Generator(device=device) if draws_there else None
        self.streams: dict[tuple[int, int], np.random.Generator] = {}
        self.known: dict[tuple[int, int], list[torch.Tensor]] = {}

    def at(self, row: int, start: int, depth: int) -> torch.Tensor:
        """Returns exponential noise of shape `(vocab_size,)`, positive and finite."""
        known = self.known.setdefault((row, start), [])
        while len(known) <= depth:
            noise = devices.from_host(self._draw(row, start, len(known)).float(), self.device)
            known.append(noise.clamp_(min=torch.finfo(torch.float32).tiny))
        return known[depth]

    def _draw(self, row: int, start: int, depth: int) -> torch.DoubleTensor:
        # In float32 the generators give exactly 0, or nothing below 6e-8, once in 2^23 numbers: each of 150,000 tokens
        # would be drawn with a probability of 1e-7 that q does not know of, 2 % in all. In float64 it is once in 2^53.
        if self.generator is None:
            # numpy takes a fraction of torch's time on the CPU; with the place as the counter of a cipher no two
            # places share numbers.
            if (row, start) not in self.streams:
                bits = np.random.Philox(key=self.seed % 2**64, counter=[0, NOISE, start, row])
                self.streams[row, start] = np.random.Generator(bits)
            return torch.from_numpy(self.streams[row, start].standard_exponential(self.vocab_size))
        # The generator itself mixes neighbouring seeds, and these are distinct for a million positions and 64 tokens.
        place = ((self.seed * 1_000_003 + row) * 1_048_583 + start) * 64 + depth
        self.generator.manual_seed(place & 0x7FFF_FFFF_FFFF_FFFF)
        numbers = torch.empty(self.vocab_size, dtype=torch.float64, device=self.device)
        return numbers.exponential_(generator=self.generator)

    def gather(self, starts: list[list[int]], depth: int) -> torch.Tensor:
        """Returns the noise of shape `(batch_size, count, vocab_size)` for `count` starts of each row."""
        noise = torch.stack([self.at(row, start, depth) for row, of_row in enumerate(starts) for start in of_row])
        return noise.view(len(starts), -1, self.vocab_size)

    def forget_before(self, starts: list[int]) -> None:
        """Drops what no later draft can need: speculations that start before the given position of each row."""
        for past in [place for place in self.known if place[1] < starts[place[0]]]:
            del self.known[past]
            self.streams.pop(past, None)


def draw(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.LongTensor:
    """
    Draws one token from each distribution. The smallest of independent exponential variables with rates p is number i
    with probability p_i, which is how `torch.multinomial` draws one sample too.

    Args:
        probabilities (`torch.FloatTensor` of shape `(..., vocab_size)`): Each sums to 1.
        noise (`torch.FloatTensor` that broadcasts to it): Exponential noise, see [`SpeculationNoise`].

    Returns:
        `torch.LongTensor` of shape `(...)`.
    """
    return argmax(probabilities / noise)
