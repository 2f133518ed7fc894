"""Draft-side sampling whose randomness depends on the place, not on what was drawn before."""

import torch


class PositionNoise:
    """
    Noise that is a function of (seed, row, position), one number for each token of the vocabulary. The draft token at
    a position is therefore the same whether it was drafted ahead in a branch or just in time.

    Reusing the noise of a position in several branches and rounds does no harm: at most one of the tokens drawn with
    it is ever put to the test by the target, because a position is decided once.

    Args:
        seed (`int`): Drawn by the target, so that `set_seed` reproduces a run.
        vocab_size (`int`): Length of the noise.
        device (`torch.device`): Where the draft model is.
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device):
        self.seed, self.vocab_size, self.device = seed, vocab_size, device
        self.generator = torch.Generator(device=device)
        self.known: dict[tuple[int, int], torch.Tensor] = {}

    def at(self, row: int, position: int) -> torch.Tensor:
        """Returns exponential noise of shape `(vocab_size,)`, positive and finite."""
        noise = self.known.get((row, position))
        if noise is None:
            # Torch's CPU generator looks at the low 32 bits of a seed alone, so a hash could collide. This cannot, for
            # 255 rows of 16 million positions; the generator itself mixes neighbouring seeds.
            seed = (self.seed * 1_000_003 + row) * 16_777_259 + position
            self.generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
            noise = torch.empty(self.vocab_size, device=self.device).exponential_(generator=self.generator)
            noise.clamp_(min=torch.finfo(noise.dtype).tiny)
            self.known[row, position] = noise
        return noise

    def gather(self, positions: list[list[int]]) -> torch.Tensor:
        """Returns the noise of shape `(batch_size, count, vocab_size)` for `count` positions of each row."""
        return torch.stack([torch.stack([self.at(row, p) for p in row_of]) for row, row_of in enumerate(positions)])

    def forget_before(self, positions: list[int]) -> None:
        """Drops what no later draft can need: places before the given position of each row."""
        self.known = {place: noise for place, noise in self.known.items() if place[1] >= positions[place[0]]}


def draw(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.LongTensor:
    """
    Draws one token from each distribution. The smallest of independent exponential variables with rates p is number i
    with probability p_i, which is how `torch.multinomial` draws one sample too.

    Args:
        probabilities (`torch.FloatTensor` of shape `(..., vocab_size)`): Each sums to 1.
        noise (`torch.FloatTensor` that broadcasts to it): Exponential noise, see [`PositionNoise`].

    Returns:
        `torch.LongTensor` of shape `(...)`.
    """
    return (probabilities / noise).argmax(dim=-1)
