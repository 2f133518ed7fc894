"""What the figures of a call say about the pair and the settings, in words."""

import math

from .generation.verification import UNLIKELY
from .rounds import FILLER

CHANCE = 1e-3  # of what is still put down to chance


def advice(stats) -> list[str]:
    """
    Args:
        stats ([`SSDStats`]): How the rounds of a call went.

    Returns:
        `list[str]`: What was seen and what to do about it; empty if there is nothing to change.
    """
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
    drafted = [record for record in stats.records if record.lookahead and FILLER not in record.sources]
    plain = 1 - len(drafted) / (stats.rounds - joined)
    if plain > 0.5 or stats.acceptance_rate < 0.3:
        share = f" ({plain:.0%} of the rounds were plain decoding)" if plain else ""
        return [
            f"acceptance {stats.acceptance_rate:.2f}: this draft does not pay; choose one that agrees more with the "
            f"target or is quicker, or generate without{share}"
        ]
    if stats.wait_share < 0.15:
        return []
    wait = f"wait is {stats.wait_share:.0%} of a round"
    budgets = [record.budget for record in drafted]
    if not any(budgets):
        return [f"{wait}: the draft worked in turn with the target, not ahead of it"]
    if stats.hit_rate < 0.6:
        return [
            f"{wait}, for hits are rare ({stats.hit_rate:.2f}): a larger `budget`, a lower temperature or `saguaro_c` "
            "below 1 make more of them"
        ]
    lookahead = sum(record.lookahead for record in drafted) / len(drafted)
    return [
        f"{wait}: the draft is too slow for lookahead {lookahead:.0f} and budget {max(budgets)}; "
        "choose less of either, a smaller draft, or a faster device for it"
    ]
