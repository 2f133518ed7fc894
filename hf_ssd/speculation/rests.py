"""How long plain decoding goes on before the draft is tried again."""

FIRST_REST, LONGEST_REST, LONGEST_IF_FAR = 128, 512, 2048  # rounds, the last where drafting is not even close
LOSS = 0.02  # seconds that trying the draft may cost for each second at rest


class Rests:
    """
    A rest is twice as long as the one before, and lasts until it has paid for what was tried: what drafting has cost
    over plain decoding, for the tokens to be expected of it, is at most a small share of the time at rest.
    """

    def __init__(self):
        self.owed = 0.0  # seconds that trying the draft has cost and resting has not paid back yet
        self.forget()

    def forget(self) -> None:
        """The draft pays: the next rest is a first one again."""
        self.length = FIRST_REST

    def drafted(self, seconds: float, plain_seconds: float) -> None:
        """Learns how long a round with a draft took, and how long its slowest row's tokens would have taken without."""
        self.owed = max(0.0, self.owed + seconds - plain_seconds)

    def rested(self, seconds: float) -> None:
        """Learns how long a round of plain decoding took."""
        self.owed = max(0.0, self.owed - LOSS * seconds)

    def next(self, plain_seconds: float, is_close: bool) -> int:
        """
        Args:
            plain_seconds (`float`): How long a round of plain decoding takes.
            is_close (`bool`): Whether drafting looks nearly as good.

        Returns:
            How many rounds the rest that now begins is to last.
        """
        longest = LONGEST_REST if is_close else LONGEST_IF_FAR
        until_paid_back = int(self.owed / (LOSS * plain_seconds))
        rounds = min(max(self.length, until_paid_back), longest)
        self.length = min(2 * self.length, longest)
        return rounds
