"""
An answer with a tool call that was cut, or that cannot be read, is its raw text, whole and streamed. So is one that is
cut within a character.
"""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as KNOWN

import hf_ssd

from ..helpers.servers import Said, ServerThread, said, target_folder
from ..helpers.suites import slowly
from ..helpers.tiny import tiny_model

QWEN = next(template for types, template in KNOWN.items() if "qwen2" in types)
CHAT = (
    "{% if tools %}{{ tools }}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PROMPT = "import os"


def caller_folder(tmp_path_factory) -> str:
    """Returns a folder of the embedded target with the templates of a model that calls tools as Qwen's models do."""
    return target_folder(tmp_path_factory, chat_template=CHAT, response_template=QWEN)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Its tokens are forced, so its model has the tokenizer of the embedded target and a single layer."""
    folder, sizes = caller_folder(tmp_path_factory), {"vocab_size": 2048, "max_position_embeddings": 2048}
    tiny_model(**sizes, num_hidden_layers=1, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    with ServerThread(folder, None, hf_ssd.SSDConfig(drafter="ngram")) as server:
        yield server


class Forced(LogitsProcessor):
    """Lets nothing but these tokens follow a prompt of this length, and then the last one again, or any."""

    def __init__(self, tokens: list[int], length: int, goes_on: bool = False):
        self.tokens, self.length, self.goes_on = tokens, length, goes_on

    def __call__(self, input_ids, scores):
        place, last = input_ids.shape[1] - self.length, len(self.tokens) - 1
        if self.goes_on and place > last:
            return scores
        only = torch.full_like(scores, -torch.inf)
        only[:, self.tokens[min(place, last)]] = 0
        return only


@pytest.fixture
def says(server, monkeypatch):
    """Lets the model write a text, and returns its tokens."""

    def says(text: str) -> list[int]:
        tokens = server.processor(text, add_special_tokens=False)["input_ids"]

        real = type(server.loaded_model).generate

        def generate(inputs, logits_processor, **options):
            forced = Forced([*tokens, server.processor.eos_token_id], inputs.shape[1])
            processors = LogitsProcessorList([*logits_processor, forced])
            return real(server.loaded_model, inputs, **options, logits_processor=processors)

        monkeypatch.setattr(server.loaded_model, "generate", generate)
        return tokens

    return says


def answers(server, ask: str, tokens: int, **options) -> list[Said]:
    return [choice for (choice,) in server.whole_and_streamed(ask, PROMPT, tokens, **options)]


@pytest.mark.slow
def test_an_answer_that_ends_within_a_tool_call_is_its_text(server, says):
    tokens = says(f"Sure.\n{CALL}")
    first = next(i for i in range(len(tokens)) if "<tool_call>" in server.processor.decode(tokens[:i]))
    for count in range(first, len(tokens) - 1, 3):
        text = server.processor.decode(tokens[:count])
        assert answers(server, "chat", count, tools=TOOLS) == [Said(text, "length")] * 2
        body = {"input": PROMPT, "max_output_tokens": count, "temperature": 0}
        response = server.client.responses.create(model=server.model, **body)
        events = list(server.client.responses.create(model=server.model, **body, stream=True))
        assert response.output_text == events[-1].response.output_text == text
        assert not events[-1].response.error


SAID = f"Sure.\n{CALL}"
INSIDE = ('{"name": f}', "", "5", "[]", '{"name": "f"}', '{"name": 5, "arguments": {}}')  # what cannot be read
UNREADABLE = [f"Sure.\n<tool_call>\n{inside}\n</tool_call>\nDone." for inside in INSIDE]
STOPS = ("<tool_call>", "tool_c", '"arguments"', '{"a')
ANSWERS = [  # what the model writes, stop strings, and what the client gets
    (SAID, [], Said("Sure.", "tool_calls", calls=("f",))),
    # What comes before a call that cannot be read stays as it is.
    (
        f"<think>So.</think>{SAID}\n<tool_call>\n{{",
        [],
        Said("Sure.\n<tool_call>\n{", "tool_calls", reasoning="So.", calls=("f",)),
    ),
    *((text, [], Said(text, "stop")) for text in UNREADABLE),
    *((SAID, [stop], Said(SAID[: SAID.index(stop)], "stop")) for stop in STOPS),
    ("<think>So it is.</think>Sure.", [" is."], Said("", "stop", reasoning="So it")),
    ("<think>So it is.</think>Sure.", [".S"], Said("Sure.", "stop", reasoning="So it is.")),  # not of two fields
]


@pytest.mark.parametrize("text, stop, answer", ANSWERS)
def test_an_answer_has_its_reasoning_its_calls_that_can_be_read_and_text(server, says, text, stop, answer):
    says(text)
    whole, streamed = (server.chunks("chat", PROMPT, 200, how, tools=TOOLS, stop=stop) for how in (False, True))
    assert said(whole) == said(streamed) == [answer]
    deltas = [chunk.choices[0].delta for chunk in streamed]
    order = [bool(delta.content) for delta in deltas if delta.content or getattr(delta, "reasoning_content", None)]
    assert order == sorted(order), "reasoning that was held back comes after content"


CHARACTERS = (
    "a👩‍💻 e\u0301日本\ufffd🎉é fin 🇩🇪👍🏽."  # joined emoji, combined letters, and the sign of what is no character
)


KINDS = ["complete", slowly("chat")]


@pytest.mark.slow
@pytest.mark.parametrize("ask", KINDS)
def test_a_text_that_ends_within_a_character_is_the_same_whole_and_streamed(server, says, ask):
    tokens = says(CHARACTERS)
    assert len(tokens) > len(CHARACTERS) + 10, "characters are several tokens"
    for count in range(1, len(tokens) + 1, 2):
        text = server.processor.decode(tokens[:count])
        whole, streamed = answers(server, ask, count)
        assert streamed == Said(text, "length") and whole.text.strip() == text.strip()


@pytest.mark.slow
@pytest.mark.parametrize("ask", KINDS)
def test_a_stop_string_of_any_characters_cuts_the_text_before_it(server, says, ask):
    """Also one that is a part of what is shown as a single character, and one that ends within a token."""
    tokens = says(CHARACTERS)
    for length, step in ((1, 2), (2, 3), (3, 5)):
        for start in range(0, len(CHARACTERS) - length + 1, step):
            stop = CHARACTERS[start : start + length]
            text = CHARACTERS[: CHARACTERS.index(stop)]
            whole, streamed = answers(server, ask, len(tokens) + 1, stop=stop)
            assert streamed == Said(text, "stop") and whole.text.strip() == text.strip(), stop
    for count in range(1, len(tokens), 3):  # the limit comes before the stop string, within it, or after it
        text = server.processor.decode(tokens[:count])
        whole, streamed = answers(server, ask, count, stop=["日本", "\u0301"])
        found = [text.index(stop) for stop in ("日本", "\u0301") if stop in text]
        assert streamed == (Said(text[: min(found)], "stop") if found else Said(text, "length"))
        assert (whole.text.strip(), whole.reason) == (streamed.text.strip(), streamed.reason)
