"""Real messages, recorded from real calls, and what can happen to them on the way."""

import dataclasses
import json
import random
import re
from dataclasses import dataclass

import pytest
import torch

import hf_ssd
from hf_ssd.distributed import transport
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.wire import FRAME_LENGTH, HEADER, TENSOR_TYPES, Message, ProtocolError, pack

from ..helpers.heads import tiny_head
from ..helpers.loopback import through_the_wire
from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import VOCAB, padded_batch, tiny_draft, tiny_model
from ..helpers.vocabularies import DRAFT, TARGET, tokenizer

ROWS = 2


@dataclass
class Recorded:
    message: Message  # as it was sent
    frame: torch.Tensor  # its frame, or the one that announces it


class Last:
    """A fallback of the user's, which says what it drew from."""

    def propose(self, input_ids, lookahead):
        return input_ids[0, -1:], torch.nn.functional.one_hot(input_ids[0, -1:], VOCAB).float()


@pytest.fixture(scope="session")
def recorded():
    """Messages of calls that are greedy, planned, or sampled with q dense and sparse, with a user's fallback ..."""
    found, patch, send_announced = [], pytest.MonkeyPatch(), transport.Channel.send_announced

    def record(message):
        tensors = pack(message)
        found.append(Recorded(through_the_wire(message), tensors[0].clone()))
        return tensors

    def record_announced(channel, payload):
        announced = channel.promised
        message = Message(announced.kind, announced.session, announced.round, payload)
        found.append(Recorded(message, found[-1].frame))
        send_announced(channel, payload)

    patch.setattr(transport, "pack", record)
    patch.setattr(transport.Channel, "send_announced", record_announced)
    target = hf_ssd.enable(tiny_model())
    settings = {"lookahead": 3, "budget": 4}
    calls = [
        (1, {"do_sample": False}, {}),
        (1, {"do_sample": False}, {"lookahead": "auto", "budget": "auto"}),  # the draft is not asked in all rounds
        (1, {"do_sample": True, "top_k": 0}, {}),
        (1, {"do_sample": True, "top_k": 5, "bad_words_ids": [[5], [6, 7]]}, {}),
        (1, {"do_sample": True}, {"fallback": Last()}),
        (2, {"do_sample": True}, {}),
        (1, {"tokenizer": tokenizer(TARGET), "assistant_tokenizer": tokenizer(DRAFT)}, {}),
        (1, {"do_sample": False}, {"drafter": "eagle3"}),
    ]
    with patch.context():
        for workers, options, more in calls:
            drafts = [tiny_draft(disagreement=0.3) for _ in range(workers)]  # not in the threads that start workers
            drafts = [tiny_head(target)] if "drafter" in more else drafts
            with DraftAssistant([ThreadWorker(draft) for draft in drafts]) as assistant:
                output = target.generate(
                    **padded_batch(ROWS), max_new_tokens=12, assistant_model=assistant, return_dict_in_generate=True,
                    ssd_config=hf_ssd.SSDConfig(**{**settings, **more}), **options,
                )  # fmt: skip
                assert output.ssd_stats.draft_failure is None
        with DraftAssistant([ThreadWorker(tiny_draft(disagreement=0.3))]) as assistant:
            config = hf_ssd.SSDConfig(**settings)
            with hf_ssd.continuous_batching(target, assistant, config, ROWS, prefill_chunk=4) as manager:
                rows = padded_batch(ROWS)["input_ids"]
                ids = [manager.add_request(row[None], max_new_tokens=12, do_sample=True, top_k=5) for row in rows]
                assert all(list(manager.request_id_iter(one))[-1].error is None for one in ids)
    patch.undo()
    return found


ODD = [0, 1, -1, 2, 63, 65, 97, 2**31, -(2**31), 2**40, 2**63 - 1, -(2**63)]


def damaged(payload, chance: random.Random) -> torch.Tensor | bytes:
    """What may arrive instead: with flipped bytes, other numbers, cut off, longer, or a tensor of another type."""
    is_tensor = isinstance(payload, torch.Tensor)
    data = bytearray(payload.numpy().tobytes() if is_tensor else json.dumps(payload).encode())
    dtype = payload.dtype if is_tensor else torch.uint8
    for _ in range(chance.randint(1, 3)):
        what = chance.randrange(6)
        if what == 0 and data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif what == 1 and data:
            data[chance.randrange(len(data))] = chance.randrange(256)
        elif what == 2:
            data = data[: chance.randint(0, len(data))]
        elif what == 3:
            data += chance.randbytes(chance.choice([1, 8, 64, 1000]))
        elif what == 4 and is_tensor and len(data) >= 8:
            place = chance.randrange(len(data) // 8) * 8
            data[place : place + 8] = chance.choice(ODD).to_bytes(8, "little", signed=True)
        elif what == 4 and (numbers := list(re.finditer(rb"-?\d+", data))):
            number = chance.choice(numbers)
            data[number.start() : number.end()] = str(chance.choice(ODD)).encode()
        elif what == 5 and is_tensor:
            dtype = chance.choice(TENSOR_TYPES)
    if not is_tensor:
        return bytes(data)
    data = data[: len(data) // dtype.itemsize * dtype.itemsize]
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def frames_of(message: Message, text: bytes) -> list[torch.Tensor]:
    """Returns the frame of a message whose payload is this text instead of JSON, and the text if it does not fit in."""
    frame, text = pack(dataclasses.replace(message, payload=None))[0], torch.tensor(list(text), dtype=torch.uint8)
    frame[: HEADER.size].view(torch.int64)[5] = len(text)
    if HEADER.size + len(text) > FRAME_LENGTH:
        return [frame, text]
    frame[HEADER.size : HEADER.size + len(text)] = text
    return [frame]


def refused(step, *arguments, error=ProtocolError) -> bool:
    """Whether a step is refused in a sentence. Any other exception ends the test."""
    try:
        step(*arguments)
        return False
    except error as sentence:
        assert len(str(sentence)) > 10
        return True
