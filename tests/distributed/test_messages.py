import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ssd.distributed import messages, payloads
from hf_ssd.distributed.messages import FRAME_LENGTH, HEADER_LENGTH, Kind, Message, ProtocolError
from hf_ssd.distributed.session import Answer
from hf_ssd.drafting.fallbacks import Proposal

ROOM = FRAME_LENGTH - HEADER_LENGTH
integers = st.integers(-(2**63), 2**63 - 1)


def through_the_wire(message):
    frame, *rest = messages.pack(message)
    received, payload = messages.unpack(frame.clone())
    if payload is not None and len(payload):
        payload.copy_(rest.pop(0))
    assert not rest
    return received


@settings(deadline=None)
@given(st.sampled_from(list(Kind)), st.integers(0, 2**40), st.integers(0, 2**40), st.lists(integers, max_size=ROOM + 5))
def test_integers_round_trip(kind, session, round_, values):
    message = Message(kind, session, round_, torch.tensor(values, dtype=torch.int64))
    received = through_the_wire(message)
    assert (received.kind, received.session, received.round) == (kind, session, round_)
    assert received.payload.tolist() == values


@pytest.mark.parametrize("size", [0, 3, ROOM + 1])
@pytest.mark.parametrize("announced", [torch.rand(7), torch.arange(3)])
@pytest.mark.parametrize("over_link", [False, True])
def test_an_announced_message_is_of_the_same_session_and_round(size, announced, over_link):
    follows = Message(Kind.ERROR, payload=announced.to("meta"), over_link=over_link)
    message = Message(Kind.SPECULATION, 3, 5, torch.arange(size), announces=follows)
    received = through_the_wire(message)
    assert torch.equal(received.payload, message.payload)
    follows = received.announces
    assert (follows.kind, follows.session, follows.round, follows.announces) == (Kind.ERROR, 3, 5, None)
    assert (follows.payload.shape, follows.payload.dtype) == (announced.shape, announced.dtype)
    assert follows.over_link == over_link


@settings(deadline=None)
@given(st.text())
def test_text_round_trips(text):
    payload = payloads.text_to_payload(text)
    assert payloads.payload_to_text(through_the_wire(Message(Kind.ERROR, payload=payload)).payload) == text


def test_small_messages_travel_in_one_frame():
    assert len(messages.pack(Message(Kind.OUTCOME, payload=torch.zeros(ROOM, dtype=torch.int64)))) == 1
    assert len(messages.pack(Message(Kind.OUTCOME, payload=torch.zeros(ROOM + 1, dtype=torch.int64)))) == 2


@pytest.mark.parametrize(
    "place, value, words",
    [
        (0, 7, "does not come from hf_ssd"),
        (1, 1, f"protocol version 1, this side speaks version {messages.VERSION}"),
        (2, 99, "kind 99"),
        (5, 9, "type 9"),
        (6, -1, "announces -1 elements"),
        (6, 2**60, f"announces {2**60} elements"),
        (8, 99, "kind 99"),
        (8, 6, "announces another of kind 6 with 0 elements"),
        (9, 9, "type 9"),
        (10, 2**60, f"{2**60} elements"),
        (11, 1, "which cannot be"),
    ],
)
def test_foreign_frames_are_named(place, value, words):
    frame = messages.pack(Message(Kind.START, payload=torch.zeros(500, dtype=torch.uint8)))[0]
    frame[place] = value
    with pytest.raises(ProtocolError, match=words):
        messages.unpack(frame)


@pytest.mark.parametrize("kind, session, round_, length", [
    (Kind.END, 3, 4, 6), (Kind.OUTCOME, 2, 4, 6), (Kind.OUTCOME, 3, 5, 6), (Kind.OUTCOME, 3, 4, 5),
])  # fmt: skip
def test_stale_messages_are_named(kind, session, round_, length):
    message = Message(Kind.OUTCOME, 3, 4, torch.zeros(6, dtype=torch.int64))
    messages.expect(message, Kind.OUTCOME, 3, 4, 6)
    with pytest.raises(ProtocolError, match="received OUTCOME of session 3, round 4, length 6"):
        messages.expect(message, kind, session, round_, length)


