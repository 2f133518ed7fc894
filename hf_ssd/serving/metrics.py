"""Counts the calls of a server, and gives the totals to Prometheus."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..distributed.assistant import DraftAssistant
from ..generation.continuous import ContinuousBatching
from ..stats import SSDStats

BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0, 160.0, 640.0)  # seconds
FINISHED, CANCELLED, REFUSED, FAILED = ENDS = ("finished", "cancelled", "refused", "failed")


def counter(about: str):
    """Returns a field of [`Totals`] that Prometheus can read, with its description."""
    return field(default=0, metadata={"about": about})


def histogram(name: str, about: str):
    """Returns a field of [`Totals`] that counts durations in seconds."""
    return field(default_factory=lambda: Histogram(f"hf_ssd_{name}_seconds", about, buckets=BOUNDS, registry=None))


@dataclass
class Totals:
    """Sums over calls. The thread that generates writes them; refusals are counted where requests are prepared."""

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    first_token: Histogram = histogram("time_to_first_token", "Seconds until the first token")
    next_token: Histogram = histogram("time_per_output_token", "Seconds for each further token")
    gained: int = 0  # tokens from verifications; the token that follows a prompt comes from the prefill
    tokens: int = counter("Generated tokens")
    rounds: int = counter("Verifications by the target")
    tested: int = counter("Drafted tokens that were put to the test")
    accepted: int = counter("Drafted tokens that were accepted")
    drafted: int = counter("Speculations of the draft that had tokens")
    hits: int = counter("Speculations that had been prepared when their outcome came")
    nodes: int = counter("Nodes of token trees that were verified")
    siblings: int = counter("Siblings of drafted tokens that were accepted")
    verify_seconds: float = counter("Seconds that the target spent verifying")
    wait_seconds: float = counter("Seconds that the target waited for the draft")

    def add_round(self, stats: SSDStats) -> None:
        """Adds the last round of a call."""
        for record in stats.records[-1:]:
            for lookahead, accepted, is_hit in SSDStats(records=[record]).verified_rows():
                self.rounds += 1
                self.gained += accepted + 1
                if lookahead:
                    self.tested += min(accepted + 1, lookahead)
                    self.accepted += accepted
                    self.drafted += is_hit is not None  # `None`: the row had early tokens
                    self.hits += bool(is_hit)
            self.nodes += record.nodes * len(record.live)
            self.siblings += sum(map(record.took_sibling, record.live))
            self.verify_seconds += record.verify_seconds
            self.wait_seconds += record.wait_seconds

    @property
    def ratios(self) -> dict[str, float]:
        """Acceptance rate, hit rate and tokens per round, 0 where nothing was counted."""
        return {name: getattr(self, part) / (getattr(self, whole) or 1) for name, (part, whole, _) in RATIOS.items()}


RATIOS = {
    "acceptance_rate": ("accepted", "tested", "Chance that a drafted token is accepted, so far"),
    "hit_rate": ("hits", "drafted", "Share of speculations that had been prepared, so far"),
    "tokens_per_round": ("gained", "rounds", "Tokens that a verification gives, so far"),
}


class Metrics(Collector):
    """Gives [`Totals`] and the state of the draft to Prometheus."""

    def __init__(self, assistant: DraftAssistant | None, batch: ContinuousBatching | None):
        self.assistant, self.totals, self.batch = assistant, Totals(), batch

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("hf_ssd_requests", "Calls by how they ended", labels=["end"])
        for end, count in self.totals.requests.items():
            requests.add_metric([end], count)
        yield requests
        yield from self.totals.first_token.collect()
        yield from self.totals.next_token.collect()
        known = [one for one in fields(self.totals) if "about" in one.metadata]
        counters = {one.name: (one.metadata["about"], getattr(self.totals, one.name)) for one in known}
        gauges = {name: (RATIOS[name][-1], ratio) for name, ratio in self.totals.ratios.items()}
        if self.batch is not None:
            rows = self.batch.rows
            gauges["num_requests_running"] = "Rows that are read or decoded", len(rows.live) + len(rows.reading)
            gauges["num_requests_waiting"] = "Rows that wait", len(rows.waiting)
            counters["prefix_cache_hits"] = "Tokens of prompts that were not read again", rows.kept.hits
        if self.assistant is not None:
            counters["draft_restarts"] = "Workers that had ended and were started again", self.assistant.restarts
            gauges["draft_ready"] = "1 if the draft can be asked", self.assistant.state == "ready"
        for family, figures in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
            for name, (about, value) in figures.items():
                yield family(f"hf_ssd_{name}", about, value=value)
