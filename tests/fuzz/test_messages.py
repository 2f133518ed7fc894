"""Messages that are damaged are refused in a sentence, or say something that can be; they never do anything else."""

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ssd.distributed import messages, payloads
from hf_ssd.distributed.messages import FRAME_LENGTH, HEADER_LENGTH, LARGEST_PAYLOAD, Kind, ProtocolError
from hf_ssd.distributed.session import SessionRequest

from ..conftest import VOCAB
from .conftest import ROWS, damaged

PROMPTS = [torch.tensor([1])] * ROWS


def tokens_make_sense(tokens, rows=ROWS):
    assert tokens.dtype == torch.int64 and tokens.shape[0] == rows and tokens.shape[1] <= 64
    assert not tokens.numel() or tokens.min() >= 0


def read_answer(payload, shape):
    answer = payloads.payload_to_answer(payload, ROWS)
    check_answer(answer)
    payloads.check_tokens(answer.tokens.flatten(), VOCAB)
    assert not answer.tokens.numel() or answer.tokens.max() < VOCAB


def check_answer(answer):
    tokens_make_sense(answer.tokens)
    assert answer.hits.shape == (ROWS,) and answer.hits.dtype == torch.bool
    assert answer.budget >= 0 and answer.rest >= 0
    assert all(math.isfinite(x) for x in (answer.draft_seconds, answer.prepared_at, answer.answered_at))


def read_probabilities(payload, shape):
    q = payloads.payload_to_probabilities(payload, shape)
    assert q.shape == shape and q.dtype == torch.float32


def read_outcomes(payload, shape):
    for accepted, bonus, seconds, verified in payloads.payload_to_outcomes(payload, ROWS):
        assert accepted.shape == bonus.shape == (ROWS,) and seconds >= 0 and verified >= 0
        assert accepted.min() >= -1 and accepted.max() <= 64 and bonus.min() >= 0


def check_plan(plan):
    assert 0 <= plan.lookahead <= 64 and plan.budget >= 0 and plan.drafts >= 1 and plan.fallback in payloads.SOURCES
    assert 0 <= plan.saguaro_c <= 1 and 0 < plan.acceptance_rate < 1 and 0 < plan.power_law_exponent < math.inf


def read_found(payload, shape):
    found = payloads.payload_to_found(payload, ROWS)
    check_answer(found.answer)
    check_plan(found.plan)


def read_complete(payload, shape):
    tokens, hits, known = payloads.payload_to_complete(payload, ROWS)
    tokens_make_sense(tokens)
    assert hits.shape == (ROWS,) and all(0 <= n <= tokens.shape[1] for n in known)


def read_completed(payload, shape):
    answer, source = payloads.payload_to_completed(payload, ROWS)
    check_answer(answer)
    assert source in payloads.SOURCES


def read_follow(payload, shape):
    tokens, hits, mine, source, plan = payloads.payload_to_follow(payload, ROWS)
    tokens_make_sense(tokens)
    check_plan(plan)
    assert hits.shape == (ROWS,) and len(mine) <= ROWS and source in payloads.SOURCES


def read_request_for_backup(payload, shape):
    rows, lookahead = payloads.payload_to_backup_request(payload, ROWS)
    assert 1 <= lookahead <= 64 and set(rows) <= set(range(ROWS)) and len(rows) == len(set(rows)) > 0


def read_proposal(payload, shape):
    proposal, follow = payloads.payload_to_proposal(payload, shape[0])
    tokens_make_sense(proposal.tokens, shape[0])
    assert all(0 <= n <= proposal.tokens.shape[1] for n in proposal.counts) and type(follow) is bool


def read_prompts(payload, shape):
    prompts = payloads.payload_to_prompts(payload)
    assert prompts and all(len(prompt) and prompt.min() >= 0 for prompt in prompts)


def read_request(payload, shape):
    read_values(payloads.payload_to_json(payload))


def read_values(values):
    request = SessionRequest.from_dict(values, PROMPTS)
    assert 0 <= request.seed < 2**31 and 0 <= request.share[0] < request.share[1] and type(request.asks_target) is bool


READERS = {
    Kind.READY: lambda payload, shape: payloads.payload_to_json(payload),
    Kind.START: read_request,
    Kind.PROMPTS: read_prompts,
    Kind.OUTCOME: read_outcomes,
    Kind.NEWS: read_outcomes,
    Kind.END: read_outcomes,
    Kind.SPECULATION: read_answer,
    Kind.PROBABILITIES: read_probabilities,
    Kind.ERROR: lambda payload, shape: payloads.payload_to_text(payload),
    Kind.BACKUP_REQUEST: read_request_for_backup,
    Kind.BACKUP: read_proposal,
    Kind.FOUND: read_found,
    Kind.COMPLETE: read_complete,
    Kind.COMPLETED: read_completed,
    Kind.FOLLOW: read_follow,
}