def test_payloads_round_trip():
    prompts = [torch.tensor([3, 1]), torch.tensor([4]), torch.tensor([1, 5, 9])]
    unpacked = payloads.payload_to_prompts(payloads.prompts_to_payload(prompts))
    assert [p.tolist() for p in unpacked] == [p.tolist() for p in prompts]
    accepted, bonus, seconds, verified = payloads.payload_to_outcome(
        payloads.outcome_to_payload(torch.tensor([0, -1]), torch.tensor([5, 6]), 0.25, 7)
    )
    assert (accepted.tolist(), bonus.tolist(), seconds, verified) == ([0, -1], [5, 6], 0.25, 7)
    answer = Answer(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([True, False]), 0.25, 0.125, 9, 7.5, 8.25)
    unpacked = payloads.payload_to_answer(payloads.answer_to_payload(answer), 2)
    assert torch.equal(unpacked.tokens, answer.tokens) and torch.equal(unpacked.hits, answer.hits)
    assert (unpacked.draft_seconds, unpacked.answer_seconds, unpacked.budget) == (0.25, 0.125, 9)
    assert (unpacked.prepared_at, unpacked.answered_at) == (7.5, 8.25)
    assert payloads.payload_to_backup_request(payloads.backup_request_to_payload([0, 2], 5), 3) == ([0, 2], 5)
    proposal = Proposal(torch.tensor([[7, 8], [9, 0]]), [2, 1], torch.ones(2, 2, 4) / 4)
    unpacked, probabilities_follow = payloads.payload_to_proposal(payloads.proposal_to_payload(proposal), 2)
    assert torch.equal(unpacked.tokens, proposal.tokens) and unpacked.counts == [2, 1] and probabilities_follow


@pytest.mark.parametrize("payload", [[], [5], [0, 1], [3, 0, 2], [3, -1]])
def test_requests_for_rows_that_are_not_there_are_refused(payload):
    with pytest.raises(ProtocolError):
        payloads.payload_to_backup_request(torch.tensor(payload, dtype=torch.int64), 2)


@pytest.mark.parametrize("payload", [[], [0, 1], [0, 1, 1, 5], [0, 2, 0, 5, 6], [0, -1, 0, 5, 6]])
def test_proposals_that_do_not_add_up_are_refused(payload):
    with pytest.raises(ProtocolError):
        payloads.payload_to_proposal(torch.tensor(payload, dtype=torch.int64), 2)


@pytest.mark.parametrize("payload", [[], [0], [2, 3], [1, 3, 5, 5], [1, 0], [2, 1, 1, 5]])
def test_prompts_that_do_not_add_up_are_refused(payload):
    with pytest.raises(ProtocolError):
        payloads.payload_to_prompts(torch.tensor(payload, dtype=torch.int64))


@pytest.mark.parametrize("support", [1, 5, 40])
def test_probabilities_travel_exactly(support):
    scores = torch.randn(2, 3, 40)
    scores = scores.masked_fill(scores < scores.topk(support).values[..., -1:], -torch.inf)
    probabilities = scores.softmax(-1)
    payload = payloads.probabilities_to_payload(probabilities)
    assert torch.equal(payloads.payload_to_probabilities(payload, probabilities.shape), probabilities)
    assert len(payload) == (probabilities.numel() if support == 40 else 2 * 6 * support)
    with pytest.raises(ProtocolError):
        payloads.payload_to_probabilities(payload[:-1], probabilities.shape)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.5])
def test_what_is_no_probability_arrives_as_it_is_or_as_nothing(value):
    """Beside a row that warpers truncated, so that without it the few tokens of that row alone would travel."""
    probabilities = torch.zeros(1, 2, 40)
    probabilities[0, 0, :3], probabilities[0, 1] = torch.tensor([0.5, 0.3, 0.2]), value
    arrived = payloads.payload_to_probabilities(payloads.probabilities_to_payload(probabilities), (1, 2, 40))
    torch.testing.assert_close(arrived, probabilities, equal_nan=True, rtol=0, atol=0)
    probabilities[0, 1, 5:] = 0.0
    arrived = payloads.payload_to_probabilities(payloads.probabilities_to_payload(probabilities), (1, 2, 40))
    same = (arrived == probabilities) | (arrived.isnan() & probabilities.isnan())
    assert torch.all(same | (arrived == 0) & ~(probabilities > 0))


@pytest.mark.parametrize("token", [-1, 40, 2**31 - 1])
def test_tokens_that_are_not_in_the_vocabulary_are_refused(token):
    payload = payloads.probabilities_to_payload(torch.eye(40)[None, :6])
    payload[-1] = token
    with pytest.raises(ProtocolError, match="are not tokens of the vocabulary of 40"):
        payloads.payload_to_probabilities(payload, (1, 6, 40))
