"""A draft with another tokenizer, bound by `enable`, speculates in pipelines and servers, which know nothing of it."""

import pytest
from transformers import pipeline

import hf_ssd

from ..helpers import vocabularies
from ..helpers.servers import LONG, ServerThread
from ..helpers.tiny import tiny_model

PLAN = hf_ssd.SSDConfig(lookahead=3, budget=4)
PROMPT, COUNT = "abcdefgh", 40
DRAFT = [*reversed(vocabularies.TARGET)]  # the same tokens under other ids


@pytest.fixture(scope="module")
def other_draft():
    with hf_ssd.launch_draft(
        vocabularies.renamed_draft(DRAFT, max_position_embeddings=LONG), num_threads=1
    ) as assistant:
        yield assistant


def test_a_pipeline_speculates_with_a_draft_of_another_tokenizer(other_draft):
    model, tokenizer = tiny_model(), vocabularies.tokenizer(vocabularies.TARGET)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options, records = {"max_new_tokens": COUNT, "do_sample": False, "return_full_text": False}, []
    expected = generator(PROMPT, **options)
    tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": vocabularies.tokenizer(DRAFT)}
    hf_ssd.enable(model, other_draft, PLAN, **tokenizers)
    streamer = hf_ssd.RoundStreamer(lambda stats: records.extend(stats.records[-1:]))
    assert generator(PROMPT, streamer=streamer, **options) == expected
    assert 0 < len(records) < 0.7 * COUNT
    assert sum(record.accepted[0] for record in records) > 10 and sum(record.hits[0] for record in records) > 5


def test_a_server_speculates_with_a_draft_of_another_tokenizer(other_draft, tiny_folder):
    names = {"tokenizer": vocabularies.TARGET, "assistant_tokenizer": DRAFT}
    tokenizers = {name: vocabularies.tokenizer(tokens) for name, tokens in names.items()}
    server = ServerThread(tiny_folder, other_draft, PLAN, tokenizers)
    try:
        answers = [server.complete(PROMPT, COUNT), *server.complete(PROMPT, COUNT, stream=True)]
        texts = [answer.choices[0].text for answer in answers]
        figures = server.figures()
        inputs = server.processor(PROMPT, return_tensors="pt", return_token_type_ids=False)
        output = server.loaded_model.generate(**inputs, max_new_tokens=COUNT, do_sample=False, ssd_config=None)
        new = output[0, inputs["input_ids"].shape[1] :]
        expected = server.processor.decode(new, skip_special_tokens=True)
    finally:
        server.stop()
    assert texts[0] == "".join(texts[1:]) == expected
    assert figures["tokens_total"] == 2 * COUNT and 0 < figures["rounds_total"] < 1.4 * COUNT
    assert figures["accepted_total"] > 20 and figures["hits_total"] > 10
