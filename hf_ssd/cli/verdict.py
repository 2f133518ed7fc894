"""Says whether a draft pays, and if it does not, why and which change would help."""

from dataclasses import dataclass

from ..planning.planner import CONTENTION

PAYS = 1.05  # speed over plain decoding; smaller gains are within the differences between turns
LOW_ACCEPTANCE = 0.3
SLOW_DRAFT = 1.0  # time for two draft tokens, in verifications
BUSY = 0.5  # running programs for each core


@dataclass
class Figures:
    """
    The measurements of a pair. Speeds are in tokens per second.

    Args:
        acceptance (`float`, *optional*): Share of accepted tokens among all tested tokens of all calls; `None` if no
            token was drafted.
        hit_rate, tokens_per_round (`float`): Hit rate and tokens per round of SSD, as medians over its runs.
        verify_seconds (`float`): Time of a verification.
        step_seconds, two_tokens_seconds (`float`, *optional*): Time of the draft for a single token and for two tokens;
            `None` if no draft step was timed.
        contention (`float`): Factor by which a verification takes longer while the draft works.
        plan (`str`): Why the planner chose the mode that most rounds had.
        drafts (`bool`): Whether the planner drafted in most of the rounds.
        predicted (`float`): The speed that the theory predicts from the measured parts.
        speed, plain (`float`): Speeds of SSD and of plain decoding.
        over_plain (`float`, *optional*): Speed of SSD over plain decoding, the median over turns, so not just the ratio
            of the two speeds; `None` if the planner decoded plainly.
        shares_memory (`bool`): Whether both models are on the same device.
        load (`float`): How busy the machine was before, in running programs for each core.
        assisted (`float`, *optional*): Speed of transformers' assisted generation with its best setting; `None` if it
            does not take this pair.
        over_assisted (`float`, *optional*): Speed of SSD over `assisted`, the median over turns.
        assistant_tokens (`int`, *optional*): The number of assistant tokens in this best setting.
        failure (`str`, *optional*): Why the draft was given up.
        looks_up (`bool`): Whether the prompt was looked up, without a draft.
    """

    acceptance: float | None
    hit_rate: float
    tokens_per_round: float
    verify_seconds: float
    step_seconds: float | None
    two_tokens_seconds: float | None
    contention: float
    plan: str
    drafts: bool
    predicted: float
    speed: float
    plain: float
    over_plain: float | None
    shares_memory: bool
    load: float
    assisted: float | None = None
    over_assisted: float | None = None
    assistant_tokens: int | None = None
    failure: str | None = None
    looks_up: bool = False

    @property
    def pays(self) -> bool:
        return self.failure is None and self.drafts and self.over_plain >= PAYS

    def verdict(self) -> str:
        """Returns a sentence that says whether the draft pays and, if it does not, which change would help."""
        two_tokens = (self.two_tokens_seconds or 0.0) / self.verify_seconds
        if self.pays:
            is_beaten = self.assisted is not None and self.over_assisted * PAYS < 1
            also = f"; assisted generation is faster still, with {self.assistant_tokens} tokens" * is_beaten
            return f"yes: {self.over_plain:.2f} times plain decoding{also}"
        if self.failure is not None:
            return f"no: the draft was given up ({self.failure})"
        if self.looks_up:
            gain = f"{self.over_plain:.2f} times plain decoding" if self.drafts else "plain decoding is faster"
            return f"no: {gain}; these answers hardly repeat their prompts or themselves, for which a draft model is"
        if self.acceptance is not None and self.acceptance < LOW_ACCEPTANCE:
            return (
                f"no: the target accepts {self.acceptance:.0%} of the drafted tokens; a draft of the same family, or "
                "one trained on the target's text, would agree more"
            )
        if two_tokens > SLOW_DRAFT:
            return (
                f"no: the draft needs {two_tokens:.1f} verifications for two tokens; a parallel draft or a smaller one "
                "would pay sooner"
            )
        gain = f"{self.over_plain:.2f} times plain decoding" if self.drafts else "plain decoding is faster"
        if self.load > BUSY:  # checked after the reasons that hold on a quiet machine too
            return f"no: {gain}, but the machine is busy with other programs; measure again when it is not"
        if self.contention > CONTENTION:
            return (
                f"no: a verification takes {self.contention:.1f} times as long while the draft works; a draft on a "
                "device with its own memory would not slow it down"
            )
        if self.shares_memory:
            what = "both models share one memory, and a draft on a device of its own would not slow the target down"
        else:
            what = "a draft that agrees more or a smaller one would gain more"
        return f"no: {gain}; {what}"

    def in_words(self) -> str:
        """Returns the answer in five lines."""
        accepted = "no token was drafted"
        if self.acceptance is not None:
            accepted = f"{self.acceptance:.2f} of the drafted tokens"
        speed, beside = f"{self.plain:.1f} tokens/s, decoded plainly", "assisted generation does not take this pair"
        if self.assisted is not None:
            beside = f"{self.assisted:.1f} tokens/s by assisted generation with {self.assistant_tokens} tokens"
        if self.drafts:
            accepted += f", {self.tokens_per_round:.2f} tokens a round, hit rate {self.hit_rate:.2f}"
            speed = f"{self.over_plain:.2f} times plain decoding ({self.predicted / self.plain:.2f} predicted)"
        if self.drafts and self.assisted is not None:
            beside = (
                f"{self.over_assisted:.2f} times assisted generation with {self.assistant_tokens} tokens "
                f"({self.predicted / self.assisted:.2f} predicted)"
            )
        step = "no draft step was timed"
        if self.step_seconds is not None:
            step = f"{1e3 * self.step_seconds:.1f} ms for a draft step"
        lines = {
            "acceptance": accepted,
            "times": f"{1e3 * self.verify_seconds:.1f} ms for a verification, {step}",
            "plan": self.plan,
            "speed": f"{speed}, {beside}",
            "pays": self.verdict(),
        }
        return "\n".join(f"{name:<11} {line}" for name, line in lines.items())
