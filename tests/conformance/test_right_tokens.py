"""Rows that are verified again beside others, and ranks that stay in step when a worker dies."""

import queue

import pytest
import torch
from transformers import LogitsProcessorList

import hf_ssd
from hf_ssd.cache import passes
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.sessions import DraftError, WorkerSession
from hf_ssd.distributed.target_ranks import TargetRanks
from hf_ssd.rounds import FINISHED

from ..helpers.channels import both
from ..helpers.comparing import GREEDY, as_plain
from ..helpers.loopback import through_the_wire
from ..helpers.preparing import preparing
from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model
from .test_unsound import UNSOUND, spoilt

# ---------------------------------------------------------------- a row that is verified again beside others


class OfThePlainText:
    """Proposes what plain generation says, and in the first row now and then a token that was never learned."""

    def __init__(self, texts):
        self.texts, self.places = texts, []  # where the first row's tokens have that token, round after round

    def propose(self, input_ids, lookahead):
        length = input_ids.shape[1]
        row = next(row for row, text in enumerate(self.texts) if torch.equal(text[:length], input_ids[0, : len(text)]))
        tokens = self.texts[row][length : length + lookahead].clone()
        if row == 0:
            is_unsound = len(self.places) % 2 == 0 and len(tokens) == lookahead
            place = len(self.places) // 2 % lookahead if is_unsound else None
            self.places.append(place)
            tokens[[] if place is None else [place]] = UNSOUND
        return tokens, None


@pytest.mark.parametrize("options", [{}, {"prefix_allowed_tokens_fn": lambda *_: range(2, 97)}], ids=["", "by step"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_sound_row_beside_one_that_is_verified_again_keeps_its_accepted_tokens(monkeypatch, compiled, options):
    """A compiled pass feeds at least two tokens to each row."""
    inputs, target = padded_batch(2), hf_ssd.enable(spoilt(tiny_model()))
    plain = target.generate(**inputs, **GREEDY, output_logits=True, **options)
    texts = [row[mask.argmax() :] for row, mask in zip(plain.sequences, inputs["attention_mask"])]
    if compiled:
        monkeypatch.setattr(passes, "is_compiled", lambda model: model is target)
        monkeypatch.setattr(passes, "call_compiled", lambda model, view, noticed, inputs: view(**inputs))
    fallback = OfThePlainText(texts)
    with preparing():
        draft, of_config = spoilt(tiny_draft(disagreement=1.0)), {"budget": 1, "fallback": fallback}
        output, plain = as_plain(target, draft, inputs, of_config, output_logits=True, **options)
    rounds = list(zip(output.ssd_stats.column("accepted"), fallback.places, strict=True))
    again = [(accepted, place) for accepted, place in rounds if place is not None and accepted[1] != FINISHED]
    # The first row accepts all of its tokens before that token, wherever it is.
    assert {0, 1, 2} <= {place for _, place in again}
    assert all(accepted[0] == place and accepted[1] > 1 for accepted, place in again)
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(plain.logits), atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- ranks that stay in step


class RanksInThreads(TargetRanks):
    """One of two ranks of a target, each in a thread of this process."""

    def __init__(self, is_leader, line):
        super().__init__()
        self.group, self.size, self.is_leader, self.channel = "two ranks", 2, is_leader, self
        self.line = line

    def send(self, message):
        self.line.put(through_the_wire(message))

    def receive(self, timeout):
        return self.line.get(timeout=20)


@pytest.mark.parametrize("processor", [None, lambda ids, scores: scores + 0], ids=["", "own processor"])
@pytest.mark.parametrize("is_unsound", [False, True])
@pytest.mark.parametrize("on_draft_failure", ["continue", "raise"])
def test_ranks_stay_in_step_where_the_worker_dies_between_its_tokens_and_what_they_were_drawn_from(
    monkeypatch, processor, is_unsound, on_draft_failure
):
    proposed, receive = [], WorkerSession.receive_speculation

    def receives(session, timeout=None):
        proposed.append(receive(session, timeout))
        return proposed[-1]

    def dies(session):
        if len(proposed) > 2 and (not is_unsound or any(UNSOUND in row for row in proposed[-1].tokens)):
            raise DraftError("The draft worker has ended.")
        return probabilities(session)

    probabilities = WorkerSession.receive_probabilities
    monkeypatch.setattr(WorkerSession, "receive_speculation", receives)
    monkeypatch.setattr(WorkerSession, "receive_probabilities", dies)
    line, passes = queue.Queue(), ([], [])
    draft = spoilt(tiny_draft(disagreement=0.0), value=0.1, is_drafted=is_unsound)
    processors = LogitsProcessorList([] if processor is None else [processor])

    def one_rank(rank, assistant):
        target = hf_ssd.enable(spoilt(tiny_model()))
        target.register_forward_hook(lambda *_: passes[rank].append(1))
        return target.generate(
            **padded_batch(2), max_new_tokens=30, do_sample=True, temperature=0.05, assistant_model=assistant,
            ssd_config=hf_ssd.SSDConfig(lookahead=3, budget=4, on_draft_failure=on_draft_failure),
            return_dict_in_generate=True, logits_processor=processors,
        )  # fmt: skip

    torch.manual_seed(4)
    with DraftAssistant([ThreadWorker(draft)]) as leaders, DraftAssistant([], wait=False) as other:
        leaders.ranks, other.ranks = RanksInThreads(True, line), RanksInThreads(False, line)
        other.info = leaders.info
        outputs = both(lambda: one_rank(0, leaders), lambda: one_rank(1, other))
    assert len(passes[0]) == len(passes[1])  # a pass of a divided model waits for all ranks
    if on_draft_failure == "raise":
        assert all(isinstance(failure, DraftError) and "has ended" in str(failure) for failure in outputs)
        return
    assert len(proposed) < outputs[0].ssd_stats.rounds
    assert torch.equal(outputs[0].sequences, outputs[1].sequences) and outputs[0].sequences.shape == (2, 39)
    assert outputs[0].ssd_stats.column("accepted") == outputs[1].ssd_stats.column("accepted")
    assert "has ended" in outputs[0].ssd_stats.draft_failure
