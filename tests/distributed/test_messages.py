"""What is written to the wire is read as it was; what cannot be is refused. Damage of any kind is in tests/fuzz."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from hf_ssd import SSDConfig
from hf_ssd.distributed import wire
from hf_ssd.distributed.requests import KEPT, read_request, write_request
from hf_ssd.distributed.wire import FRAME_LENGTH, HEADER, Kind, Message, ProtocolError
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.drafting.vocabulary import Translation
from hf_ssd.rounds import AHEAD, NGRAM, Outcome, Plan, RoundRecord, Speculation

from ..helpers.loopback import through_the_wire

ROOM = FRAME_LENGTH - HEADER.size
leaves = st.none() | st.integers() | st.text()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(st.sampled_from(list(Kind)), st.integers(0, 2**40), st.integers(0, 2**40), values | st.just([7] * 1000))
def test_values_round_trip(kind, session, round_, payload):
    message = Message(kind, session, round_, payload)
    assert through_the_wire(message) == message


def test_small_messages_travel_in_one_frame():
    assert len(wire.pack(Message(Kind.OUTCOME, payload="0" * (ROOM - 2)))) == 1
    assert len(wire.pack(Message(Kind.OUTCOME, payload="0" * (ROOM - 1)))) == 2


def test_what_users_pass_of_numpy_and_torch_travels():
    payload = {"eos_token_id": torch.tensor([3, 5]), "top_k": np.int64(7), "bias": [np.array([[2]])]}
    received = through_the_wire(Message(Kind.START, payload=payload))
    assert received.payload == {"eos_token_id": [3, 5], "top_k": 7, "bias": [[[2]]]}


@pytest.mark.parametrize(
    "place, value, words",
    [
        (0, 7, "does not come from hf_ssd"),
        (1, 1, f"protocol version 1, this side speaks version {wire.VERSION}"),
        (2, 99, "99 cannot be the kind of a message"),
        (5, -1, "-1 cannot be the length of a message"),
        (5, 3, "is not JSON"),
        (5, 2**60, "announces more than"),
        (6, 99, "99 cannot be the kind of an announced message"),
        (6, 6, "0 cannot be the length"),
        (7, 9, "0 cannot be the kind"),
        (8, 2**60, "0 cannot be the kind"),
    ],
)
def test_foreign_frames_are_named(place, value, words):
    frame = wire.pack(Message(Kind.START, payload=[500]))[0]
    frame[: wire.HEADER.size].view(torch.int64)[place] = value
    with pytest.raises(ProtocolError, match=words):
        wire.unpack(frame)


def test_outcomes_round_trip():
    plan = Plan(AHEAD, 5, 2, 12, NGRAM)
    for tokens, proposed in itertools.product(([[5], []], [[7, 8, 9], [4] * 200]), (None, [[4, 4], []])):
        outcome = Outcome(tokens, proposed)
        message = through_the_wire(Message(Kind.OUTCOME, payload=wire.write_outcome(outcome, plan)))
        assert wire.read_outcome(message.payload, 2) == (outcome, plan)


def test_speculations_round_trip_with_the_drafts_part_of_the_record():
    record = RoundRecord(
        lookahead=3, budget=9, sources=["prepared", "nothing"], ranks=[2, -1], passes=3, steps=1, choose_seconds=0.25,
        grow_seconds=0.125, answer_seconds=0.5, prepared_at=7.5, answered_at=8.25,
    )  # fmt: skip
    speculation = Speculation([[1, 2, 3], [4]], None, record)
    unpacked = wire.read_speculation(wire.write_speculation(speculation), 2)
    assert unpacked == speculation
    speculation.siblings = [[(0, 5), (2, 6)], []]
    assert wire.read_speculation(wire.write_speculation(speculation), 2) == speculation
    empty = wire.read_speculation(wire.write_speculation(Speculation.empty(2)), 2)
    assert empty.tokens == [[], []] and empty.record.sources == ["nothing"] * 2


OUTCOME = [1, 5, 2, 12, 0, 9], None, [[5, 7, 8], []]  # plan, proposed, tokens
SPECULATION = wire.write_speculation(Speculation([[1, 2, 3], [4]], None, RoundRecord(sources=["nothing"] * 2)))
REFUSED = [  # each sentence; what else cannot be is in tests/fuzz
    (OUTCOME, 0, [-1, 5, 2, 12, 0, 9], "-1 cannot be the mode of a plan"),
    (OUTCOME, 0, [1, 65, 2, 12, 0, 9], "65 cannot be the lookahead of a plan"),
    (OUTCOME, 0, [1, 5, 6, 12, 0, 9], "is not a plan"),  # after a miss more than ever
    (OUTCOME, 0, [1, 5, 2, 12, 0, 257], "257 cannot be the nodes of a plan"),
    (OUTCOME, 0, None, "a plan has not the 6 numbers"),
    (OUTCOME, 1, [[4] * 65, []], "is not a list of at most 64"),  # that the target proposes
    (OUTCOME, 2, [[5, 7, 8]], "cannot be the tokens of all rows"),
    (OUTCOME, 2, [[5, 7, 8], None], "is not a list"),
    (OUTCOME, 2, [[5, 7, True], []], "are not numbers from 0"),
    (OUTCOME, 2, [[5, 7, 8.0], []], "are not numbers from 0"),
    (SPECULATION, 4, [[0, 5]], "cannot be the siblings of all rows"),
    (SPECULATION, 4, [[0, 5], [0]], "are no siblings of 1 tokens"),
    (SPECULATION, 4, [[3, 5], []], "are no siblings of 3 tokens"),  # beside a token that is not there
    (SPECULATION, 4, [[0, 97], []], "are not numbers from 0 to 96"),
    (SPECULATION, 4, [[0, 1] * 300, []], "is not a list of at most"),
]


@pytest.mark.parametrize("message, place, value, words", REFUSED)
def test_what_cannot_be_is_refused(message, place, value, words):
    def read(payload):
        return wire.read_outcome(payload, 2) if message is OUTCOME else wire.read_speculation(payload, 2, 97)

    read([*message])
    with pytest.raises(ProtocolError, match=words):
        read([*message[:place], value, *message[place + 1 :]])


def request(**changes):
    prompts = [torch.tensor([3, 1]), torch.tensor([4])]
    return SessionRequest(SSDConfig(), GenerationConfig(max_length=9), prompts, 5, 8, **changes)


def test_a_call_travels_with_its_prompts_and_a_translation_that_a_later_call_may_mean_again():
    translation = Translation([[1, 2]] + [[token] for token in range(7)], torch.tensor([False] + [True] * 7))
    values = write_request(request(translation=translation, num_workers=2))
    assert values["translation"] == KEPT
    values = through_the_wire(Message(Kind.START, payload={**values, "translation": translation.to_tensor()})).payload
    read = read_request(values, None, draft_size=7)
    assert [prompt.tolist() for prompt in read.prompts] == [[3, 1], [4]]
    assert (read.seed, read.vocab_size, read.num_workers, read.prompt_length) == (5, 8, 2, 2)
    assert read.translation.pieces == translation.pieces and read.generation_config.max_length == 9
    again = read_request({**values, "translation": KEPT}, read.translation, draft_size=7)
    assert again.translation is read.translation
    assert read_request(write_request(request()), read.translation, 7).translation is None
    for prompts in (None, [], [[1], []], [5], [["a"]], [[-1]], [[1], [8]]):
        with pytest.raises(ProtocolError):
            read_request({**values, "prompts": prompts}, None, 7)
    for changes, kept, size in (({"translation": KEPT}, None, 7), ({}, None, 6), ({"translation": [1, 0]}, None, 7)):
        with pytest.raises(ProtocolError, match="translat|cannot be read"):
            read_request({**values, **changes}, kept, size)


def packed(probabilities):
    return wire.write_probabilities(probabilities, int((probabilities != 0).sum(-1).max()))


@pytest.mark.parametrize("support", [1, 5, 40])
def test_probabilities_travel_exactly(support):
    scores = torch.randn(2, 3, 40)
    scores = scores.masked_fill(scores < scores.topk(support).values[..., -1:], -torch.inf)
    probabilities = scores.softmax(-1)
    payload = packed(probabilities)
    assert torch.equal(wire.read_probabilities(payload, probabilities.shape), probabilities)
    assert len(payload) == (probabilities.numel() if support == 40 else 2 * 6 * support)
    with pytest.raises(ProtocolError, match="are not probabilities"):
        wire.read_probabilities(payload[:-1], probabilities.shape)
    if support < 40:
        payload[-1] = 40
        with pytest.raises(ProtocolError, match="not in the vocabulary of 40"):
            wire.read_probabilities(payload, probabilities.shape)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.5])
def test_what_is_no_probability_arrives_as_it_is_or_as_nothing(value):
    """Beside a row that warpers truncated, so that without it the few tokens of that row alone would travel."""
    probabilities = torch.zeros(1, 2, 40)
    probabilities[0, 0, :3], probabilities[0, 1] = torch.tensor([0.5, 0.3, 0.2]), value
    arrived = wire.read_probabilities(packed(probabilities), (1, 2, 40))
    torch.testing.assert_close(arrived, probabilities, equal_nan=True, rtol=0, atol=0)
    probabilities[0, 1, 5:] = 0.0
    arrived = wire.read_probabilities(packed(probabilities), (1, 2, 40))
    same = (arrived == probabilities) | (arrived.isnan() & probabilities.isnan())
    assert torch.all(same | (arrived == 0) & ~(probabilities > 0))
