"""What generate() returns beside the tokens: how the rounds went."""

from dataclasses import dataclass, field

from transformers.generation import GenerateDecoderOnlyOutput

from . import plots
from .advice import advice

PER_ROUND = (
    "budget",
    "verify_seconds",
    "wait_seconds",
    "draft_seconds",
    "answer_seconds",
    "received_at",
    "prepared_at",
    "answered_at",
)


@dataclass
class SSDStats:
    """
    How the rounds of one generate() call went. A *round* is one verification by the target of one speculation for each
    row; the token that follows the prompt comes from the prefill, before the first round.

    Args:
        batch_size (`int`): Rows.
        lookahead (`list[int]`): Drafted tokens that were verified, per round.
        accepted (`list[list[int]]`): Accepted count of each row, per round; -1 for a row that was finished.
        hits (`list[list[bool]]`): Whether each row's outcome was among those prepared for, however far its speculation
            had grown, per round.
        verify_seconds (`list[float]`): From having a speculation to having decided on it, per round.
        wait_seconds (`list[float]`): From having nothing left to do to having the next speculation, per round.
        draft_seconds (`list[float]`): What the draft worked for a speculation, preparing and answering, per round.
        answer_seconds (`list[float]`): How much of that was after the outcome was known, per round.
        budget (`list[int]`): Outcomes that had been prepared for each row, per round.
        received_at (`list[float]`): When the speculation was there, in seconds from the call's beginning, per round.
        prepared_at, answered_at (`list[float]`): When the draft began to prepare and to answer, likewise; a time before
            the call means that it did not. (Clocks of two machines differ.)
        prefill_seconds (`float`): Until the target has read the prompt, with the draft's session opened.
        total_seconds (`float`): From the same moment to the end.
        generated_tokens (`int`): New tokens in the output, all rows together, padding excluded.
        unlikely_tokens (`int`): Accepted tokens whose probability in the draft was less than a millionth of that in the
            target, when sampling. A draft that draws from what it says has one with a chance below a millionth a token.
        draft_failure (`str`, *optional*): Why the draft was given up, if it was.
        draft_joined_at (`int`, *optional*): The first round whose speculation the draft was asked for. Rounds before it
            were plain decoding while the worker was starting; `None` if that took longer than the call.
    """

    batch_size: int = 1
    lookahead: list[int] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    hits: list[list[bool]] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)
    answer_seconds: list[float] = field(default_factory=list)
    budget: list[int] = field(default_factory=list)
    received_at: list[float] = field(default_factory=list)
    prepared_at: list[float] = field(default_factory=list)
    answered_at: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    generated_tokens: int = 0
    unlikely_tokens: int = 0
    draft_failure: str | None = None
    draft_joined_at: int | None = 0

    @property
    def rounds(self) -> int:
        return len(self.lookahead)

    def verified_rows(self) -> list[tuple[int, int, bool]]:
        """Returns (lookahead, accepted, hit) of every row of every round in which the row was not finished."""
        rounds = zip(self.lookahead, self.accepted, self.hits)
        return [(k, a, hit) for k, accepted, hits in rounds for a, hit in zip(accepted, hits) if a >= 0]

    @property
    def hit_rate(self) -> float:
        """Share of speculations whose outcome was among those prepared for."""
        drafted = [hit for k, _, hit in self.verified_rows() if k]
        return sum(drafted) / len(drafted) if drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens that one row gains in one round: accepted ones and the bonus token."""
        rows = self.verified_rows()
        return sum(accepted + 1 for _, accepted, _ in rows) / len(rows) if rows else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Chance that one drafted token is accepted, of those that were put to the test."""
        rows = self.verified_rows()
        tested = sum(min(accepted + 1, k) for k, accepted, _ in rows)
        return sum(accepted for _, accepted, _ in rows) / tested if tested else 0.0

    @property
    def advice(self) -> list[str]:
        """What the figures say about the pair and the settings, in sentences; empty if there is nothing to change."""
        return advice(self)

    @property
    def wait_share(self) -> float:
        """Share of the rounds' time in which the target waited for the draft."""
        verify, wait = sum(self.verify_seconds), sum(self.wait_seconds)
        return wait / (verify + wait) if verify + wait else 0.0

    def plot_timeline(self, path, rounds: range | None = None) -> None:
        """Draws what target and draft did when. See [`~hf_ssd.generation.plots.plot_timeline`]."""
        plots.plot_timeline(self, path, rounds)

    def plot_acceptance(self, path) -> None:
        """Draws how much of the speculations was accepted. See [`~hf_ssd.generation.plots.plot_acceptance`]."""
        plots.plot_acceptance(self, path)

    def to_pandas(self):
        """
        Returns a `pandas.DataFrame` with a line for each round. What is told of each row is summed up: how many rows
        were unfinished and hit, and the mean accepted count of the unfinished ones.

        Raises:
            `ImportError`: pandas is not installed.
        """
        import pandas

        lines = []
        for number in range(self.rounds):
            accepted = self.accepted[number] if number < len(self.accepted) else []
            hits = [hit for hit, k in zip(self.hits[number], accepted) if k >= 0]
            live = [k for k in accepted if k >= 0]
            line = {"lookahead": self.lookahead[number], "rows": len(live), "hits": sum(hits)}
            line["accepted"] = sum(live) / len(live) if live else None
            for name in PER_ROUND:
                values = getattr(self, name)
                line[name] = values[number] if number < len(values) else None
            lines.append(line)
        return pandas.DataFrame(lines).rename_axis("round")

    def to_dict(self) -> dict:
        """Returns all fields and the derived figures as plain Python objects."""
        derived = ("rounds", "hit_rate", "tokens_per_round", "acceptance_rate", "wait_share", "advice")
        totals = ("verify_seconds", "wait_seconds", "draft_seconds", "answer_seconds")
        return {
            **self.__dict__,
            **{name: getattr(self, name) for name in derived},
            **{f"total_{name}": sum(getattr(self, name)) for name in totals},
        }

    def __str__(self) -> str:
        if not self.rounds:
            return f"SSDStats: {self.generated_tokens} tokens from the prefill alone, no rounds"
        n = self.rounds
        verify, wait, draft = (1e3 * sum(s) / n for s in (self.verify_seconds, self.wait_seconds, self.draft_seconds))
        lines = [
            f"{self.generated_tokens} tokens in {n} rounds, {self.tokens_per_round:.2f} tokens per round and row",
            f"acceptance rate {self.acceptance_rate:.2f}, hit rate {self.hit_rate:.2f}",
            f"per round: verification {verify:.1f} ms, wait for the draft {wait:.1f} ms, which worked {draft:.1f} ms",
            f"mean lookahead {sum(self.lookahead) / n:.1f}, mean budget {sum(self.budget) / n:.1f}",
            f"prefill {1e3 * self.prefill_seconds:.1f} ms, in all {self.total_seconds:.2f} s",
            *self.advice,
        ]
        return "\n".join(lines)


@dataclass
class SSDDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """
    A `GenerateDecoderOnlyOutput` that says how the rounds went.

    Args:
        ssd_stats ([`SSDStats`]): The rounds of this call.
    """

    ssd_stats: SSDStats | None = None
