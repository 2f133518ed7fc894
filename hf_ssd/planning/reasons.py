"""Why a plan was chosen, in a sentence with its numbers."""

from ..rounds import AHEAD, IN_TURN, PLAIN
from .cost_model import CostModel


def reason_for(chosen: tuple[str, int, int], speeds: dict[tuple, float], costs: CostModel, ngrams: int = 0) -> str:
    """Returns why a plan (mode, lookahead, budget) with n-grams of up to `ngrams` tokens is the best of all speeds."""
    mode, lookahead, budget = chosen
    rates = costs.rates.alone if mode == PLAIN else costs.rates.beside
    by_ngrams = (
        f"n-grams of up to {ngrams} tokens where the text repeats itself ({rates.matches.value:.2f} of the rounds)"
    )
    if mode == PLAIN and ngrams:
        return f"not drafting, but {by_ngrams}"
    also = f", and {by_ngrams}" if ngrams else ""
    if mode == AHEAD:
        verify, prepare = costs.seconds_to_verify(AHEAD, lookahead), costs.seconds_to_prepare(lookahead, budget)
        reason = (
            f"preparing takes {1e3 * prepare:.1f} ms against {1e3 * verify:.1f} ms per verification, expected hit "
            f"rate {costs.hit_rate(lookahead, [budget])[0]:.2f}: lookahead {lookahead}, budget {budget}"
        )
        if 2 * budget > costs.most_states // lookahead:  # a larger budget may not fit
            reason += f" (its memory has room for {costs.most_states} recurrent states of a row)"
        return reason + also
    if mode == IN_TURN:
        draft, verify = costs.seconds_to_draft(IN_TURN, lookahead), costs.seconds_to_verify(IN_TURN, lookahead)
        return (
            f"drafting takes {1e3 * draft:.1f} ms and verification {1e3 * verify:.1f} ms: drafting in turn, "
            f"lookahead {lookahead}{also}"
        )
    drafting = [speed for plan, speed in speeds.items() if plan[0] != PLAIN]
    expected = f": expected {max(drafting) / speeds[chosen]:.2f} times plain decoding's speed" if drafting else ""
    return f"not drafting{expected} (estimated acceptance {costs.acceptance(1)[0]:.2f})"
