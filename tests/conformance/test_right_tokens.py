"""Plain generation's tokens, and a draft that knows them, in calls that the other tests do not make."""

import queue
import threading
import warnings

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TextStreamer

import hf_ssd
from hf_ssd.cache import passes
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.sessions import DraftError, WorkerSession
from hf_ssd.distributed.target_ranks import TargetRanks
from hf_ssd.rounds import FINISHED

from ..helpers.last_token import LastToken
from ..helpers.loopback import through_the_wire
from ..helpers.preparing import preparing
from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import VOCAB, padded_batch, tiny_draft, tiny_model
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
    options = {**inputs, "max_new_tokens": 30, "do_sample": False, "output_logits": True, **options}
    plain = target.generate(**options, return_dict_in_generate=True)
    texts = [row[mask.argmax() :] for row, mask in zip(plain.sequences, inputs["attention_mask"])]
    if compiled:
        monkeypatch.setattr(passes, "is_compiled", lambda model: model is target)
        monkeypatch.setattr(passes, "call_compiled", lambda model, view, noticed, inputs: view(**inputs))
    fallback = OfThePlainText(texts)
    with preparing():
        output = target.generate(
            **options, return_dict_in_generate=True, assistant_model=spoilt(tiny_draft(disagreement=1.0)),
            ssd_config=hf_ssd.SSDConfig(lookahead=4, budget=1, fallback=fallback, asynchronous=False),
        )  # fmt: skip
    assert torch.equal(output.sequences, plain.sequences)
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
    line, passes, outputs, failures = queue.Queue(), ([], []), {}, []
    draft = spoilt(tiny_draft(disagreement=0.0), value=0.1, is_drafted=is_unsound)

    processors = LogitsProcessorList([] if processor is None else [processor])

    def one_rank(rank, assistant):
        target = hf_ssd.enable(spoilt(tiny_model()))
        target.register_forward_hook(lambda *_: passes[rank].append(1))
        try:
            outputs[rank] = target.generate(
                **padded_batch(2), max_new_tokens=30, do_sample=True, temperature=0.05, assistant_model=assistant,
                ssd_config=hf_ssd.SSDConfig(lookahead=3, budget=4, on_draft_failure=on_draft_failure),
                return_dict_in_generate=True, logits_processor=processors,
            )  # fmt: skip
        except Exception as error:
            failures.append(error)

    torch.manual_seed(4)
    with DraftAssistant([ThreadWorker(draft)]) as leaders, DraftAssistant([], wait=False) as other:
        leaders.ranks, other.ranks = RanksInThreads(True, line), RanksInThreads(False, line)
        other.info = leaders.info
        threads = [threading.Thread(target=one_rank, args=pair) for pair in enumerate((leaders, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(passes[0]) == len(passes[1])  # a pass of a divided model waits for all ranks
    if on_draft_failure == "raise":
        assert len(failures) == 2 and all("has ended" in str(failure) for failure in failures)
        return
    assert not failures and len(proposed) < outputs[0].ssd_stats.rounds
    assert torch.equal(outputs[0].sequences, outputs[1].sequences) and outputs[0].sequences.shape == (2, 39)
    assert outputs[0].ssd_stats.column("accepted") == outputs[1].ssd_stats.column("accepted")
    assert "has ended" in outputs[0].ssd_stats.draft_failure


# ---------------------------------------------------------------- whatever a callback returns that plain takes


class InPlace(TextStreamer):
    """A streamer that works on what it is given."""

    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.flatten().tolist())
        if value.dim() == 1:
            value.fill_(3)

    def end(self):
        pass


RETURNED = {
    "double": lambda ids, scores: scores.double() + 1e-9 * torch.arange(VOCAB),
    "half": lambda ids, scores: scores.half(),
    "bfloat16": lambda ids, scores: scores.bfloat16(),
    "in turns": lambda ids, scores: scores.double() if ids.shape[1] % 2 else scores.half(),
    "integers": lambda ids, scores: (1000 * scores).long(),
    "with a gradient": torch.enable_grad()(lambda ids, scores: scores * torch.ones(1, requires_grad=True)),
}
CALLBACKS = {
    **{name: lambda of=of: {"logits_processor": LogitsProcessorList([of])} for name, of in RETURNED.items()},
    "a list": lambda: {"logits_processor": [RETURNED["double"]]},
    "then a warper": lambda: {"logits_processor": [RETURNED["double"]], "renormalize_logits": True},
    "a tuple": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: (3, 4, 7, 23, 41)},
    "a range": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: range(3, 60)},
    "an array": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: np.arange(3, 60)},
    "a tensor": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: torch.arange(3, 60)},
    "stops by a bool": lambda: {"stopping_criteria": [lambda ids, scores: ids.shape[1] >= 17]},
    "stops by a number": lambda: {"stopping_criteria": [lambda ids, scores: (ids[:, -1] == 41).long()]},
    "stops by one of all": lambda: {"stopping_criteria": [lambda ids, scores: torch.tensor([ids.shape[1] >= 17])]},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("callback", CALLBACKS)
