"""How much longer a call lasts because its rows do not advance alike."""

import statistics

from .costs import Average
from .planner import Round

FIRST_LENGTH = 128  # tokens that each row of a first call is taken to gain


class RowLengths:
    """
    At rest all rows advance alike. With a draft they do not, and a call lasts as long as its slowest row: of `rows`
    times that are spread with a standard deviation `s` about their mean, the longest is about `1 + z s` times as long
    as the mean, with `z` the expected largest of so many normal deviates (Blom, 1958). Where lengths differ anyway,
    because texts end by themselves, that matters less; and so it does where a round takes less with every row that is
    finished.

    Args:
        rows (`int`): Batch size.
    """

    def __init__(self, rows: int):
        self.lengths = [0] * rows  # tokens gained in this call
        self.fallen_behind = 0.0  # tokens by which the slowest row fell behind the others in the last round
        self.length, self.spread = Average(FIRST_LENGTH, 1.0, memory=0.8), Average(0.0, 1.0, memory=0.8)
        self.deviates = statistics.NormalDist().inv_cdf((rows - 0.375) / (rows + 0.25))

    def observe(self, round_: Round) -> None:
        """Learns from a round."""
        live = [row for row, k in enumerate(round_.accepted) if k >= 0]
        behind = self._behind(live)
        self.lengths = [n + k + 1 for n, k in zip(self.lengths, round_.accepted)]
        self.fallen_behind = self._behind(live) - behind

    def begin(self) -> None:
        """A call begins."""
        mean = statistics.fmean(self.lengths)
        if mean:
            self.length.observe(mean)
            self.spread.observe(statistics.pstdev(self.lengths) / mean)
        self.lengths = [0] * len(self.lengths)

    def _behind(self, rows: list[int]) -> float:
        """By how many tokens the slowest of these rows is behind their mean."""
        lengths = [self.lengths[row] for row in rows]
        return statistics.fmean(lengths) - min(lengths) if lengths else 0.0

    def drafting_over_rest(self, expected: list[float], fixed_share: float = 1.0) -> float:
        """
        Args:
            expected (`list[float]`): Expected tokens of a round with 0, 1, ... drafted tokens.
            fixed_share (`float`, *optional*): How much of a round's time does not depend on how many rows there are.

        Returns:
            By how much a call lasts longer than rounds of all rows tell, in comparison with one without a draft.
        """
        chances = [1.0, *(after - before for before, after in zip(expected, expected[1:]))]  # of 1, 2, ... or more
        mean = expected[-1]
        variance = sum((2 * n + 1) * chance for n, chance in enumerate(chances)) - mean**2
        of_rounds = variance / (mean * max(1.0, self.length.value))
        spread = self.spread.value
        longest = (1 + self.deviates * (spread**2 + of_rounds) ** 0.5) / (1 + self.deviates * spread)
        return 1 + fixed_share * (longest - 1)
