"""Statistics of the rounds, which generate() returns beside the tokens."""

import dataclasses
from dataclasses import dataclass, field

from transformers.generation import GenerateDecoderOnlyOutput

from . import plots
from .advice import advice
from .rounds import NOTHING, RoundRecord


@dataclass(repr=False)  # the default repr would fill a notebook with records
class SSDStats:
    """
    Statistics of the rounds of a generate() call. A *round* is a verification by the target of one speculation for each
    row; the token that follows the prompt comes from the prefill, before the first round.

    Args:
        batch_size (`int`): Number of rows.
        records (`list[RoundRecord]`): The accepted counts, hits and times of each round.
        reason (`str`): Why the most frequent mode was chosen, in a sentence with its numbers.
        prefill_seconds (`float`): Seconds from the start of the call until the target has read the prompt. They include
            the time to open the draft's session.
        total_seconds (`float`): Seconds from the start to the end of the call.
        generated_tokens (`int`): New tokens in the output, all rows together, padding excluded.
        unlikely_tokens (`int`): When sampling, the number of accepted tokens whose probability in the draft was less
            than a millionth of their probability in the target. If a draft draws from the probabilities that it
            reports, the chance of this is below a millionth for each token.
        draft_failure (`str`, *optional*): Why the draft was given up, if it was.
        draft_joined_at (`int`, *optional*): The first round whose speculation the draft could be asked for; 0 if the
            planner never asked for the draft, and `None` if the draft was not ready at first and did not join later.
        adjustable (`list[str]`): The settings that advice may name. See [`~hf_ssd.advice.adjustable`].
    """

    batch_size: int = 1
    records: list[RoundRecord] = field(default_factory=list)
    reason: str = ""
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    generated_tokens: int = 0
    unlikely_tokens: int = 0
    draft_failure: str | None = None
    draft_joined_at: int | None = 0
    adjustable: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return len(self.records)

    def column(self, name: str) -> list:
        """Returns an attribute of each record, for example `"verify_seconds"`."""
        return [getattr(record, name) for record in self.records]

    def verified_rows(self) -> list[tuple[int, int, bool | None]]:
        """Returns (lookahead, 0 without drafted tokens; accepted; hit, `None` with early tokens) of rows and rounds."""
        rows = []
        for record in self.records:
            for row in record.live:
                lookahead = 0 if record.sources[row] == NOTHING else record.proposed(row)
                hit = None if record.is_early(row) else record.hits[row]
                rows.append((lookahead, record.accepted[row], hit))
        return rows

    @property
    def hit_rate(self) -> float:
        """Share of speculations whose outcome had been prepared. Rows with early tokens do not count."""
        drafted = [hit for k, _, hit in self.verified_rows() if k and hit is not None]
        return sum(drafted) / len(drafted) if drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens that a row gains in a round: accepted tokens and the bonus token."""
        rows = self.verified_rows()
        return sum(accepted + 1 for _, accepted, _ in rows) / len(rows) if rows else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of accepted tokens among the tested tokens of the draft; of early tokens, if nothing was drafted."""
        rows = [row for row in self.verified_rows() if row[0]]
        rows = [row for row in rows if row[2] is not None] or rows
        tested = sum(min(accepted + 1, k) for k, accepted, _ in rows)
        return sum(accepted for _, accepted, _ in rows) / tested if tested else 0.0

    @property
    def advice(self) -> list[str]:
        """Sentences that say how to improve the pair or the settings; empty if all is well, or in short calls."""
        return advice(self)

    @property
    def wait_share(self) -> float:
        """Share of the rounds' time in which the target waited for the draft."""
        verify, wait = sum(self.column("verify_seconds")), sum(self.column("wait_seconds"))
        return wait / (verify + wait) if verify + wait else 0.0

    def plot_timeline(self, path, rounds: range | None = None) -> None:
        """
        Draws the work of the target above that of the draft, like Figure 1 of the paper. Needs matplotlib.

        Args:
            path (`str` or `os.PathLike`): Where to write the picture; the suffix determines the format.
            rounds (`range`, *optional*): The rounds to draw. Defaults to twelve in the middle of the call.
        """
        plots.plot_timeline(self, path, rounds)

    def plot_acceptance(self, path) -> None:
        """Draws the acceptance at each place of a speculation, and how often each count of tokens was accepted."""
        plots.plot_acceptance(self, path)

    def to_pandas(self):
        """
        Returns a `pandas.DataFrame` with a line for each round. Lists with a value for each row are replaced by the
        number of unfinished rows, how many of these hit and how many had early tokens, and their mean accepted
        count.

        Raises:
            `ImportError`: pandas is not installed.
        """
        import pandas

        lines = []
        for record in self.records:
            line = {name: value for name, value in vars(record).items() if not isinstance(value, list)}
            counts = [record.accepted[row] for row in record.live]
            line |= {"rows": len(counts), "hits": sum(record.hits[row] for row in record.live)}
            line |= {"early": sum(map(record.is_early, record.live)), "draft_seconds": record.draft_seconds}
            lines.append(line | {"accepted": sum(counts) / len(counts) if counts else None})
        return pandas.DataFrame(lines).rename_axis("round")

    def to_dict(self) -> dict:
        """Returns all fields and the derived figures as plain Python objects."""
        derived = ("rounds", "hit_rate", "tokens_per_round", "acceptance_rate", "wait_share", "advice")
        totals = ("verify_seconds", "wait_seconds", "draft_seconds", "answer_seconds")
        return {
            **dataclasses.asdict(self),
            **{name: getattr(self, name) for name in derived},
            **{f"total_{name}": sum(self.column(name)) for name in totals},
        }

    def __repr__(self) -> str:
        return (
            f"SSDStats({self.generated_tokens} tokens, {self.rounds} rounds, {self.tokens_per_round:.2f} tokens per "
            f"round, acceptance {self.acceptance_rate:.2f}, hit rate {self.hit_rate:.2f}; print() it for more)"
        )

    def __str__(self) -> str:
        if not self.rounds:
            return f"SSDStats: {self.generated_tokens} tokens from the prefill alone, no rounds"
        n = self.rounds
        verify, wait, draft = (1e3 * sum(self.column(f"{what}_seconds")) / n for what in ("verify", "wait", "draft"))
        lines = [
            f"{self.generated_tokens} tokens in {n} rounds, {self.tokens_per_round:.2f} tokens per round and row",
            f"acceptance rate {self.acceptance_rate:.2f}, hit rate {self.hit_rate:.2f}",
            f"per round: verification {verify:.1f} ms, wait for the draft {wait:.1f} ms (busy {draft:.1f} ms)",
            f"mean lookahead {sum(self.column('lookahead')) / n:.1f}, mean budget {sum(self.column('budget')) / n:.1f}",
            self.reason,
            f"prefill {1e3 * self.prefill_seconds:.1f} ms, in all {self.total_seconds:.2f} s",
            *self.advice,
        ]
        return "\n".join(lines)


@dataclass
class SSDDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """
    A `GenerateDecoderOnlyOutput` with statistics of the rounds.

    Args:
        ssd_stats ([`SSDStats`]): The statistics of this call.
    """

    ssd_stats: SSDStats = None  # a default is needed after the fields of transformers' class
