"""Messages that are damaged are refused in a sentence, or say something that can be; they never do anything else."""

import functools
import json
import math
import random

import pytest
import torch
from transformers import GenerationConfig

from hf_ssd.config import LONGEST_LOOKAHEAD
from hf_ssd.distributed import requests, wire
from hf_ssd.distributed.requests import MOST_TOKENS, MOST_WORKERS, read_options
from hf_ssd.distributed.wire import FRAME_LENGTH, HEADER, LARGEST_PAYLOAD, Kind, ProtocolError
from hf_ssd.drafting.vocabulary import Translation
from hf_ssd.rounds import MODES, SOURCES

from ..helpers.heads import LAYERS
from ..helpers.tiny import SIZES, VOCAB
from .conftest import ROWS, damaged, refused

SHAPE = ROWS, 3, VOCAB
WIDTH = len(LAYERS) * SIZES["hidden_size"]  # of a token's features
TRANSLATION = Translation([[token] for token in range(VOCAB)], torch.ones(VOCAB, dtype=torch.bool))


def read_speculation(payload):
    speculation = wire.read_speculation(payload, ROWS)
    tokens, record = speculation.tokens, speculation.record
    assert len(tokens) == ROWS and speculation.width <= LONGEST_LOOKAHEAD
    assert len(record.sources) == len(record.ranks) == ROWS
    assert {*record.sources} <= {*SOURCES} and record.draft_seconds < math.inf
    assert min(record.lookahead, record.budget, record.passes, record.steps) >= 0
    assert all(0 <= token < 2**63 for of_row in tokens for token in of_row)
    if speculation.siblings is not None:
        assert len(speculation.siblings) == ROWS
        for of_row, trunk in zip(speculation.siblings, tokens):
            assert all(0 <= depth < len(trunk) and 0 <= token < 2**63 for depth, token in of_row)


def read_probabilities(payload):
    q = wire.read_probabilities(payload, SHAPE)
    assert q.shape == SHAPE and q.dtype == torch.float32


def read_outcome(payload):
    outcome, plan = wire.read_outcome(payload, ROWS)
    assert plan.mode in MODES and plan.fallback in SOURCES
    assert 0 <= plan.after_miss <= plan.lookahead <= LONGEST_LOOKAHEAD and plan.budget >= 0
    assert len(outcome.tokens) == ROWS and all(min(tokens, default=0) >= 0 for tokens in outcome.tokens)
    for tokens in outcome.proposed or []:
        assert min(tokens, default=0) >= 0 and len(tokens) <= LONGEST_LOOKAHEAD


def read_features(payload):
    tokens = len(payload) // WIDTH if isinstance(payload, torch.Tensor) else 1
    features = wire.read_features(payload, tokens, WIDTH)
    assert features.shape == (tokens, WIDTH)
    assert features.dtype.is_floating_point and features.isfinite().all()


def read_request(values):
    request = requests.read_request(values, TRANSLATION, VOCAB)
    assert 0 < request.vocab_size <= MOST_TOKENS
    assert 0 <= request.seed < 2**31 and 0 <= request.worker_index < request.num_workers <= MOST_WORKERS
    assert type(request.prompt_length) is int and all(prompt.dim() == 1 for prompt in request.prompts)
    filled = [prompt for prompt in request.prompts if len(prompt)]
    assert len(filled) in (0, len(request.prompts)), "all are empty in a running batch"
    assert all(0 <= prompt.min() <= prompt.max() < request.vocab_size for prompt in filled)


def read_join(payload):
    row, start, tokens, settings, seed = wire.read_join(payload, ROWS, VOCAB)
    assert 0 <= row < ROWS and start >= 0 and 0 <= seed < 2**31 and all(0 <= token < VOCAB for token in tokens)
    assert settings is None or isinstance(read_options(settings), GenerationConfig)


READERS = {
    Kind.START: read_request,
    Kind.JOIN: read_join,
    Kind.OUTCOME: read_outcome,
    Kind.SPECULATION: read_speculation,
    Kind.PROBABILITIES: read_probabilities,
    Kind.FEATURES: read_features,
}


def read(kind, payload):
    """Reads what has arrived in the place of a payload of this kind."""
    READERS[kind](wire.read_json(payload) if isinstance(payload, bytes) else payload)


@pytest.fixture(autouse=True)
def no_large_tensors(monkeypatch):
    """Refuses room for more than `LARGEST_PAYLOAD` elements, and does not really make what is large."""
    empty = torch.empty

    def bounded(length, *arguments, **options):
        assert not isinstance(length, int) or length <= LARGEST_PAYLOAD
        return empty(min(length, 2**16) if isinstance(length, int) else length, *arguments, **options)

    monkeypatch.setattr(torch, "empty", bounded)


