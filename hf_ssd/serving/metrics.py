"""What a server's calls have come to so far, in Prometheus' text form."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..distributed.assistant import DraftAssistant
from ..stats import SSDStats

FINISHED, CANCELLED, REFUSED, FAILED = ENDS = ("finished", "cancelled", "refused", "failed")


@dataclass
class Totals:
    """
    Sums over calls. One thread generates, so one thread writes them; refusals, which it does not see, the server's.

    Args:
        requests (`dict[str, int]`): Calls by how they ended.
        tokens (`int`): Generated tokens.
        rounds (`int`): Verifications; the token that follows a prompt needs none.
        gained (`int`): Tokens that these gave.
        tested, accepted (`int`): Drafted tokens that were put to the test, and those that were accepted.
        drafted, hits (`int`): Speculations that had tokens, and those that had been prepared.
        verify_seconds, wait_seconds (`float`): What the target spent verifying, and waiting for the draft.
    """

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    tokens: int = 0
    rounds: int = 0
    gained: int = 0
    tested: int = 0
    accepted: int = 0
    drafted: int = 0
    hits: int = 0
    verify_seconds: float = 0.0
    wait_seconds: float = 0.0

    def add_round(self, stats: SSDStats) -> None:
        """Adds the last round of a call."""
        for record in stats.records[-1:]:
            for lookahead, accepted, is_hit in SSDStats(records=[record]).verified_rows():
                self.rounds += 1
                self.gained += accepted + 1
                if lookahead:
                    self.tested += min(accepted + 1, lookahead)
                    self.accepted += accepted
                    self.drafted += 1
                    self.hits += is_hit
            self.verify_seconds += record.verify_seconds
            self.wait_seconds += record.wait_seconds

    @property
    def ratios(self) -> dict[str, float]:
        """Acceptance rate, hit rate and tokens per round, 0 where nothing was counted."""
        pairs = {
            "acceptance_rate": (self.accepted, self.tested),
            "hit_rate": (self.hits, self.drafted),
            "tokens_per_round": (self.gained, self.rounds),
        }
        return {name: part / whole if whole else 0.0 for name, (part, whole) in pairs.items()}


COUNTERS = {
    "tokens": "Generated tokens",
    "rounds": "Verifications by the target",
    "tested": "Drafted tokens that were put to the test",
    "accepted": "Drafted tokens that were accepted",
    "drafted": "Speculations that had tokens",
    "hits": "Speculations that had been prepared when their outcome came",
    "verify_seconds": "Seconds that the target spent verifying",
    "wait_seconds": "Seconds that the target waited for the draft",
}
GAUGES = {
    "acceptance_rate": "Chance that a drafted token is accepted, so far",
    "hit_rate": "Share of speculations that had been prepared, so far",
    "tokens_per_round": "Tokens that a verification gives, so far",
}


class Metrics:
    """
    Gives [`Totals`] to a scraper.

    Args:
        assistant ([`~hf_ssd.DraftAssistant`]): The draft, which counts its restarts.
    """

    def __init__(self, assistant: DraftAssistant):
        self.assistant, self.totals = assistant, Totals()
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        requests = CounterMetricFamily("hf_ssd_requests", "Calls by how they ended", labels=["end"])
        for end, count in self.totals.requests.items():
            requests.add_metric([end], count)
        yield requests
        for name, about in COUNTERS.items():
            yield CounterMetricFamily(f"hf_ssd_{name}", about, value=getattr(self.totals, name))
        for name, ratio in self.totals.ratios.items():
            yield GaugeMetricFamily(f"hf_ssd_{name}", GAUGES[name], value=ratio)
        restarts = self.assistant.restarts
        yield CounterMetricFamily("hf_ssd_draft_restarts", "Workers that had ended and were started again", restarts)
        yield GaugeMetricFamily("hf_ssd_draft_ready", "1 if the draft can be asked", self.assistant.state == "ready")

    def as_text(self) -> bytes:
        """Returns all figures in Prometheus' text form."""
        return generate_latest(self.registry)
