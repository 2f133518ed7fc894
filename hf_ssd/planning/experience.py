"""Measurements that calls with a pair of models leave to later calls: durations, and how often drafts are right."""

from ..config import SSDConfig
from ..rounds import AHEAD, IN_TURN, PLAIN
from .estimates import Average, HitRates, Line, NgramRates

FIRST_PROBE = 32  # rounds until other modes are probed; the distance doubles


class Durations:
    """
    Seconds of the parts of a round, for calls of one pair, batch size and length of text, whatever their temperature.

    Attributes:
        verification, step, unexplained (`dict[str, Line]`): By mode, seconds of a verification, of a pass that drafts
            just in time, and of a round besides all measured parts (by budget).
        branches ([`Line`]): Seconds of a pass that grows branches.
        choosing ([`Average`]): Seconds of the choice of outcomes, without the pass that feeds the speculation.
        tokens, seconds (`float`): Tokens that each row has gained in all rounds, and the time of these rounds.
        used (`dict[str, int]`): By mode, the last round in which the target followed it.
        rounds (`int`): Rounds that were observed.
    """

    def __init__(self):
        plain = Line()
        plain.like = in_turn = Line(smaller=plain)
        self.verification = {PLAIN: plain, IN_TURN: in_turn, AHEAD: Line(like=in_turn)}
        self.step = {IN_TURN: Line(), AHEAD: (step := Line())}
        self.branches = Line(smaller=step)
        self.choosing = Average(0.0, 0.0, memory=0.95)
        self.unexplained = {mode: Line(0.1) for mode in (AHEAD, IN_TURN)}
        self._by_mode = self.verification, self.step, self.unexplained
        self.used: dict[str, int] = {}
        self.tokens = self.seconds = 0.0
        self.rounds = 0

    def forget(self, modes: set[str]) -> None:
        """Forgets the measurements of these modes of drafting, so that they are made again."""
        for line in (by_mode[mode] for by_mode in self._by_mode for mode in modes):
            line.forget()
        if AHEAD not in modes:
            return
        self.branches.forget()
        self.choosing.restart(0.0, 0.0)


class Experience:
    """
    Experience of calls with a pair that have the same settings, batch size, length of text and temperature.

    Args:
        config (`SSDConfig`): Gives the priors and the cache shape.
        longest (`int`): Largest lookahead.

    Attributes:
        accepted (`list[Average]`): By place in a speculation, how often its token was accepted if the
            tokens before it were.
        hit_rates ([`HitRates`]): How often outcomes were prepared.
        alone, beside ([`NgramRates`]): Of n-grams that are verified without a draft, and of those that compete with a
            draft, which need longer matches.
        chosen (`tuple`, *optional*): Mode, lookahead and budget that were chosen last.
        probed (`str`, *optional*): The mode that is probed until the round `probe_until`.
        rounds (`int`): Rounds that were observed.
    """

    def __init__(self, config: SSDConfig, longest: int):
        self.accepted = [Average(0.0, 0.0, memory=0.999) for _ in range(longest)]
        self.hit_rates = HitRates(config)
        self.alone, self.beside = NgramRates(memory=0.999), NgramRates(memory=0.999)
        self.chosen: tuple[str, int, int] | None = None
        self.probed: str | None = None
        self.probe_at, self.probe_distance, self.probe_until = FIRST_PROBE, FIRST_PROBE, 0
        self.rounds = 0
