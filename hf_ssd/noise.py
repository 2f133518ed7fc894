"""
Random numbers that are a function of a seed and a place, so that a target and its draft know the same ones.

The number of a place is that of SplitMix64 (Steele, Lea and Flood, 2014) at the place's index. Different places of a
seed have different indices, so they never share a number. The integers are the same on every device; a logarithm may
differ in its last bit, which can cost a hit and never a token.
"""

import numpy as np
import torch

from .devices import from_host, has_float64

DRAFTED, BONUS, ACCEPTANCE, FALLBACK = range(4)  # what a number is for
ROW, START, DEPTH, TOKEN = 12, 22, 7, 20  # bits of an index
STEP, FIRST, SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def splitmix(n):
    """Mixes an array of numpy or torch of 64-bit integers, in place: the output function of SplitMix64."""
    n ^= (n >> 30) & (2**34 - 1)  # the sign is shifted in, and masked out
    n *= FIRST
    n ^= (n >> 27) & (2**37 - 1)
    n *= SECOND
    n ^= (n >> 31) & (2**33 - 1)
    return n


def places(purpose: int, rows, starts, depths):
    """
    Returns the places of rows, starts and depths, integers or arrays. A start is the position, in a row without
    padding, of the bonus token that a round's speculation follows; a depth is how many tokens of it come before. Each
    start belongs to one round, whose plan and speculation are settled before anything looks at its noise.
    """
    return (((purpose << ROW | rows) << START | starts) << DEPTH | depths) << TOKEN


def check_fits(rows: int, positions: int, vocab_size: int) -> None:
    """Raises `ValueError` if a call with so many rows, positions of a row and tokens has places that share a number."""
    for count, bits, things, advice in (
        (rows, ROW, "rows", "give fewer rows at a time"),
        (positions, START, "positions of a row, with room for drafted tokens", "set a smaller `max_length`"),
        (vocab_size, TOKEN, "tokens in the vocabulary", "decode with `do_sample=False`"),
    ):
        if count > 2**bits:
            raise ValueError(f"`ssd_config` can sample with up to {2**bits:,} {things}, and not {count:,}; {advice}.")


class Noise:
    """The numbers of a seed. In a `coupled` call a token's position alone decides with which of them it is drawn."""

    def __init__(self, seed: int, vocab_size: int, coupled: bool = False):
        self.vocab_size, self.coupled, self.first = vocab_size, coupled, int(splitmix(np.array([seed]))[0])

    def drawn_at(self, purpose: int, row, start, depth) -> tuple:
        """Returns the purpose, row, start and depth with whose noise a drafted token or a bonus token is drawn."""
        return (BONUS, row, start + depth, 0 * depth) if self.coupled else (purpose, row, start, depth)

    def exponential(self, places: torch.LongTensor) -> torch.FloatTensor:
        """Returns exponential noise of shape `(*places.shape, vocab_size)`, positive and finite."""
        here = places if has_float64(places.device) else places.cpu()
        numbers = self._uniform(here[..., None] + torch.arange(self.vocab_size, device=here.device))
        return from_host(numbers.log_().neg_().float(), places.device)

    def uniform(self, places: torch.LongTensor) -> torch.Tensor:
        """Returns numbers between 0 and 1, both excluded, of the shape of `places`, in float64 where there is any."""
        if has_float64(places.device):
            return self._uniform(places)
        return from_host(self._uniform(places.cpu()).float().clamp_(max=1 - 2**-24), places.device)  # 1 if rounded

    def _uniform(self, indices: torch.LongTensor) -> torch.DoubleTensor:
        # float64 has a multiple of 1/2 for each of 2^52 integers. In float32 the number 0 would come once in 2^23, and
        # each of 150,000 tokens would be drawn with a further probability of 1e-7 that is not in q, 2 % in all.
        if indices.device.type == "cpu":  # numpy takes a third of torch's time there
            bits = torch.from_numpy(splitmix(indices.numpy() * STEP + self.first) >> 12)
        else:
            bits = splitmix(indices * STEP + self.first) >> 12
        return (bits & (2**52 - 1)).double().add_(0.5).mul_(2.0**-52)
