"""CPUs, made of cores and of sockets whose memory they share: how long passes take if both models compute, or one."""

from dataclasses import dataclass

from .worlds import World

TOKEN = 0.09  # what a core computes for a token, in units of the time in which it reads the weights that it needs


@dataclass(frozen=True)
class Cpu:
    """Seconds are those in which a core reads the target's weights."""

    cores: int
    sockets: int
    limit: float  # cores that read memory as fast as their socket allows
    size: float  # of the draft; the target's is 1
    overhead: float  # seconds of a pass that no other core makes shorter
    acceptance: float = 0.8

    def places(self, drafts):
        """Returns how many cores of each socket the target has, and the draft, which has the last ones."""
        size = self.cores // self.sockets
        of_draft = [min(size, max(0, drafts - size * later)) for later in reversed(range(self.sockets))]
        return [size - n for n in of_draft], of_draft

    def seconds(self, size, tokens, mine, others=None):
        """Returns the time of a pass on these cores of each socket, beside another model on `others`."""
        others = others or [0] * self.sockets
        reading = max(size / sum(mine) * max(1.0, (n + m) / self.limit) for n, m in zip(mine, others) if n)
        return self.overhead * (1.0 if size == 1 else 0.7) + max(reading, tokens * TOKEN * size / sum(mine))

    def world(self, drafts):
        """Returns the world in which the draft has so many cores while both compute."""
        (target, draft), (everything, _) = self.places(drafts), self.places(0)
        plain, verification = (self.seconds(1.0, tokens, everything) for tokens in (1, 5))
        step, wide = (self.seconds(self.size, tokens, draft, target) for tokens in (1, 16))
        return World(
            self.acceptance,
            verification=plain,
            per_token=(verification - plain) / 4,
            contention=self.seconds(1.0, 5, target, draft) / verification,
            step=step - (wide - step) / 15,
            per_branch=(wide - step) / 15,
            alone=step / self.seconds(self.size, 1, everything),
        )
