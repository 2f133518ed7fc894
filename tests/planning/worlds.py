"""
Simulated worlds, where time is exact and the best fixed plan is found by trying them all.

    python -m tests.planning.worlds
"""

import contextlib
import dataclasses
import itertools
import math
import random
from dataclasses import dataclass

import torch

from hf_ssd import SSDConfig
from hf_ssd.distributed.target_ranks import TargetRanks
from hf_ssd.drafting.cache_shapes import allocate
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.generation.draft import FaultTolerantDraft
from hf_ssd.planning.cost_model import BUDGETS
from hf_ssd.planning.experience import CallKind
from hf_ssd.planning.fixed_plan import FixedPlan
from hf_ssd.planning.planner import Planner
from hf_ssd.rounds import NOTHING, PLAIN, Outcome, Plan, RoundRecord
from hf_ssd.theory import geometric_fan_out

from .simulated_draft import SimulatedDraft, SimulatedNgrams


def fixed_planner(lookahead, budget):
    """Returns a planner that drafts ahead, or in turn without a budget."""
    return FixedPlan(SSDConfig(lookahead=lookahead, budget=budget or "auto", asynchronous=budget > 0))


class SimulatedCores:
    """The cores of a target, in the place of [`~hf_ssd.distributed.cores.TargetCores`]."""

    is_divided = False

    def divide(self, is_divided):
        self.is_divided = is_divided

    def close(self):
        self.is_divided = False


@dataclass
class World:
    """Times in seconds."""

    acceptance: float
    verification: float = 0.040
    per_token: float = 0.001  # more for each drafted token that is verified
    step: float = 0.005
    per_branch: float = 0.0001
    contention: float = 1.0  # how much slower verification is while the draft works, or starts, as well
    alone: float = 1.0  # how much quicker a pass of the draft is in turn, on the cores of both
    right: float = 0.5  # chance that a guess is right, if the better ones were not
    rows: int = 1
    unseen: float = 0.0  # what a round that has drafted tokens costs besides, and no part's measure tells
    unseen_per_branch: float = 0.0  # the same for each branch
    cold: float = 1.0  # how much slower a target computes that has waited for its draft
    noise: float = 0.0  # standard deviation of the logarithm of each duration
    neighbours: float = 1.0  # how much slower everything is half of the time
    is_parallel: bool = False  # whether the draft gives all tokens in one pass
    repeats: float = 0.0  # how often the text of a row gives an n-gram
    ngram_acceptance: float = 0.97

    best: float = 0.0  # tokens per second of the best fixed plan, which the program finds
    workers: int = 1
    starting: int = 0  # rounds until the draft is ready
    reading: float = 0.0  # what a draft takes to read what went by without it
    busy: float = 1.0  # how much slower the draft is in the first of the calls before
    calls_before: tuple[int, ...] = ()  # half rounds of each: an odd one ends as calls do, an even one is broken off

    def drafting(self, tokens):
        return self.step + self.per_branch * tokens

    def kind(self, temperature, **settings):
        return CallKind(SSDConfig(**settings), self.rows, 1000, temperature, 100, self.workers, self.is_parallel)

    def call(self, planner, draft=None, seed=1):
        """
        A call of `generate()`, as generation/loop.py has it. Yields the seconds since its beginning, the tokens, and
        those of the slowest row, when an outcome has left and when a speculation has come.
        """
        draft, cores = draft or SimulatedDraft(self), SimulatedCores()
        chance, hiccups = random.Random(seed), random.Random(seed + 1)
        config = getattr(planner, "config", SSDConfig(lookahead=1))
        request = SessionRequest(config, None, [torch.zeros(1, dtype=torch.long)] * self.rows, 0, 1000)
        ours = FaultTolerantDraft(draft, None, request, planner, torch.device("cpu"), TargetRanks(), cores)
        ours.proposers.early = ngrams = SimulatedNgrams(self, chance)
        before, now, clock = None, RoundRecord(sources=[NOTHING] * self.rows), 0.0

        def measured(seconds):
            seconds *= self.neighbours if number % 120 >= 60 else 1.0
            return seconds * math.exp(hiccups.gauss(0.0, self.noise)) if self.noise else seconds

        with contextlib.closing(ours):
            ours.open(patience=0.0)
            for number in itertools.count():
                # 1. The target verifies, and the draft prepares.
                session, width = ours.session, now.lookahead
                plan = session.preparing if session is not None else Plan(PLAIN)
                busy = self.contention if cores.is_divided else 1
                cold = self.cold if width else 1
                seconds = measured((self.verification + self.per_token * width) * busy * cold)
                acceptance = 0.0 if session is not None and session.is_misled else self.acceptance
                outcomes = plan.budget * self.workers
                shares = allocate(geometric_fan_out(width, outcomes, 0.8, 0.5), outcomes) if outcomes else [0] * 99
                accepted, ranks, hits = [], [], []
                for row in range(self.rows):
                    is_ngram, own = now.is_early(row), now.proposed(row)
                    right_token = self.ngram_acceptance if is_ngram else acceptance
                    wrong = (k for k in range(width) if k >= own or chance.random() > right_token)
                    k = next(wrong, width)
                    rank = next((r for r in range(40) if chance.random() < self.right), 40)
                    accepted.append(k)
                    ranks.append(rank)
                    hits.append(rank < shares[k])
                elapsed = seconds + self.unseen * (width > 0) + self.unseen_per_branch * plan.budget
                ngrams.look_up([now.is_early(row) for row in range(self.rows)], accepted)
                if session is not None:
                    elapsed = max(elapsed, session.prepare(width, seconds, ranks, hits, measured))
                clock += elapsed

                # 2. The outcome leaves with the plan.
                if session is not None:
                    session.untold += 1
                ours.send_outcome(Outcome([[0] * (k + 1) for k in accepted]))
                now.accepted, now.verify_seconds = accepted, seconds
                if number > 1:
                    planner.observe(before, now)
                yield clock, sum(map(len, ours.texts)) - self.rows, min(map(len, ours.texts)) - 1

                # 3. The draft answers.
                draft.starting -= 1
                speculation = ours.receive_speculation()
                before, now = now, speculation.record
                now.lookahead = speculation.width
                if ours.is_asked:
                    now.wait_seconds = now.answer_seconds + self.reading * session.is_behind
                    session.is_misled |= session.lengths != list(map(len, ours.texts))
                elif session is not None:
                    session.preparing = Plan(PLAIN)
                clock += now.wait_seconds
                now.received_at = clock
                yield clock, sum(map(len, ours.texts)) - self.rows, min(map(len, ours.texts)) - 1

    def run(self, planner, rounds=1500, skip=0, seed=1):
        """Returns tokens per second after the first `skip` rounds."""
        return self.speeds(planner, [skip], rounds, seed)[0]

    def speeds(self, planner, skips, rounds=1500, seed=1):
        """Returns tokens per second after each of these numbers of rounds."""
        with contextlib.closing(self.call(planner, seed=seed)) as call:
            stands = [(0.0, 0, 0), *itertools.islice(call, 1, 2 * rounds, 2)]
        clock, tokens, _ = stands[-1]
        return [(tokens - stands[skip][1]) / (clock - stands[skip][0]) for skip in skips]

    def best_fixed(self):
        plans = [(k, b) for k in (1, 2, 3, 4, 6, 8, 11, 14) for b in (0, *BUDGETS[::2])]
        return max(self.run(fixed_planner(*plan), rounds=600) for plan in [(0, 0), *plans])


