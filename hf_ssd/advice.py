"""Turns the figures of a call into advice about the pair and the settings."""

import math

from .generation.verification import UNLIKELY
from .rounds import EARLY, NOTHING

CHANCE = 1e-3  # p-value below which unlikely tokens are reported
ENOUGH_ROUNDS = 24  # with drafted tokens; at acceptance 0.5, less than 0.3 of 24 tokens are accepted in 1 of 30 calls
LOW_ACCEPTANCE, HIGH_WAIT, LOW_HITS = 0.3, 0.15, 0.6


def adjustable(config, uses_q: bool) -> list[str]:
    """Returns the settings that advice may name: those that are not `"auto"` and affect this call."""
    names = ["lookahead", "budget", *(["saguaro_c"] if uses_q else [])]
    return [name for name in names if getattr(config, name) != "auto"]


def advice(stats) -> list[str]:
    """Returns sentences about the pair and the settings of a call, each with a remedy if there is any."""
    if not stats.rounds:
        return []
    if stats.draft_failure:
        return [f"finished without the draft, by plain decoding: {stats.draft_failure}"]
    tested = sum(min(accepted + 1, k) for k, accepted, _ in stats.verified_rows())
    n = min(stats.unlikely_tokens, 20)
    if n and (UNLIKELY * tested) ** n / math.factorial(n) < CHANCE:
        return [
            f"{stats.unlikely_tokens} accepted tokens had less than a millionth of the target's probability in the "
            "draft, more than chance explains: they were not drawn from what the draft or the fallback says, and the "
            "output need not be distributed as the target's; use another draft or fallback"
        ]
    joined = stats.draft_joined_at
    if joined is None or joined >= stats.rounds:
        return ["finished while the draft worker was starting: hf_ssd.launch_draft() starts one before the first call"]
    drafted = [record for record in stats.records if record.lookahead]
    if len(drafted) < ENOUGH_ROUNDS:
        return []
    if stats.acceptance_rate < LOW_ACCEPTANCE:
        if {source for record in drafted for source in record.sources} <= {EARLY, NOTHING}:
            return [f"acceptance {stats.acceptance_rate:.2f}: the text hardly repeats itself; use a draft model"]
        return [
            f"acceptance {stats.acceptance_rate:.2f}: this draft does not pay; choose one that agrees more with the "
            "target, or generate without"
        ]
    # The planner takes waiting into account, so only a lookahead that the user has fixed can be wrong.
    if stats.wait_share < HIGH_WAIT or "lookahead" not in stats.adjustable:
        return []
    wait = f"wait is {stats.wait_share:.0%} of a round"
    lookahead, budget = (max(getattr(record, name) for record in drafted) for name in ("lookahead", "budget"))
    if not budget:
        return [f"{wait}: the draft worked in turn with the target, not ahead of it"]
    if stats.hit_rate < LOW_HITS:
        more = {"budget": "a larger `budget`", "saguaro_c": "a lower temperature, or `saguaro_c` below 1,"}
        more = " or ".join(words for name, words in more.items() if name in stats.adjustable)
        return [f"{wait}, for hits are rare ({stats.hit_rate:.2f}): {more} makes more of them"] if more else []
    choices = {"lookahead": lookahead, "budget": budget}
    choices = [f"a smaller `{name}` than {n}" for name, n in choices.items() if name in stats.adjustable and n > 1]
    choices = ", ".join([*choices, "a smaller draft or a faster device for it"])
    return [f"{wait}, because the draft is slow: choose {choices}"]
