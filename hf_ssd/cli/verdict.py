"""Says whether a draft pays, and if it does not, why and which change would help."""

from dataclasses import dataclass

from ..planning.planner import CONTENTION

PAYS = 1.05  # speed over plain decoding; smaller gains are within the differences between turns
LOW_ACCEPTANCE = 0.3
SLOW_DRAFT = 1.0  # time for two draft tokens, in verifications
BUSY = 0.5  # running programs for each core


@dataclass
class Figures:
    """The measurements of a pair. Speeds are in tokens per second, ratios of speeds are medians over turns."""

    acceptance: float | None  # share of accepted tokens among all tested tokens; `None` if no token was drafted
    hit_rate: float
    tokens_per_round: float
    verify_seconds: float
    step_seconds: float | None  # of the draft for a single token; `None` if no draft step was timed
    two_tokens_seconds: float | None
    contention: float  # factor by which a verification takes longer while the draft works
    plan: str  # why the planner chose the mode that most rounds had
    drafts: bool  # whether the planner drafted in most of the rounds
    predicted: float  # the speed that the theory predicts from the measured parts
    speed: float
    plain: float
    over_plain: float | None  # `None` if the planner decoded plainly
    shares_memory: bool  # whether both models are on the same device
    load: float  # how busy the machine was before, in running programs for each core
    assisted: float | None = None  # by transformers with its best setting; `None` if it does not take this pair
    over_assisted: float | None = None
    assistant_tokens: int | None = None  # in this best setting
    failure: str | None = None  # why the draft was given up
    skipped: bool = False  # whether assisted generation was left out for want of time
    looks_up: bool = False  # whether there is no draft model, and the text itself is looked up

    @property
    def pays(self) -> bool:
        return self.failure is None and self.drafts and self.over_plain >= PAYS

    def verdict(self) -> str:
        """Returns a sentence that says whether the draft pays and, if it does not, which change would help."""
        if self.pays:
            is_beaten = self.assisted is not None and self.over_assisted * PAYS < 1
            also = f"; assisted generation is faster still, with {self.assistant_tokens} tokens" * is_beaten
            return f"yes: {self.over_plain:.2f} times plain decoding{also}"
        return f"no: {self._reason()}"

    def _reason(self) -> str:
        gain = f"{self.over_plain:.2f} times plain decoding" if self.drafts else "plain decoding is faster"
        two_tokens = (self.two_tokens_seconds or 0.0) / self.verify_seconds
        if self.failure is not None:
            return f"the draft was given up ({self.failure})"
        if self.looks_up:
            return f"{gain}; the answers to these prompts repeat themselves too rarely, so use a draft model"
        if self.acceptance is not None and self.acceptance < LOW_ACCEPTANCE:
            more = "a draft of the same family, or one trained on the target's text, would agree more"
            return f"the target accepts {self.acceptance:.0%} of the drafted tokens; {more}"
        if two_tokens > SLOW_DRAFT:
            more = "a parallel draft or a smaller one would pay sooner"
            return f"the draft needs {two_tokens:.1f} verifications for two tokens; {more}"
        if self.load > BUSY:  # checked after the reasons that hold on a quiet machine too
            return f"{gain}, but the machine is busy with other programs; measure again when it is not"
        if self.contention > CONTENTION:
            more = "a draft on a device with its own memory would not slow it down"
            return f"a verification takes {self.contention:.1f} times as long while the draft works; {more}"
        if self.shares_memory:
            more = "and a draft on a device of its own would not slow the target down"
            return f"{gain}; both models share one memory, {more}"
        return f"{gain}; a draft that agrees more or a smaller one would gain more"

    def in_words(self) -> str:
        accepted = "no token was drafted" if self.acceptance is None else f"{self.acceptance:.2f} of the drafted tokens"
        speed, step = f"{self.plain:.1f} tokens/s, decoded plainly", "no draft step was timed"
        if self.step_seconds is not None:
            step = f"{1e3 * self.step_seconds:.1f} ms for a draft step"
        if self.drafts:
            accepted += f", {self.tokens_per_round:.2f} tokens a round, hit rate {self.hit_rate:.2f}"
            speed = f"{self.speed:.1f} tokens/s ({self.predicted:.1f} predicted), {self.plain:.1f} decoded plainly"
        beside = "assisted generation does not take this pair"
        if self.looks_up:
            step, beside = "no draft", "transformers looks up for one prompt at a time"
        if self.skipped:
            beside = "assisted generation was left out: more --seconds"
        if self.assisted is not None:
            beside = f"{self.assisted:.1f} by assisted generation with {self.assistant_tokens} tokens"
        times = f"{1e3 * self.verify_seconds:.1f} ms for a verification, {step}"
        speed = f"{speed}, {beside}"
        return in_lines(acceptance=accepted, times=times, plan=self.plan, speed=speed, pays=self.verdict())


def in_lines(**parts: str) -> str:
    """Returns parts of an answer as lines, each after its name."""
    return "\n".join(f"{name:<11} {line}" for name, line in parts.items())
