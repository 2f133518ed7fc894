"""Structured output: the JSON of a schema, as plain generate() writes it with the same processor."""

import contextlib
import json
import re
import sys

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

import hf_ssd
from hf_ssd import grammar
from hf_ssd.generation import deciding
from hf_ssd.rounds import NGRAM

from ..helpers import comparing
from ..helpers.comparing import settings
from ..helpers.mutants import instead_of
from ..helpers.preparing import preparing
from ..helpers.sampled_strings import DIGITS, PROMPT, SMALL, chi_square, counts_of, power_of
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model
from ..helpers.vocabularies import characters, printable

pytest.importorskip("llguidance")
STRINGS = {"type": "array", "items": {"type": "string", "minLength": 4, "maxLength": 12}, "minItems": 2, "maxItems": 2}
TOKENIZER = characters()
GREEDY = {**comparing.GREEDY, "max_new_tokens": 70, "output_scores": True, "eos_token_id": TOKENIZER.eos_token_id}


def strings(text: str) -> None:
    """Checks that an answer is JSON of the schema."""
    found = json.loads(text)
    assert len(found) == 2 and all(isinstance(one, str) and 4 <= len(one) <= 12 for one in found)


def of_strings():
    return hf_ssd.Grammar(STRINGS, TOKENIZER)


def check_answers(tokens, check=strings):
    for row in tokens:
        check(TOKENIZER.decode(row, skip_special_tokens=True))


def as_plain(target, draft, inputs, make=of_strings, check=strings, of_config=(), **options):
    """Checks that tokens and scores are those of plain generate() with the same processors, and what is answered."""
    options = {"logits_processor": [make()], **GREEDY, **options}
    output, plain = comparing.as_plain(target, draft, inputs, of_config, **options)
    check_answers(output.sequences[:, inputs["input_ids"].shape[1] :], check)
    kept = (output.sequences[:, -len(output.scores) :] != 0).T
    ours, theirs = torch.stack(output.scores)[kept], torch.stack(plain.scores)[kept]
    assert torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    return output.ssd_stats


def pair_of(family):
    return hf_ssd.enable(tiny_model(family)), tiny_draft(family, disagreement=0.01)


@pytest.fixture(scope="module")
def pair():
    return pair_of("llama")


@pytest.mark.parametrize("family, rows", [("llama", 1), ("llama", 3), ("gemma", 3)])
def test_greedy_json_is_that_of_plain_generate(family, rows):
    pair = pair_of(family)
    in_turn = as_plain(*pair, padded_batch(rows))
    assert {*in_turn.column("mode")} == {"in_turn"} and in_turn.tokens_per_round > 1.3
    with preparing() as hits:
        as_plain(*pair, padded_batch(rows))
    assert sum(hits) > 0


def test_greedy_json_with_a_worker(target, assistant):
    stats = as_plain(target, assistant, padded_batch(3))
    assert {*stats.column("mode")} == {"ahead"} and any(any(hits) for hits in stats.column("hits"))


@instead_of(grammar._Row, "masks")
def not_rolled_back(masks, self, proposed):
    """A matcher keeps the proposed tokens."""
    found = masks(self, proposed)
    self.matcher.try_consume_tokens(proposed)
    return found


