"""Log-probabilities, several choices and the prompt in an answer, in OpenAI's form."""

import json

import pytest
import torch

from hf_ssd.serving import calls, limits, logprobs

from ..helpers.servers import COMPLETIONS, PROMPT, Said, said
from ..helpers.suites import slowly

COUNT = 40
SPECIAL = ("<pad>", "<s>")  # are not shown


@pytest.fixture
def speculates(server):
    """Checks that the calls of a test speculate."""
    before = server.figures()
    yield
    gained = server.gained(before)
    assert gained["rounds_total"] < 0.8 * gained["tokens_total"] and gained["hits_total"] > 0


def answer(server, ask: str, is_streamed: bool, prompt=PROMPT, **options) -> list[Said]:
    return said(server.chunks(ask, prompt, COUNT, is_streamed, **options))


def plain(server, count: int, tokens: list[int] | None = None) -> tuple[list[int], torch.Tensor]:
    """Returns the tokens of plain greedy generation, or those given, and the log-probabilities of all tokens."""
    prompt = server.processor(PROMPT, return_tensors="pt")["input_ids"]
    options = {"do_sample": False, "max_new_tokens": count, "output_logits": True, "return_dict_in_generate": True}
    if tokens is not None:  # each after those before it
        forced = [*prompt[0].tolist(), *tokens]
        options["prefix_allowed_tokens_fn"] = lambda _, before: [forced[len(before)]]
    output = server.loaded_model.generate(prompt, ssd_config=None, **options)
    scores = torch.stack(output.logits)[:, 0].float().log_softmax(-1)
    return output.sequences[0, prompt.shape[1] :].tolist(), scores


def check_chat(entries, tokens, scores, count, names) -> None:
    assert [entry.token for entry in entries] == [names.name(token) for token in tokens]
    values = torch.tensor([entry.logprob for entry in entries])
    torch.testing.assert_close(values, scores[range(len(tokens)), tokens], atol=1e-4, rtol=0)
    best = scores.topk(count)
    for entry, ids, likely in zip(entries, best.indices.tolist(), best.values):
        assert [one.token for one in entry.top_logprobs] == [names.name(token) for token in ids]
        found = torch.tensor([one.logprob for one in entry.top_logprobs])
        torch.testing.assert_close(found, likely, atol=1e-4, rtol=0)


def assert_alike(first: list[Said], second: list[Said]) -> None:
    """Checks that choices have the same texts and tokens, and log-probabilities that differ by rounding alone."""
    assert [one[:2] for one in first] == [one[:2] for one in second]
    tokens, values = [], []
    for entries in (one.logprobs for one in [*first, *second]):
        of_chat = isinstance(entries, list)
        tokens.append([entry.token for entry in entries] if of_chat else entries["tokens"])
        values.append([entry.logprob for entry in entries] if of_chat else entries["token_logprobs"])
    assert tokens[: len(first)] == tokens[len(first) :]
    torch.testing.assert_close(*map(torch.tensor, (values[: len(first)], values[len(first) :])), atol=1e-4, rtol=0)


@pytest.fixture
def names(server):
    return logprobs.Names(server.processor, server.loaded_model.config.vocab_size)


@pytest.mark.slow
def test_logprobs_of_a_chat_are_those_of_plain_generate(server, names, speculates):
    tokens, scores = plain(server, COUNT)
    for count in (0, 1, 20):
        whole, streamed = server.whole_and_streamed("chat", PROMPT, COUNT, logprobs=True, top_logprobs=count)
        check_chat(whole[0].logprobs, tokens, scores, count, names)
        assert streamed == whole and whole[0].reason == "length"


def test_logprobs_at_other_positions_are_noticed(server, names, monkeypatch):
    """The mutant for the test above: each token has the logits of its neighbour in the round."""
    entries = calls.Row.add_logits
    monkeypatch.setattr(calls.Row, "add_logits", lambda row, ids, logits: entries(row, ids, logits.roll(1, 0)))
    with pytest.raises(AssertionError):
        test_logprobs_of_a_chat_are_those_of_plain_generate(server, names, None)


@pytest.mark.parametrize("likely", [0, 5])
def test_logprobs_of_a_completion_are_those_of_plain_generate(server, names, speculates, likely):
    tokens, scores = plain(server, COUNT)
    whole, streamed = server.whole_and_streamed("complete", PROMPT, COUNT, logprobs=likely)
    assert streamed == whole
    text, found = whole[0].text, whole[0].logprobs
    assert found["tokens"] == [names.name(token) for token in tokens]
    chosen = scores[range(COUNT), tokens]
    torch.testing.assert_close(torch.tensor(found["token_logprobs"]), chosen, atol=1e-4, rtol=0)
    for top, one, token in zip(found["top_logprobs"], scores, tokens):
        expected = [*one.topk(likely).indices.tolist(), token]
        assert list(top) == [names.name(token) for token in dict.fromkeys(expected)]
    pairs = [pair for pair in zip(found["text_offset"], found["tokens"]) if pair[1] not in SPECIAL]
    assert " ".join(token for _, token in pairs) == text and len(pairs) < COUNT
    assert all(text[start:].lstrip().startswith(token) for start, token in pairs)


IN_CHATS = slowly("chat", {"logprobs": True})


