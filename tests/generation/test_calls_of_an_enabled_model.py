"""A model that was bound to its draft, in the programs that call its `generate()`: trainers, judges, options."""

import pytest
import torch
from transformers import (
    LogitsProcessor,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StoppingCriteria,
)

import hf_ssd
from hf_ssd.distributed import launch

from ..helpers.tiny import padded_batch, ready, tiny_draft, tiny_model

IN_TURN = hf_ssd.SSDConfig(lookahead=3, budget=8, asynchronous=False)


@pytest.fixture
def bound(draft):
    return hf_ssd.enable(tiny_model(), assistant_model=draft, ssd_config=IN_TURN)


def test_labels_of_a_batch_are_dropped_as_in_plain_generation(bound, draft):
    batch = padded_batch(2) | {"labels": padded_batch(2)["input_ids"]}
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    plain = bound.generate(**batch, **options, ssd_config=None)
    calls = [
        bound.generate(**batch, **options),
        hf_ssd.generate(tiny_model(), **batch, **options, assistant_model=draft, ssd_config=IN_TURN),
    ]
    for output in calls:
        assert torch.equal(output.sequences, plain.sequences) and output.ssd_stats.tokens_per_round > 1.1


def test_a_trainer_that_predicts_with_generate_speculates(bound, tmp_path, monkeypatch):
    rows = [{name: one[row] for name, one in padded_batch(4).items()} for row in range(4)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, per_device_eval_batch_size=2, report_to=[], use_cpu=True
    )
    outputs, original = [], type(bound).generate
    monkeypatch.setattr(
        type(bound), "generate", lambda self, *a, **k: outputs.append(original(self, *a, **k)) or outputs[-1].sequences
    )
    trainer = Seq2SeqTrainer(bound, arguments)
    options = {"max_new_tokens": 12, "do_sample": False}
    found = trainer.predict(rows, **options, return_dict_in_generate=True).predictions
    plain = trainer.predict(rows, **options, return_dict_in_generate=True, ssd_config=None).predictions
    assert (found == plain).all() and len(outputs) == 4
    assert all(output.ssd_stats.tokens_per_round > 1.1 for output in outputs[:2])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_beams": 2}, "and the like, or pass `ssd_config=None` in this call"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions; pass `ssd_config=None`"),
        ({"cache_implementation": "static"}, "remove the static cache; pass `ssd_config=None` in this call"),
        ({"prompt_lookup_num_tokens": 2}, "without an `assistant_model`; pass `ssd_config=None` in this call"),
    ],
)
def test_a_message_of_a_bound_call_names_what_its_user_can_do(bound, options, words):
    with pytest.raises(ValueError, match=words):
        bound.generate(**padded_batch(1), max_new_tokens=4, **options)
    bound.generate(**padded_batch(1), max_new_tokens=4, **options, ssd_config=None)


class Asks:
    """Lets the target generate a few tokens within a call, and changes nothing."""

    def __init__(self, target):
        self.target, self.answers = target, []

    def ask(self, input_ids):
        if input_ids.shape[1] % 8 == 0:
            self.answers.append(self.target.generate(input_ids[:, -4:], max_new_tokens=6, do_sample=False))


class Judges(Asks, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.ask(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Processes(Asks, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.ask(input_ids)
        return scores


@pytest.mark.parametrize("kind, given_as", [(Judges, "model"), (Processes, "folder")])
def test_a_call_within_a_call_of_a_bound_target(kind, given_as, tmp_path):
    draft = tiny_draft(disagreement=0.01)
    if given_as == "folder":
        draft.save_pretrained(tmp_path)
        draft = tmp_path
    target = hf_ssd.enable(tiny_model(), draft, hf_ssd.SSDConfig(lookahead=3, budget=8))
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    name = "stopping_criteria" if kind is Judges else "logits_processor"
    inputs, plain, hits = padded_batch(2), None, []
    try:
        for call in range(7):
            asks = kind(target)
            output = target.generate(**inputs, **options, **{name: [asks]})
            if plain is None:
                of_plain = kind(tiny_model())
                plain = of_plain.target.generate(**inputs, **options, **{name: [of_plain]})
            assert torch.equal(output.sequences, plain.sequences) and output.ssd_stats.draft_failure is None
            assert len(asks.answers) == len(of_plain.answers) > 2
            assert all(torch.equal(*pair) for pair in zip(asks.answers, of_plain.answers))
            hits.append(output.ssd_stats.hit_rate)
            if call == 2:
                assistants = launch._assistants_of_paths if given_as == "folder" else launch._assistants
                ready(assistants[str(draft) if given_as == "folder" else draft])
        assert min(hits[3:]) > 0.1
    finally:
        hf_ssd.close(draft)