def test_a_matcher_that_is_not_rolled_back_is_noticed(monkeypatch):
    not_rolled_back(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        test_greedy_json_is_that_of_plain_generate("llama", 3)


def test_rows_are_decided_at_all_positions_at_once(pair, monkeypatch):
    monkeypatch.setattr(deciding.CallRows, "decide_by_step", None)
    stats = as_plain(*pair, padded_batch(3))
    assert any(len({*accepted}) > 1 for accepted in stats.column("accepted"))  # no row waits for another


@pytest.mark.slow
def test_with_other_processors(pair):
    """One that is called for a position after the other, and the penalties of transformers."""
    assert as_plain(*pair, padded_batch(3), repetition_penalty=1.2).tokens_per_round > 1
    notes = lambda ids, scores: scores + (torch.arange(scores.shape[1]) % 5 == ids.shape[1] % 5)  # noqa: E731
    comparing.as_plain(*pair, padded_batch(3), logits_processor=[of_strings(), notes], **GREEDY)


@pytest.mark.slow
def test_a_grammar_serves_one_call_after_the_other(pair):
    target, draft = pair
    one = hf_ssd.Grammar(json.dumps(STRINGS), TOKENIZER)
    for seed, rows in ((0, 3), (0, 3), (1, 2), (2, 4)):
        as_plain(target, draft, padded_batch(rows, seed=seed), lambda: one)
    # An answer that was cut goes on, and an answer before another question does not.
    inputs, cut = padded_batch(1), {**GREEDY, "max_new_tokens": 7}
    for ssd in ({}, settings(draft)):
        made = [one]
        first = target.generate(**inputs, **cut, **ssd, logits_processor=made).sequences
        rest = target.generate(first, **GREEDY, **ssd, logits_processor=made).sequences
        check_answers(rest[:, 9:])
        asked = torch.cat([rest, padded_batch(1)["input_ids"]], dim=1)
        answer = target.generate(asked, **GREEDY, **ssd, logits_processor=made).sequences
        check_answers(answer[:, asked.shape[1] :])


def test_beams_of_plain_generate(pair):
    beams = pair[0].generate(**padded_batch(2), **GREEDY, num_beams=3, logits_processor=[of_strings()])
    check_answers(beams.sequences[:, 9:])


def test_a_text_that_another_processor_led_astray_ends(pair):
    wrong = TOKENIZER.convert_tokens_to_ids("x")
    scores = of_strings()
    prompt = torch.tensor([[5, 6]])
    scores(prompt, torch.zeros(1, 97))
    for length in (1, 2):
        ids = torch.cat([prompt, torch.full((1, length), wrong)], dim=1)
        assert scores(ids, torch.zeros(1, 97)).isfinite().nonzero().tolist() == [[0, TOKENIZER.eos_token_id]]


@pytest.mark.parametrize("of_tokenizer", range(29, 34))
def test_tokenizers_and_models_of_any_size(of_tokenizer):
    """Tokens beyond the tokenizer are not allowed."""
    tokenizer = characters('"' + "".join(map(chr, range(97, 97 + of_tokenizer - 3))))
    for of_model in (of_tokenizer, 32, 130):
        made = hf_ssd.Grammar({"const": "a"}, tokenizer)
        scores = torch.zeros(1, 3, of_model)
        found = made.process_positions(scores, torch.tensor([[5, 2, 9]]), [1], [0])
        assert found.isfinite().nonzero().tolist() == [[0, 0, 2], [0, 1, 3], [0, 2, 1]]


# ---------------------------------------------------------------- forced tokens

KEYS = {"type": "object", "properties": {"first": {"type": "boolean"}, "second": {"type": "boolean"}}}
KEYS |= {"required": ["first", "second"], "additionalProperties": False}


def by_keys():
    return hf_ssd.Grammar(KEYS, TOKENIZER)


def keys(text: str) -> None:
    assert {*json.loads(text)} == {"first", "second"}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("how", ["in turn", "in a worker", "no draft", "auto"])
def test_forced_tokens_are_proposed_for_nothing(target, draft, assistant, how, rows, monkeypatch):
    of_config = {"no draft": {"drafter": "ngram", "budget": "auto"}, "auto": {"lookahead": "auto", "budget": "auto"}}
    drafts = {"in a worker": assistant, "auto": assistant, "no draft": None}
    call = target, drafts.get(how, draft), padded_batch(rows), by_keys, keys, of_config.get(how, {})
    stats = as_plain(*call)
    monkeypatch.setattr(hf_ssd.Grammar, "forced", lambda *_: [])
    without = as_plain(*call)
    assert len(stats.records) < 0.7 * len(without.records)
    if how != "auto":  # all forced tokens are accepted, four at a time
        assert {NGRAM} <= {source for record in stats.records for source in record.sources}
        kept = [record.accepted[row] for record in stats.records for row in record.live if record.is_early(row)]
        assert max(kept) == 4 and {*kept} <= {0, 1, 2, 3, 4}


def test_wrong_forced_tokens_cost_speed_alone(target, draft, monkeypatch):
    monkeypatch.setattr(hf_ssd.Grammar, "forced", lambda self, row, gained: [5, 7, 9])
    assert as_plain(target, draft, padded_batch(3), by_keys, keys).tokens_per_round < 1.5


def test_requests_of_a_running_batch_have_grammars_of_their_own(target, draft):
    inputs = [padded_batch(1, seed=seed)["input_ids"] for seed in (0, 1, 2)]
    makes = [by_keys, of_strings, by_keys]
    options = {"max_new_tokens": 70, "do_sample": False, "eos_token_id": TOKENIZER.eos_token_id, "pad_token_id": 0}
    calls = [(ids, {**options, "logits_processor": [make()]}) for ids, make in zip(inputs, makes)]
    plain = [target.generate(ids, **options)[0, 9:] for ids, options in calls]
    with hf_ssd.continuous_batching(target, **settings(draft)) as manager:
        names = [manager.add_request(ids[0].tolist(), **options) for ids, options in calls]
        found = [manager.get_result(name).generated_tokens for name in names]
    assert found == [tokens.tolist() for tokens in plain]


# ---------------------------------------------------------------- sampled

FEW = characters('"abc')  # six tokens, as the small pair has
WORDS = {"type": "string", "pattern": "^(ab?c|ba|c)*$"}
EOS = FEW.eos_token_id


@pytest.fixture(scope="module")
def exact(small):
    """
    The probabilities of all strings of three tokens after the first one, by the processor as plain generate() calls it.
    """
    (target, _), warpers = small, LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(4)])
    chances = {(): 1.0}
    for _ in range(4):
        longer = {}
        for text, chance in chances.items():
            made, ids = hf_ssd.Grammar(WORDS, FEW), torch.cat([PROMPT, torch.tensor([text]).long()], dim=1)
            if EOS in text:
                longer[(*text, 0)] = chance
                continue
            with torch.inference_mode():
                logits = target(ids).logits
            for length in range(PROMPT.shape[1], ids.shape[1] + 1):
                scores = made(ids[:, :length], logits[:, length - 1])
            p = warpers(ids, scores).softmax(-1)[0]
            longer |= {(*text, token): chance * float(p[token]) for token in range(SMALL) if p[token] > 0}
        chances = longer
    joint = torch.zeros(SMALL**3, dtype=torch.float64)
    for (_, *text), chance in chances.items():
        joint[int(torch.tensor(text) @ DIGITS)] += chance
    return joint