WORLDS = {
    "a quick draft that agrees": World(0.9, best=98.58),
    "a quick draft that agrees less": World(0.6, best=52.20),
    "a batch": World(0.8, rows=8, best=417.72),
    "bonus tokens that are hard to guess": World(0.7, right=0.1, best=54.88),
    "a slow draft": World(0.8, step=0.015, best=48.95),
    "a useless draft": World(0.05, best=25.89),
    "a draft as slow as the target": World(0.6, step=0.04, best=25.00),
    "models that get in each other's way": World(0.8, contention=1.7, right=0.3, best=50.94),
    "verification that costs by the token": World(0.8, per_token=0.012, best=38.45),
    "a draft that would pay, were it not for what no one measures": World(0.6, step=0.01, unseen=0.05, best=25.00),
    "branches that cost what no one measures": World(0.8, unseen_per_branch=0.002, best=52.46),
    "a processor that sleeps while it waits": World(0.5, step=0.008, cold=1.7, best=25.72),
    "a machine that is busy with other things": World(0.8, step=0.008, noise=0.3, best=58.99),
    "a machine that is busy at times": World(0.85, step=0.01, noise=0.2, neighbours=1.6, best=48.42),
    "a parallel draft that is slow": World(0.8, step=0.025, right=0.3, is_parallel=True, best=72.53),
    # By reading the speculation first, which no plan does now; 81.67 without.
    "a parallel draft that is quick": World(0.8, step=0.008, right=0.3, is_parallel=True, best=83.90),
}


def new_planner(world, **settings):
    return Planner(world.kind(temperature=1.0, **settings))


if __name__ == "__main__":
    for name, world in WORLDS.items():
        best = world.best_fixed()
        both = (world, dataclasses.replace(world, workers=2))
        planned, two_drafts = (one.run(new_planner(one), skip=33) for one in both)
        shares = f"planned {planned / best:.3f} of it, two drafts over one {two_drafts / planned:.3f}"
        print(f"{name}: best={best:.2f}  # {shares}")
