"""When modes are probed that are not in use, because nothing new is measured of them."""

import math

from ..rounds import AHEAD, IN_TURN, PLAIN

PROBE_ROUNDS = 6  # rounds of a probe
FIRST_PROBE = 32  # rounds until other modes are probed; the distance doubles
LONGEST_BETWEEN_PROBES = 512  # rounds
PROBE_SHARE = 0.02  # largest share of the time in which a draft reads texts only to be probed
PROBED_GAIN = 1.2  # probe a mode if it would win with this factor on its estimated speed
TRIAL_COST = 3.0  # plain steps that a trial of drafting ahead may lose
CLEAR_GAIN = 2.0  # expected gain with which drafting ahead is tried at once


class Prober:
    """Probes for a few rounds a mode that may still be the best, ever more rarely, and tries drafting ahead early."""

    def __init__(self):
        self.mode, self.end = None, 0  # the mode that is probed until the round `end`
        self.start = self.distance = FIRST_PROBE  # the first round of the next probe, and the rounds to the one after

    def observe(self, costs) -> None:
        """Lets the next probe begin later if the draft had to read the text for this probe."""
        if costs.experience.rounds <= self.end and costs.knows(PLAIN):
            self.start += math.ceil(costs.reading / (PROBE_SHARE * costs.seconds_to_verify(PLAIN, 0)))

    def probe(self, best: tuple, speeds: dict[tuple, float], costs) -> tuple | None:
        """Returns the plan with which to probe another mode than that of the best plan, if any."""
        rounds, used = costs.experience.rounds, costs.durations.used
        of_mode = {plan[0]: plan for plan in sorted(speeds, key=speeds.get)}  # the best plan of each mode
        others = {*of_mode} - {best[0], *costs.seen_anyway}
        hopeful = [mode for mode in of_mode if mode in others and PROBED_GAIN * speeds[of_mode[mode]] > speeds[best]]
        is_trial = AHEAD in hopeful and not costs.knows(AHEAD)
        if is_trial and speeds[of_mode[AHEAD]] < CLEAR_GAIN * speeds[best] and not self._can_pay_a_trial(costs):
            hopeful.remove(AHEAD)
        if rounds < self.end:  # a probe is under way
            pass
        elif is_trial and AHEAD in hopeful and AHEAD not in used:  # paid for, or expected to gain much
            self.mode, self.end = AHEAD, rounds + PROBE_ROUNDS
        elif rounds >= self.start:
            self.distance = min(2 * self.distance, LONGEST_BETWEEN_PROBES)
            self.start, self.end = rounds + self.distance, rounds + PROBE_ROUNDS
            self.mode = min(hopeful, key=lambda mode: used.get(mode, -1), default=None)
            # A draft that takes no time would be worth a probe: the machine may have been busy, so measure again.
            if not {IN_TURN, AHEAD} & {*hopeful} and costs.may_reach(PROBED_GAIN * speeds[best]):
                costs.durations.forget({IN_TURN, AHEAD} - {best[0]})
                return None
        else:
            return None
        if self.mode not in hopeful:
            self.end = rounds
            return None
        return of_mode[self.mode]

    def _can_pay_a_trial(self, costs) -> bool:
        """Whether the time that drafting has saved, or a small share of all time, pays for trying to draft ahead."""
        plain, durations = costs.seconds_to_verify(PLAIN, 0), costs.durations
        return durations.tokens * plain - (1 - PROBE_SHARE) * durations.seconds > TRIAL_COST * plain