@pytest.mark.slow
@pytest.mark.parametrize("ask, likely", [("complete", {"logprobs": 2}), IN_CHATS])
def test_a_stop_string_cuts_the_logprobs_with_the_text(server, speculates, ask, likely):
    text, _, all_of_them, *_ = answer(server, ask, False, **likely)[0]
    offsets = answer(server, "complete", False, logprobs=0)[0].logprobs["text_offset"]
    for start, length in [(0, 1), (1, 2), (16, 4), (29, 9), (len(text) - 5, 5)]:
        stop = text[start : start + length]
        whole, streamed = server.whole_and_streamed(ask, PROMPT, COUNT, stop=stop, **likely)
        found, reason, entries, *_ = whole[0]
        assert found == text[: text.index(stop)] and reason == "stop"
        assert streamed == (whole if found else [Said("", "stop")])
        count = sum(offset < len(found) for offset in offsets)  # tokens of which something is shown
        if ask == "complete":
            assert entries == {name: values[:count] for name, values in all_of_them.items()}
        else:
            assert entries == all_of_them[:count]


@pytest.mark.parametrize("settings", [{}, {"frequency_penalty": 1, "logit_bias": {"5": 3}}], ids=["", "penalties"])
def test_logprobs_of_sampled_tokens_are_those_before_temperature_penalties_and_bias(
    server, names, speculates, settings
):
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "logprobs": True, "top_logprobs": 3, **settings}
    whole, streamed = server.whole_and_streamed("chat", PROMPT, COUNT, **options)
    assert whole == streamed
    ids = {names.name(token): token for token in names.spelled}
    tokens = [ids[entry.token] for entry in whole[0].logprobs]
    assert tokens != plain(server, COUNT)[0]
    check_chat(whole[0].logprobs, *plain(server, COUNT, tokens), 3, names)


@pytest.mark.slow
@pytest.mark.parametrize("ask, likely", [("complete", {"logprobs": 2}), IN_CHATS])
def test_greedy_choices_are_the_same_and_sampled_ones_differ_and_repeat(server, speculates, ask, likely):
    whole, streamed = server.whole_and_streamed(ask, PROMPT, COUNT, n=3, **likely)
    assert whole == streamed == answer(server, ask, False, **likely) * 3
    sampled = {"temperature": 1.2, "seed": 5, "n": 4, **likely}
    first, again, streamed = (answer(server, ask, is_streamed, **sampled) for is_streamed in (False, False, True))
    assert_alike(first, again)  # rows that join at other times are read in passes of other sizes
    assert_alike(first, streamed)
    assert len({one.text for one in first}) == 4


def test_usage_counts_the_tokens_of_all_choices_and_each_prompt_once(server):
    prompts = [PROMPT, "abc"]
    one = [server.complete(prompt, 6).usage for prompt in prompts]
    for options in ({}, {"temperature": 1.0}):
        answer = server.complete(prompts, 6, n=3, **options)
        chunks = list(server.complete(prompts, 6, n=3, stream=True, **options))
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
        (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
        assert usage == answer.usage == chunks[-1].usage
        assert usage.prompt_tokens == sum(one.prompt_tokens for one in one) and usage.completion_tokens == 36
        assert usage.total_tokens == usage.prompt_tokens + 36


@pytest.mark.slow
def test_sampled_choices_stream_beside_each_other_and_end_at_their_own_stop_strings(server):
    options = {"temperature": 1.2, "seed": 3, "n": 4}
    texts = [one.text for one in answer(server, "complete", False, **options)]
    stop = texts[2][6:9]
    assert sum(stop in text for text in texts) < 4, "some choices go on"
    expected = [(text.split(stop)[0], "stop" if stop in text else "length") for text in texts]
    whole, streamed = server.whole_and_streamed("complete", PROMPT, COUNT, stop=stop, **options)
    assert whole == streamed and [one[:2] for one in whole] == expected
    order = [chunk.choices[0].index for chunk in server.complete(PROMPT, COUNT, stream=True, **options)]
    assert set(order) == {0, 1, 2, 3} and order != sorted(order)


def test_choices_that_do_not_fit_into_memory_are_refused(server, monkeypatch):
    monkeypatch.setattr(limits, "free_memory", lambda device: 100_000)
    sentence = server.refusal(COMPLETIONS, n=8, temperature=1.0, max_tokens=1000)
    assert "8 choices of 1004 tokens need" in sentence and "`n`" in sentence
    assert server.complete(PROMPT, 3, temperature=1.0, seed=1).usage.completion_tokens == 3


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_the_prompt_stands_before_the_text(server, names, speculates, is_streamed, monkeypatch):
    monkeypatch.setattr(logprobs, "PIECE", 3)
    text, _, alone, *_ = answer(server, "complete", False, logprobs=2)[0]
    ids = server.processor(PROMPT)["input_ids"]
    for prompt, before in [(PROMPT, PROMPT), (ids, server.processor.decode(ids))]:
        options = {"prompt": prompt, "echo": True, "stop": text[12:15]}
        assert answer(server, "complete", is_streamed, **options) == [Said(before + text[:12], "stop")]
        options = {"prompt": prompt, "echo": True, "logprobs": 2, "n": 2}
        first, second = answer(server, "complete", is_streamed, **options)
        found = first.logprobs
        assert first == second and first.text == before + text
        assert found["tokens"] == [*map(names.name, ids), *alone["tokens"]]
        assert found["text_offset"][len(ids) :] == [len(before) + offset for offset in alone["text_offset"]]
        with torch.no_grad():
            scores = server.loaded_model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = scores[range(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(torch.tensor(found["token_logprobs"][1 : len(ids)]), expected, atol=1e-4, rtol=0)
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][len(ids) :] == alone["token_logprobs"]
        assert all(len(top) in (2, 3) for top in found["top_logprobs"][1:])


def test_several_choices_are_refused_once(server):
    before = server.figures()
    settings = json.dumps({"max_new_tokens": 2, "suppress_tokens": [97]})
    assert "names token 97" in server.refusal(COMPLETIONS, n=4, generation_config=settings)
    assert server.gained(before)["refused"] == 2, "whole and streamed"