def counts(small, exact, **changes):
    options = {"eos_token_id": EOS, "pad_token_id": 0, "logits_processor": [hf_ssd.Grammar(WORDS, FEW)]}
    return counts_of(*small, exact=exact, options=options, seed=3, **{"at_least": 1.02, "calls": 6, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_sampled_json_has_the_distribution_of_plain_generate(small, exact, ahead):
    with preparing() if ahead else contextlib.nullcontext() as hits:
        found, expected = counts(small, exact)
    assert not ahead or 0.1 < sum(hits) / len(hits) < 0.95
    assert (expected > 0.01).sum() > 6 and chi_square(found, expected) > 1e-3


def test_a_matcher_that_is_not_rolled_back_changes_the_distribution(small, exact, monkeypatch):
    """The mutant for the test above."""
    not_rolled_back(monkeypatch)
    assert power_of(*counts(small, exact, at_least=0, calls=3)) > 0.99


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("schema, error, message", [
    ({"type": "strange"}, ValueError, "The grammar cannot be followed: Invalid type: strange"),
    ({"type": "array", "uniqueItems": True}, ValueError, "uniqueItems"),
    ({"$ref": "#/nowhere"}, ValueError, "does not exist"),
    ([1], TypeError, "`schema` must be a JSON schema"),
    ("no JSON", TypeError, "`schema` must be a JSON schema"),
    ({"enum": {1, 2}}, TypeError, "`schema` must be a JSON schema"),
])  # fmt: skip
def test_schemas_that_are_refused(schema, error, message):
    with pytest.raises(error, match=re.escape(message)):
        hf_ssd.Grammar(schema, TOKENIZER)


def test_tokenizers_that_are_refused():
    with pytest.raises(ValueError, match="pass `eos_token_id`"):
        hf_ssd.Grammar(STRINGS, printable())
    with pytest.raises(ValueError, match="llguidance cannot read this"):
        hf_ssd.Grammar(STRINGS, printable(), eos_token_id=[1])


def test_without_llguidance_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=re.escape("pip install hf_ssd[structured]")):
        hf_ssd.Grammar(STRINGS, TOKENIZER)
