"""Whoever proposes, the draft is told the text and the tokens that are verified. Texts by rule, without models."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

import hf_ssd
from hf_ssd.distributed.cores import TargetCores
from hf_ssd.distributed.draft_server import Call, DraftServer
from hf_ssd.distributed.sessions import SessionRequest, WorkerSession
from hf_ssd.distributed.several_drafts import SeveralDrafts
from hf_ssd.distributed.shared_channel import SharedChannel
from hf_ssd.distributed.target_ranks import TargetRanks
from hf_ssd.drafting.speculation_cache import SpeculationCache
from hf_ssd.drafting.speculator import Speculator
from hf_ssd.generation.draft import FaultTolerantDraft
from hf_ssd.rounds import (
    AHEAD,
    CUSTOM,
    IN_TURN,
    NGRAM,
    PLAIN,
    PREPARED,
    PRIMARY,
    RANDOM,
    Outcome,
    Plan,
    RoundRecord,
)

from ..helpers.loopback import PackingChannel

VOCAB, ROUNDS = 17, 14


def target(text):
    """The target's next token: texts repeat themselves, but not for ever."""
    return text[-6] if len(text) % 23 else (text[-6] + 1) % VOCAB


def drafted(text):
    """The draft's next token, which often is the target's."""
    return target(text) if (7 * len(text) + text[-1]) % 4 else (text[-6] + 3) % VOCAB


def continued(text, count, by=drafted):
    text, start = list(text), len(text)
    while len(text) < start + count:
        text.append(by(text))
    return text[start:]


class RuleDrafter:
    vocab_size, uses_q, reads_target = VOCAB, False, False

    def __init__(self, prompts):
        self.texts, self.verified = [prompt.tolist() for prompt in prompts], [[] for _ in prompts]
        self.drafted = torch.zeros(len(prompts), 0)
        self.prefix = SimpleNamespace(most_states=0, lengths=[0] * len(prompts), read_target=lambda outcome: None)

    def commit(self, kept, tokens, branches):
        for row, k in enumerate(kept):
            assert tokens[row][: max(k, 0)] == self.verified[row][: max(k, 0)]
            self.texts[row] += tokens[row]

    def take_speculation(self, tokens):
        self.verified, self.drafted = [list(of_row) for of_row in tokens], torch.tensor(tokens)

    def forget_speculation(self):
        self.verified = None

    def complete(self, ready, width, plan):
        tokens = [row + continued(text + row, width - len(row)) for text, row in zip(self.texts, ready.tokens)]
        self.take_speculation(tokens)
        return dataclasses.replace(ready, tokens=tokens), width - min(map(len, ready.tokens))


