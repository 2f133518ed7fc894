"""
Simulated worlds, where time is exact and the best fixed plan is found by trying them all.

    python -m tests.planning.worlds
"""

import math
import random
from dataclasses import dataclass

from hf_ssd import SSDConfig
from hf_ssd.drafting.cache_shapes import allocate
from hf_ssd.drafting.speculator import answer_width
from hf_ssd.planning.cost_model import BUDGETS
from hf_ssd.planning.planner import Planner
from hf_ssd.rounds import AHEAD, FILLER, IN_TURN, NOTHING, PLAIN, PREPARED, PRIMARY, Plan, RoundRecord
from hf_ssd.theory import geometric_fan_out


class FixedPlanner:
    """Follows one plan."""

    def __init__(self, lookahead, budget, feeds_first=True):
        mode = PLAIN if not lookahead else AHEAD if budget else IN_TURN
        self.plan, self.profiles = Plan(mode, lookahead, lookahead, budget, feeds_first=feeds_first), False

    def begin_call(self):
        pass

    def next_filler(self):
        return None

    def observe(self, before, now):
        pass

    def observe_profile(self, costs):
        pass


@dataclass
class World:
    """Times in seconds."""

    acceptance: float
    verification: float = 0.040
    per_token: float = 0.001  # more for each drafted token that is verified
    step: float = 0.005
    per_branch: float = 0.0001
    contention: float = 1.0  # how much slower verification is while the draft works as well
    right: float = 0.5  # chance that a guess is right, if the better ones were not
    rows: int = 1
    unseen: float = 0.0  # what a round that has drafted tokens costs besides, and no part's measure tells
    unseen_per_branch: float = 0.0  # the same for each branch
    cold: float = 1.0  # how much slower a target computes that has waited for its draft
    noise: float = 0.0  # standard deviation of the logarithm of each duration
    neighbours: float = 1.0  # how much slower everything is half of the time
    is_parallel: bool = False  # whether the draft gives all tokens in one pass
    unread: float = 0.6  # how much less often a guess of a parallel draft is right that has not read the speculation

    def drafting(self, tokens):
        return self.step + self.per_branch * tokens

    def preparing(self, plan, width):
        """Returns the seconds to choose outcomes, those of a pass that grows them, and how many tokens that gives."""
        choice = self.drafting(self.rows * (width + 1)) if plan.feeds_first else 0.0
        if self.is_parallel:
            return choice, self.drafting(self.rows * (width + 1 + (plan.lookahead + 1) * plan.budget)), plan.lookahead
        return choice, self.drafting(self.rows * plan.budget), 1

    def run(self, planner, rounds=1500, skip=0, seed=1):
        """Returns tokens per second after the first `skip` rounds."""
        chance, hiccups = random.Random(seed), random.Random(seed + 1)

        def measured(seconds):
            seconds *= self.neighbours if number % 120 >= 60 else 1.0
            return seconds * math.exp(hiccups.gauss(0.0, self.noise)) if self.noise else seconds

        before, now, preparing = None, RoundRecord(sources=[NOTHING] * self.rows), Plan(PLAIN)
        clock = began = tokens = 0.0
        planner.begin_call()
        has_joined = is_profiled = False
        for number in range(rounds):
            if number == skip:
                began, tokens = clock, 0

            # 1. The target verifies, and the draft prepares.
            width, is_filler = now.lookahead, FILLER in now.sources
            busy = preparing.mode == AHEAD or is_filler
            verification = (self.verification + self.per_token * width) * (self.contention if busy else 1)
            now.verify_seconds = measured(verification * (self.cold if width and not is_filler else 1))
            outcomes = preparing.budget * getattr(planner, "workers", 1)
            shares = allocate(geometric_fan_out(width, outcomes, 0.8, 0.5), outcomes) if outcomes else [0] * 99
            accepted, ranks, hits = [], [], []
            for _ in range(self.rows):
                k = next((k for k in range(width) if is_filler or chance.random() > self.acceptance), width)
                right = self.right * (1.0 if preparing.feeds_first else self.unread)
                rank = next((r for r in range(40) if chance.random() < right), 40)
                accepted.append(k)
                ranks.append(rank)
                hits.append(rank < shares[k])
            now.accepted, elapsed = accepted, now.verify_seconds + self.unseen * (width > 0 and not is_filler)
            choice = branch = 0.0
            grown = passes = 0
            if preparing.mode == AHEAD:
                elapsed += self.unseen_per_branch * preparing.budget
                choice, branch, tokens_of_a_pass = self.preparing(preparing, width)
                choice, branch = measured(choice), measured(branch)
                fitting = max(0, -int(-(now.verify_seconds - choice) // branch))  # the last one begun counts
                passes = min(preparing.lookahead // tokens_of_a_pass, fitting)
                grown = passes * tokens_of_a_pass
                elapsed = max(elapsed, choice + passes * branch)

            # 2. The outcome leaves with the plan, and the draft answers.
            if not has_joined and planner.profiles:
                planner.begin_profile()
                has_joined = True
            filler, plan = planner.next_filler(), planner.plan
            answer = RoundRecord(plan.mode, sources=[NOTHING] * self.rows)
            if filler is not None:
                answer = RoundRecord(PLAIN, filler, sources=[FILLER] * self.rows)
            elif plan.mode != PLAIN:
                known = [grown * hit for hit in hits]
                answer.lookahead = answer_width(plan, known)
                answer.budget, answer.ranks = preparing.budget, ranks if preparing.budget else [-1] * self.rows
                answer.sources = [PREPARED if hit else PRIMARY for hit in hits]
                answer.grown, answer.passes = grown, passes
                answer.choose_seconds, answer.grow_seconds = choice, passes * branch
                missing = max(0, answer.lookahead - min(known))
                answer.steps = min(1, missing) if self.is_parallel else missing
                fed = self.rows * (answer.lookahead + 1 if self.is_parallel else 1)
                answer.answer_seconds = sum(measured(self.drafting(fed)) for _ in range(answer.steps))
                if has_joined and not is_profiled:
                    planner.observe_profile((0.0, measured(self.step), self.per_branch))
                    is_profiled = True
            preparing = plan if filler is None else Plan(PLAIN)
            clock += elapsed + answer.answer_seconds
            answer.received_at, tokens = clock, tokens + sum(accepted) + self.rows
            if before is not None:
                planner.observe(before, now)
            before, now = now, answer
        return tokens / (clock - began)

    def best_fixed(self):
        plans = [(k, b) for k in (1, 2, 3, 4, 6, 8, 11, 14) for b in (0, *BUDGETS[::2])]
        plans += [(*plan, False) for plan in plans if self.is_parallel]
        return max(self.run(FixedPlanner(*plan), rounds=600) for plan in [(0, 0), *plans])


WORLDS = {
    "a quick draft that agrees": World(0.9),
    "a quick draft that agrees less": World(0.6),
    "a batch": World(0.8, rows=8),
    "bonus tokens that are hard to guess": World(0.7, right=0.1),
    "a slow draft": World(0.8, step=0.015),
    "a useless draft": World(0.05),
    "a draft as slow as the target": World(0.6, step=0.04),
    "models that get in each other's way": World(0.8, contention=1.7, right=0.3),
    "verification that costs by the token": World(0.8, per_token=0.012),
    "a draft that would pay, were it not for what no one measures": World(0.6, step=0.01, unseen=0.05),
    "branches that cost what no one measures": World(0.8, unseen_per_branch=0.002),
    "a processor that sleeps while it waits": World(0.5, step=0.008, cold=1.7),
    "a machine that is busy with other things": World(0.8, step=0.008, noise=0.3),
    "a machine that is busy at times": World(0.85, step=0.01, noise=0.2, neighbours=1.6),
    "a parallel draft that is slow": World(0.8, step=0.025, is_parallel=True),
    "a parallel draft that is quick": World(0.8, step=0.008, is_parallel=True),
}


def new_planner(world, workers=1, **settings):
    config = SSDConfig(**settings)
    return Planner(config, world.rows, 1000, sampled=True, workers=workers, is_parallel=world.is_parallel)


if __name__ == "__main__":
    for name, world in WORLDS.items():
        best = world.best_fixed()
        planned, two_drafts = (world.run(new_planner(world, workers), skip=33) for workers in (1, 2))
        shares = f"planned {planned / best:.3f} of it, two drafts over one {two_drafts / planned:.3f}"
        print(f'    "{name}": {best:.2f},  # {shares}')