def test_callbacks_may_return_what_plain_generation_takes(target, draft, callback, rows):
    options = {**padded_batch(rows), "max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_scores": True, "pad_token_id": 0}
    plain = target.generate(**options, **CALLBACKS[callback]())
    output = target.generate(
        **options, **CALLBACKS[callback](), assistant_model=draft,
        ssd_config=hf_ssd.SSDConfig(lookahead=3, asynchronous=False),
    )  # fmt: skip
    assert torch.equal(output.sequences, plain.sequences) and output.ssd_stats.draft_failure is None
    assert [scores.dtype for scores in output.scores] == [scores.dtype for scores in plain.scores]
    assert any(max(record.accepted) > 0 for record in output.ssd_stats.records)


@pytest.mark.parametrize("returned", ["double", "half", "bfloat16", "with a gradient"])
def test_sampled_tokens_are_possible_whatever_type_a_processor_returns(target, draft, returned):
    only = torch.full((VOCAB,), -torch.inf).index_fill(0, torch.tensor([7, 23, 41]), 0.0)
    processors = [RETURNED[returned], lambda ids, scores: scores + only.to(scores.dtype)]
    output = target.generate(
        **padded_batch(2), max_new_tokens=20, do_sample=True, logits_processor=processors, assistant_model=draft,
        ssd_config=hf_ssd.SSDConfig(lookahead=3, asynchronous=False),
    )  # fmt: skip
    assert {7, 23, 41}.issuperset(output[:, 9:].flatten().tolist())


def test_a_streamer_may_change_what_it_is_given(target, draft):
    seen = []
    for options in ({}, {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig(lookahead=3, asynchronous=False)}):
        streamer = InPlace()
        tokens = target.generate(
            **padded_batch(1), max_new_tokens=20, do_sample=False, streamer=streamer, **options
        ).tolist()
        seen.append((tokens, streamer.seen))
    assert seen[0] == seen[1]


# ---------------------------------------------------------------- before work, and what is none of the user's concern


def test_a_batch_without_rows_is_refused_in_one_sentence(target, draft):
    ids = torch.zeros(0, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^`input_ids` has no rows; give at least one prompt\.$"):
        target.generate(input_ids=ids, attention_mask=ids, assistant_model=draft, ssd_config=hf_ssd.SSDConfig(3))


@pytest.mark.parametrize("option", [{"encoder_repetition_penalty": 1.3}, {"encoder_no_repeat_ngram_size": 2}], ids=str)
def test_nothing_is_said_of_processors_that_the_target_applies(target, draft, option):
    options = {**padded_batch(2), "max_new_tokens": 12, "do_sample": False, **option}
    plain = target.generate(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = hf_ssd.SSDConfig(lookahead=3, asynchronous=False)
        output = target.generate(**options, assistant_model=draft, ssd_config=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain) and output.ssd_stats.draft_failure is None


# ---------------------------------------------------------------- a seed


@pytest.mark.parametrize("fallback", ["ngram", "random", LastToken()], ids=["ngram", "random", "an object"])
def test_a_seed_repeats_a_call_with_fixed_settings_whatever_the_fallback(target, assistant, fallback):
    texts, sources, settings = [], set(), {"lookahead": 4, "budget": 6, "fan_out": "confidence"}
    for number in range(3):
        torch.manual_seed(11)
        output = target.generate(
            **padded_batch(2), max_new_tokens=24, do_sample=True, temperature=0.7, return_dict_in_generate=True,
            assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(**settings, fallback=fallback),
        )  # fmt: skip
        assert output.ssd_stats.draft_failure is None
        sources.update(*output.ssd_stats.column("sources"))
        texts.append(output.sequences.tolist())
        if number % 2:  # another call between, from which the cache shape could learn
            target.generate(
                **padded_batch(2, seed=number), max_new_tokens=20, do_sample=True, temperature=0.7,
                assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(**settings),
            )  # fmt: skip
    assert all(text == texts[0] for text in texts) and sources & {"ngram", "random", "custom"}
