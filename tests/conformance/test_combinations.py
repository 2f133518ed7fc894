"""Options, inputs and settings in any combination: greedy as plain generate(), sampled as the synchronous oracle."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hf_ssd
from hf_ssd.drafting.sampling import SpeculationNoise
from hf_ssd.generation import deciding

from ..helpers.preparing import preparing
from ..helpers.tiny import VOCAB
from .test_greedy import accepts_one_too_many

TOKENS = st.integers(2, VOCAB - 1)
ENDS = st.lists(TOKENS, min_size=1, max_size=8, unique=True)
PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=9), min_size=1, max_size=4)
OPTIONS = {
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "no_repeat_ngram_size": st.sampled_from([2, 3]),
    "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=3),
    "begin_suppress_tokens": st.lists(TOKENS, min_size=1, max_size=20),
    "eos_token_id": ENDS,
    "min_new_tokens": st.integers(1, 6),
    "forced_eos_token_id": TOKENS,
    "prefix_allowed_tokens_fn": st.just(lambda row, ids: [t for t in range(2, VOCAB) if (t + int(ids[-1]) + row) % 3]),
}
WARPERS = {
    "temperature": st.sampled_from([0.3, 0.7, 1.5]),
    "top_k": st.sampled_from([0, 1, 3, 20]),
    "top_p": st.sampled_from([0.3, 0.9]),
    "min_p": st.just(0.1),
    "epsilon_cutoff": st.just(0.01),
    "eta_cutoff": st.just(0.01),
    "top_h": st.just(0.5),
    "num_return_sequences": st.integers(1, 3),
}
SETTINGS = {
    "lookahead": st.integers(1, 7),
    "budget": st.integers(1, 20),
    "fan_out": st.sampled_from(["uniform", "geometric", "confidence"]),
}
FALLBACKS = st.sampled_from(["primary", "ngram", "random"])


@st.composite
def calls(draw, options, numbers):
    """Left-padded prompts, options of generate(), settings, a seed."""
    prompts = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=9), min_size=1, max_size=4))
    length = max(map(len, prompts))
    rows = [[0] * (length - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    inputs = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
    options = draw(st.fixed_dictionaries({"max_new_tokens": st.integers(1, 24)}, optional={**OPTIONS, **options}))
    config = hf_ssd.SSDConfig(asynchronous=False, **draw(st.fixed_dictionaries({**SETTINGS, **numbers})))
    return {**inputs, **options}, config, draw(st.integers(0, 99))


def check(calls, of_one_call):
    """Draws the same calls each time, and shrinks nothing: each takes a moment."""
    check_one = settings(
        max_examples=30, derandomize=True, database=None, phases=[Phase.generate]
    )(given(calls)(of_one_call))  # fmt: skip
    check_one()


def until_its_end(steps, sequences, ends):
    """What was kept of each row's tokens up to its end; later ones are padding."""
    are_ends = torch.isin(sequences[:, -len(steps) :], torch.tensor(ends)).long()
    return torch.stack(steps, 1)[are_ends.cumsum(1) - are_ends == 0]


def check_greedy(target, draft):
    hits = []

    def check_one(call):
        arguments, config, _ = call
        arguments = {**arguments, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
        plain = target.generate(**arguments)
        with preparing() as hits_of_call:
            output = target.generate(**arguments, assistant_model=draft, ssd_config=config)
        assert torch.equal(output.sequences, plain.sequences) and len(output.scores) == len(plain.scores)
        ends = [*arguments.get("eos_token_id", []), arguments.get("forced_eos_token_id", -1)]
        scores = (until_its_end(each.scores, plain.sequences, ends) for each in (output, plain))
        torch.testing.assert_close(*scores, atol=1e-3, rtol=1e-3)
        hits.extend(hits_of_call)

    check(calls({}, {"fallback": FALLBACKS}), check_one)
    assert 0.1 < sum(hits) / len(hits) < 0.9


def check_sampled(target, draft):
    def check_one(call):
        arguments, config, seed = call
        arguments = {**arguments, "do_sample": True, "assistant_model": draft, "ssd_config": config}
        torch.manual_seed(seed)
        oracle = target.generate(**arguments)
        torch.manual_seed(seed)
        with preparing():
            assert torch.equal(target.generate(**arguments), oracle)

    check(calls(WARPERS, {"saguaro_c": st.sampled_from([0.0, 0.3, 1.0])}), check_one)


def test_greedy_equals_plain_generate(target, draft):
    check_greedy(target, draft)


def test_sampled_equals_the_synchronous_oracle(target, draft):
    check_sampled(target, draft)


def test_mistakes_are_noticed(target, draft, monkeypatch):
    """The mutants for the tests above: a token too many, and draft randomness that depends on when it is drawn."""
    monkeypatch.setattr(deciding, "verify_greedy", accepts_one_too_many)
    with pytest.raises(AssertionError):
        check_greedy(target, draft)
    in_their_order = torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        SpeculationNoise, "at", lambda self, *_: torch.empty(self.vocab_size).exponential_(generator=in_their_order)
    )
    with pytest.raises(AssertionError):
        check_sampled(target, draft)