class RuleSpeculator(Speculator):
    """Prepares an outcome for each accepted count, of which some come, and grows the branches as far as time allows."""

    def passes(self, plan):
        self.plan = plan
        self.catch_up()
        if not plan.budget:
            return
        rows = list(zip(self.drafter.texts, self.drafter.verified))
        starts = [[text + verified[:k] for k in range(len(verified) + 1)] for text, verified in rows]
        bonus = [[(target(start) + self.chance.choice([0, 0, 1])) % VOCAB for start in row] for row in starts]
        candidates = SimpleNamespace(ranks=lambda accepted, bonus: [0] * len(bonus))
        accepted = [list(range(len(row))) for row in bonus]
        self.prepared = SpeculationCache(accepted, bonus, candidates, RoundRecord(budget=plan.budget))
        grown = self.chance.choice([0, plan.lookahead // 2, plan.lookahead, plan.lookahead])
        branches = [[continued([*start, token], grown) for start, token in zip(*row)] for row in zip(starts, bonus)]
        self.prepared.append(branches, None, None)
        yield

    def _learn(self, keep=0):
        pass


class Worker:
    is_running, worker_info = True, {}

    def __init__(self, chance):
        self.chance, self.end = chance, PackingChannel()
        self.channel = SharedChannel(self.end, self)
        self.server, self.end.while_waiting = DraftServer(self.end.other, None), self.work

    def begins(self, request, index, workers):
        speculator = RuleSpeculator(RuleDrafter(request.prompts), None, None, index, workers)
        call = self.server.calls[1] = Call(1, speculator, request)
        speculator.chance, call.round = self.chance, 0
        self.end.other.incoming.clear()  # what a worker would make a speculator of

    def work(self):
        while self.end.other.incoming:
            self.server.handle(self.end.other.receive(0.0))


class Assistant:
    positions, state = None, "ready"

    def __init__(self, workers):
        self.workers = workers

    def begin_call(self, patience):
        pass

    def open_session(self, request, device):
        request, count = request(), len(self.workers)
        kind, workers = (WorkerSession, self.workers[0]) if count == 1 else (SeveralDrafts, self.workers)
        session = kind(workers, 1, request)
        begin = session.begin

        def begins():
            begin()
            for index, worker in enumerate(self.workers):
                worker.begins(request, index, count)

        session.begin = begins
        return session


class RightTokens:
    """A fallback of the user's, which proposes any number of tokens."""

    def __init__(self, chance):
        self.chance = chance

    def propose(self, input_ids, lookahead):
        count = self.chance.randint(0, lookahead + 1)
        return torch.tensor(continued(input_ids[0].tolist(), count, target), dtype=torch.long), None


class Whims:
    expects_draft = False

    def __init__(self, chance, fallback, workers):
        self.chance, self.fallback, self.plan = chance, fallback, Plan("ahead", 3, 3, 3, fallback)
        self.may_compete = workers == 1

    def begin_call(self):
        pass

    def change(self):
        ngrams = self.chance.choice([0, 7]) if self.fallback == PRIMARY else 0
        mode, lookahead = self.chance.choice(["ahead", "ahead", "ahead", "in_turn", "plain"]), self.chance.randint(1, 5)
        after_miss, budget = self.chance.randint(0, lookahead), 3 * (mode == "ahead")
        drafts = Plan(mode, lookahead, after_miss, budget, self.fallback, early=ngrams * self.may_compete)
        self.plan = Plan("plain", early=ngrams) if mode == "plain" else drafts


def run_calls(workers, fallback, calls=30):
    """Returns the sources of rows, and the modes of rounds that n-grams were verified in."""
    sources, modes = set(), set()
    for seed in range(calls):
        chance = random.Random(seed)
        setting = {PRIMARY: "auto", CUSTOM: RightTokens(chance)}.get(fallback, fallback)
        prompts = [torch.tensor([chance.randrange(5) for _ in range(6)] * chance.choice([1, 3])) for _ in range(2)]
        request = SessionRequest(hf_ssd.SSDConfig(fallback=setting), GenerationConfig(), prompts, 0, VOCAB)
        planner, assistant = Whims(chance, fallback, workers), Assistant([Worker(chance) for _ in range(workers)])
        device = torch.device("cpu")
        draft = FaultTolerantDraft(assistant, None, request, planner, device, TargetRanks(), TargetCores(None))
        draft.open(0.0)
        texts, verified, ends = [prompt.tolist() for prompt in prompts], [[], []], chance.randint(6, 2 * ROUNDS)
        for number in range(ROUNDS):
            live = range(1 if number >= ends else 2)
            outcome = Outcome([[], []])
            for row in live:
                right = (k for k, token in enumerate(verified[row]) if token != target(texts[row] + verified[row][:k]))
                k = next(right, len(verified[row]))
                outcome.tokens[row] = [*verified[row][:k], target(texts[row] + verified[row][:k])]
                texts[row] += outcome.tokens[row]
            draft.send_outcome(outcome)
            if chance.random() < 0.5:
                planner.change()
            speculation = draft.receive_speculation()
            verified = speculation.tokens
            assert len({*map(len, verified)}) == 1
            sources |= {speculation.record.sources[row] for row in live}
            modes |= {speculation.record.mode} if NGRAM in speculation.record.sources else set()
            for worker in assistant.workers if draft.is_asked and draft.session is not None else ():
                worker.work()
                speculator = worker.server.calls[1].speculator
                speculator.catch_up()
                for row in live:
                    assert speculator.drafter.texts[row] == texts[row]
                    assert speculator.drafter.verified[row] == verified[row]
        assert draft.failure is None
    return sources, modes


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fallback", [PRIMARY, NGRAM, RANDOM, CUSTOM])
def test_the_draft_reads_the_text_and_the_tokens_that_are_verified(workers, fallback):
    sources, modes = run_calls(workers, fallback)
    assert {PREPARED, PRIMARY, fallback} <= sources
    if fallback == PRIMARY:
        assert modes == ({PLAIN, IN_TURN, AHEAD} if workers == 1 else {PLAIN})


@pytest.mark.parametrize("session, fallback", [(WorkerSession, CUSTOM), (SeveralDrafts, RANDOM)])
def test_a_draft_that_is_not_told_is_noticed(monkeypatch, session, fallback):
    """The mutant for the test above."""
    monkeypatch.setattr(session, "send_proposals", lambda self, tokens, sources: None)
    with pytest.raises(AssertionError):
        run_calls(1 if session is WorkerSession else 2, fallback)


def test_ngrams_that_do_not_leave_with_the_outcome_are_noticed(monkeypatch):
    """The same for n-grams."""
    send = WorkerSession.send_outcome
    monkeypatch.setattr(
        WorkerSession,
        "send_outcome",
        lambda self, outcome, plan: send(self, dataclasses.replace(outcome, proposed=None), plan),
    )
    with pytest.raises(AssertionError):
        run_calls(1, PRIMARY)