QUICK, SLOW = 1_000, 230_000  # inputs for each of three tests; with those of test_files.py the slow ones are a million
slow = pytest.param(SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])
sizes = pytest.mark.parametrize("count", [QUICK, slow])


def of_full_width(one) -> bool:
    """Whether these are no probabilities, or those of a speculation of the planned length."""
    payload, positions = one.message.payload, ROWS * SHAPE[1]
    if one.message.kind != Kind.PROBABILITIES:
        return True
    if payload.dtype == torch.int32:
        return not payload.numel() % (2 * positions)
    return payload.numel() == positions * VOCAB


def test_recorded_messages_of_all_kinds_are_understood(recorded):
    kinds = set()
    for one in recorded:
        wire.unpack(one.frame)
        if one.message.kind in READERS and of_full_width(one):
            kinds.add(one.message.kind)
            assert not refused(READERS[one.message.kind], one.message.payload)
    assert kinds == READERS.keys()


@sizes
def test_damaged_payloads(recorded, count):
    chance, found = random.Random(count), []
    usable = [one for one in recorded if one.message.kind in READERS and of_full_width(one)]
    by_kind = {kind: [one for one in usable if one.message.kind == kind] for kind in {o.message.kind for o in usable}}
    for _ in range(count):
        one = chance.choice(by_kind[chance.choice(list(by_kind))])
        kind = one.message.kind if chance.random() < 0.9 else chance.choice(list(READERS))
        found.append(refused(read, kind, damaged(one.message.payload, chance)))
    assert 0.2 < sum(found) / count < 0.99


@sizes
def test_damaged_frames(recorded, count):
    chance, found = random.Random(count), []
    for _ in range(count):
        frame = chance.choice(recorded).frame.clone()
        for _ in range(chance.randint(1, 3)):
            numbers = frame.view(torch.int64)
            place = chance.randrange(HEADER.size // 8 if chance.random() < 0.9 else FRAME_LENGTH // 8)
            if chance.random() < 0.5:
                numbers[place] ^= 1 << chance.randrange(63)
            else:
                numbers[place] = chance.choice([-1, 0, 1, 2, 3, 19, 20, 117, 118, 2**26, 2**26 + 1, 2**34, -(2**63)])
        found.append(refused(wire.unpack, frame))
    assert 0.2 < sum(found) / count < 0.99


@sizes
def test_damaged_requests(recorded, count, monkeypatch):
    """Valid JSON whose values are others. Settings that most requests leave as they were are read once."""
    chance, found = random.Random(count), []
    read_settings = functools.lru_cache(lambda text: read_options(json.loads(text)))
    monkeypatch.setattr(requests, "read_options", lambda settings: read_settings(json.dumps(settings)))
    starts = [json.dumps(one.message.payload) for one in recorded if one.message.kind == Kind.START]
    odd = [None, True, 0, -1, 2**31, 10**400, 1e308, math.nan, "", "auto", "é" * 50, [], [[]], {}, {"a": {}}, [0, 1]]
    for _ in range(count):
        request = json.loads(chance.choice(starts))
        for _ in range(chance.randint(1, 2)):
            place = request
            while isinstance(place, dict) and place:
                key = chance.choice(list(place))
                if not isinstance(place[key], dict) or chance.random() < 0.2:
                    if chance.random() < 0.2:
                        del place[key]
                    else:
                        place[key if chance.random() < 0.9 else "unknown"] = chance.choice(odd)
                    break
                place = place[key]
        found.append(refused(read_request, request if chance.random() < 0.99 else chance.choice(odd)))
    assert 0.2 < sum(found) / count < 0.99


def test_deep_json_and_wide_json_are_refused():
    for text in ("[" * 100_000, '{"a":' * 100_000, "1" * 5000, "NaN" * 3, '"\ud800"'):
        assert refused(wire.read_json, text.encode("utf-8", errors="surrogatepass"))


def test_the_mutant_a_header_that_is_believed_is_noticed(monkeypatch, recorded):
    monkeypatch.setattr(wire.unpack, "__defaults__", (2**62,))
    with pytest.raises((AssertionError, RuntimeError)):
        test_damaged_frames(recorded, QUICK)


@pytest.mark.parametrize("name, mutant", [
    ("read_list", lambda values, length, of_what: values),
    ("read_numbers", lambda numbers, most, first=0, last=2**63 - 1: numbers),
    ("read_json", json.loads),
    ("read_features", lambda payload, tokens, width: torch.as_tensor(payload)[: tokens * width].view(tokens, width)),
])  # fmt: skip
def test_checks_that_are_left_out_are_noticed(monkeypatch, recorded, name, mutant):
    monkeypatch.setattr(wire, name, mutant)
    with pytest.raises(Exception) as error:
        test_damaged_payloads(recorded, 10 * QUICK)
    assert not isinstance(error.value, ProtocolError)
