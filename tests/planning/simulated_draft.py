"""Draft workers without models, whose time a `World` says. What joins their answers is real."""

from hf_ssd.distributed.several_drafts import SeveralDrafts
from hf_ssd.planning.planner import planner_for
from hf_ssd.rounds import AHEAD, IN_TURN, NOTHING, PLAIN, PREPARED, Plan, RoundRecord, Speculation


class SimulatedDraft:
    """The assistant of all calls with one pair."""

    positions = None

    def __init__(self, world):
        self.world, self.workers = world, [None] * world.workers
        self.slowness, self.starting = 1.0, world.starting

    @property
    def state(self):
        return "starting" if self.starting > 0 else "ready"

    def planner(self, temperature=None, **settings):
        """Returns the planner of a call, which knows what calls before have taught."""
        return planner_for(self, self, self.world.kind(temperature=temperature, **settings))

    def begin_call(self, patience):
        pass

    def open_session(self, request, device):
        return SimulatedSession(self, request()) if self.state == "ready" else None

    def drafting(self, tokens):
        return self.slowness * self.world.drafting(tokens)


class SimulatedSession(SeveralDrafts):
    def __init__(self, draft, request):
        self.config, self.rows, self.uses_q = request.config, len(request.prompts), False
        self.lengths = [len(prompt) for prompt in request.prompts]
        self.draft, self.world = draft, draft.world
        self.sessions = [Worker(self, index) for index in range(len(draft.workers))]
        self.preparing, self.is_misled, self.is_behind = Plan(PLAIN), False, False
        self.untold = 0  # rounds that it was not told of

    def prepare(self, width, verification, ranks, hits, measured):
        """Prepares while the target verifies, and returns the seconds that this takes."""
        self.ranks, self.hits, self.measured = ranks, hits, measured
        self.choice = self.branch = 0.0
        self.grown = self.passes = 0
        if self.preparing.mode != AHEAD:
            return 0.0
        rows, plan, tokens_of_a_pass = self.rows, self.preparing, 1
        fed = rows * plan.budget
        if self.world.is_parallel:
            tokens_of_a_pass, fed = plan.lookahead, rows * (width + 1 + (plan.lookahead + 1) * plan.budget)
        self.choice = measured(0.0 if self.world.is_parallel else self.draft.drafting(rows * (width + 1)))
        self.branch = measured(self.draft.drafting(fed))
        fitting = max(0, -int(-(verification - self.choice) // self.branch))  # the last pass that was begun counts
        self.passes = min(plan.lookahead // tokens_of_a_pass, fitting)
        self.grown = self.passes * tokens_of_a_pass
        return self.choice + self.passes * self.branch

    def send_outcome(self, outcome, plan):
        super().send_outcome(outcome, plan)
        self.is_behind, self.untold, self.proposed = self.untold > 1, 0, outcome.proposed or [[]] * self.rows
        self.lengths = [length + len(tokens) for length, tokens in zip(self.lengths, outcome.tokens)]

    def receive_speculation(self):
        speculation, self.preparing = super().receive_speculation(), self.plan
        if all(self.proposed):
            speculation.record.steps = speculation.record.answer_seconds = 0
        speculation.tokens = [[] if ngram else of_row for ngram, of_row in zip(self.proposed, speculation.tokens)]
        return speculation


class SimulatedNgrams:
    """The n-grams of a call, in the place of [`~hf_ssd.generation.proposers.ngrams.Ngrams`]."""

    def __init__(self, world, chance):
        self.world, self.chance, self.gave = world, chance, []
        self.matches, self.is_asked = [False] * world.rows, False

    def look_up(self, verified, accepted):
        """Decides how many tokens n-grams gave or would have given, and which rows have one now."""
        world, self.gave = self.world, []
        for has_match, is_ngram, k in zip(self.matches, verified, accepted):
            if has_match and not is_ngram:
                k = next((n for n in range(k + 1) if self.chance.random() > world.ngram_acceptance), k + 1)
            self.gave.append(1 + k if has_match else 0)
        self.matches = [bool(world.repeats) and self.chance.random() < world.repeats for _ in accepted]

    def read(self, texts):
        pass

    def compare(self, new):
        is_asked, self.is_asked = self.is_asked, False
        return (self.gave, self.gave) if is_asked else ([], [])

    def first(self, texts, live, most, is_alone):
        self.is_asked = True
        return [[0] * most * one for one in self.matches]


class Worker:
    """One of the drafts that a session joins. Rows that hit are shared among them."""

    def __init__(self, session, index):
        self.session, self.index = session, index

    def begin(self):
        pass

    def close(self):
        pass

    def send_outcome(self, outcome, plan):
        self.plan, self.incomplete = plan, None

    def send_proposals(self, tokens, sources, width=0):
        self.incomplete = tokens, sources, width

    def receive_speculation(self, timeout=None):
        return self.found() if self.incomplete is None else self.completed()

    def found(self):
        session, budget = self.session, self.session.preparing.budget
        mine = [hit and row % len(session.draft.workers) == self.index for row, hit in enumerate(session.hits)]
        record = RoundRecord(
            self.plan.mode,
            budget=budget,
            sources=[PREPARED if hit else NOTHING for hit in mine],
            ranks=session.ranks if budget else [-1] * session.rows,
            grown=session.grown,
            passes=session.passes,
            choose_seconds=session.choice,
            grow_seconds=session.passes * session.branch,
        )
        tokens = [[0] * (session.grown * hit) for hit in mine]
        return Speculation(tokens, None, record)

    def completed(self):
        tokens, sources, width = self.incomplete
        session, width = self.session, width or self.plan.after_miss
        steps = width - min(map(len, tokens))
        fed = session.rows
        if session.world.is_parallel:
            steps, fed = 1, session.rows * (width + 1)
        alone = session.world.alone if self.plan.mode == IN_TURN else 1.0
        seconds = sum(session.measured(session.draft.drafting(fed)) / alone for _ in range(steps))
        record = RoundRecord(lookahead=width, sources=sources, steps=steps, answer_seconds=seconds)
        return Speculation([[0] * width] * session.rows, None, record)