def refused(step, *arguments) -> bool:
    """Any other exception ends the test."""
    try:
        step(*arguments)
        return False
    except ProtocolError as error:
        assert len(str(error)) > 10
        return True


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


def test_recorded_messages_of_all_kinds_are_understood(recorded):
    kinds = set()
    for one in recorded:
        kinds.add(one.message.kind)
        messages.unpack(one.frame)
        reader = READERS.get(one.message.kind)
        if reader is not None and len(one.message.payload) and not is_backup_q(one):
            assert not refused(reader, one.message.payload, shape_of(one))
    assert kinds >= READERS.keys() - {Kind.READY, Kind.ERROR, Kind.NEWS}


def is_backup_q(one) -> bool:
    return one.message.kind == Kind.PROBABILITIES and shape_of(one) is None


def shape_of(one):
    """The shape that the receiver of these probabilities expects, as far as their number tells."""
    payload = one.message.payload
    if one.message.kind != Kind.PROBABILITIES:
        return one.shape
    if payload.dtype == torch.int32:
        return one.shape if not payload.numel() % (2 * ROWS * 3) else None
    positions = payload.numel() // VOCAB
    return (ROWS, positions // ROWS, VOCAB) if positions and not positions % ROWS else None


@sizes
def test_damaged_payloads(recorded, count):
    chance, found = random.Random(count), []
    usable = [one for one in recorded if one.message.kind in READERS and not is_backup_q(one)]
    by_kind = {kind: [one for one in usable if one.message.kind == kind] for kind in {o.message.kind for o in usable}}
    for _ in range(count):
        one = chance.choice(by_kind[chance.choice(list(by_kind))])
        kind = one.message.kind if chance.random() < 0.9 else chance.choice(list(READERS))
        found.append(refused(READERS[kind], damaged(one.message.payload, chance), shape_of(one)))
    assert 0.2 < sum(found) / count < 0.99


@sizes
def test_damaged_frames(recorded, count):
    chance, found = random.Random(count), []
    for _ in range(count):
        frame = chance.choice(recorded).frame.clone()
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(HEADER_LENGTH if chance.random() < 0.9 else FRAME_LENGTH)
            if chance.random() < 0.5:
                frame[place] ^= 1 << chance.randrange(63)
            else:
                frame[place] = chance.choice([-1, 0, 1, 2, 3, 19, 20, 117, 118, 2**26, 2**26 + 1, 2**34, -(2**63)])
        found.append(refused(messages.unpack, frame))
    assert 0.2 < sum(found) / count < 0.99


@sizes
def test_damaged_requests(recorded, count):
    """Valid JSON whose values are others."""
    chance, found = random.Random(count), []
    requests = [payloads.payload_to_json(one.message.payload) for one in recorded if one.message.kind == Kind.START]
    odd = [None, True, 0, -1, 2**31, 10**400, 1e308, math.nan, "", "auto", "é" * 50, [], [[]], {}, {"a": {}}, [0, 1]]
    for _ in range(count):
        request = json.loads(json.dumps(chance.choice(requests)))
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
        found.append(refused(read_values, request))
    assert 0.2 < sum(found) / count < 0.99


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["ssd_config", "seed", "share"]), inner)
    ),
)


@settings(max_examples=60, deadline=None)
@given(trees)
def test_any_json_as_a_request(tree):
    payload = payloads.json_to_payload(tree)
    refused(lambda: read_request(payload, None))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(list(messages.PAYLOAD_TYPES)), st.sampled_from(list(READERS)))
def test_any_bytes_as_a_message(data, dtype, kind):
    data = bytearray(data[: len(data) // dtype.itemsize * dtype.itemsize])
    payload = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    refused(READERS[kind], payload, (ROWS, 3, VOCAB))


def test_deep_json_and_wide_json_are_refused():
    for text in ("[" * 100_000, '{"a":' * 100_000, "1" * 5000, "NaN" * 3, '"\ud800"'):
        payload = torch.tensor(list(text.encode("utf-8", errors="surrogatepass")), dtype=torch.uint8)
        assert refused(payloads.payload_to_json, payload)


def test_the_mutant_a_header_that_is_believed_is_noticed(monkeypatch, recorded):
    monkeypatch.setattr(messages.unpack, "__defaults__", (2**62,))
    with pytest.raises((AssertionError, RuntimeError)):
        test_damaged_frames(recorded, QUICK)


@pytest.mark.parametrize(
    "name, mutant",
    [
        ("_check_integers", lambda payload, at_least: None),
        ("check_tokens", lambda tokens, vocab_size=None: tokens),
        ("_bytes", lambda payload: bytes(payload.tolist())),
    ],
)
def test_checks_that_are_left_out_are_noticed(monkeypatch, recorded, name, mutant):
    monkeypatch.setattr(payloads, name, mutant)
    with pytest.raises(Exception) as error:
        test_damaged_payloads(recorded, 10 * QUICK)
    assert not isinstance(error.value, ProtocolError)
