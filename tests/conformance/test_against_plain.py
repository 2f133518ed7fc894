"""Whole calls of any kind, in several turns, against plain generate(): fifty, and thousands in the slow suite."""

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_ssd
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.drafting.sampling import SpeculationNoise
from hf_ssd.generation import deciding
from hf_ssd.generation.sequences import Sequences

from ..helpers.mutants import instead_of
from ..helpers.preparing import ahead, preparing
from ..helpers.suites import quick_first
from ..helpers.tiny import VOCAB, tiny_draft

TOKENS = st.integers(2, VOCAB - 1)
SETTINGS = {
    "lookahead": st.integers(1, 7),
    "budget": st.integers(1, 20),
    "fan_out": st.sampled_from(["uniform", "geometric", "confidence"]),
    "fallback": st.sampled_from(["primary", "ngram", "random"]),
}
OPTIONS = {
    "eos_token_id": st.lists(TOKENS, min_size=1, max_size=12, unique=True),
    "stop_strings": st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=4, unique=True),
    "criterion": st.tuples(st.integers(2, 12), st.integers(0, 4)),
    "processor": st.integers(0, 2),
    "constraint": st.integers(2, 6),
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "no_repeat_ngram_size": st.sampled_from([2, 3]),
    "begin_suppress_tokens": st.lists(TOKENS, min_size=1, max_size=20),
    "min_new_tokens": st.integers(1, 6),
    "forced_eos_token_id": TOKENS,
}
WARPERS = {
    "top_k": st.sampled_from([0, 1, 5]),
    "temperature": st.sampled_from([0.5, 1.5]),
    "top_p": st.sampled_from([0.3, 0.9]),
    "epsilon_cutoff": st.just(0.01),
    "eta_cutoff": st.just(0.01),
    "top_h": st.just(0.5),
}


@pytest.fixture(scope="module")
def draft():
    """One that agrees more often than that of the other tests: calls are short, and rows may have to agree at once."""
    return tiny_draft(disagreement=0.01)


RETURNED = {"return_dict_in_generate": True, "output_scores": True}
NO_TOKEN_LEFT = "probability tensor contains", "but found invalid values"  # of torch, and of `eta_cutoff` and `top_h`
HITS = []  # the share of rows that hit, in each round of each call


class Notes(LogitsProcessor):
    """Changes scores by row, length and, if it keeps a state, by all that it was shown before; and notes it."""

    def __init__(self, kind, prefixes):
        self.kind, self.prefixes, self.state = kind, prefixes, [0]

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids.tolist())
        assert scores.shape == (len(input_ids), VOCAB) and scores.dtype == torch.float32
        self.state = [(3 * self.state[i % len(self.state)] + int(row[-1])) % 7 for i, row in enumerate(input_ids)]
        if self.kind == 0:
            return scores
        of_row = self.state if self.kind == 1 else [sum(self.state)] * len(scores)  # the latter compares rows
        liked = torch.arange(VOCAB) % 7 == torch.tensor(of_row)[:, None]
        return torch.where(liked, scores + 1.5, scores)


class Trie:
    """Allows a few ways on from each token, and knows no prefix but those; once a row has ended, padding."""

    def __init__(self, ways, prompt_length, prefixes):
        self.ways, self.prompt_length, self.prefixes = ways, prompt_length, prefixes

    def after(self, token):
        return [(5 * token + 11 * way) % (VOCAB - 2) + 2 for way in range(self.ways)]

    def __call__(self, row, ids):
        ids = ids.tolist()
        self.prefixes.append([row, *ids])
        ended = False
        for before, after in zip(ids[self.prompt_length - 1 :], ids[self.prompt_length :]):
            assert ended or after == 0 or after in self.after(before)
            ended = ended or after == 0  # the padding behind an end, of whatever kind that was
        return list(range(VOCAB)) if ended else self.after(ids[-1])


class Stops(StoppingCriteria):
    """Stops each row at a length of its own, or when all have had one of some tokens, and remembers its calls."""

    def __init__(self, length, modulus, prompt_length):
        self.length, self.modulus, self.prompt_length, self.calls = length, modulus, prompt_length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        if self.modulus:
            had = (input_ids[:, self.prompt_length :] % self.modulus == 0).any(1)
            return had.all().expand(len(input_ids)).clone()
        late = [input_ids.shape[1] - self.prompt_length >= self.length + row for row in range(len(input_ids))]
        return torch.tensor(late)


@st.composite
def dialogues(draw, do_sample, options, of_each=()):
    """Prompts of several turns, options of generate() (some of them of each call), settings, a seed."""
    rows = draw(st.integers(1, 4))
    prompts = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=7), min_size=rows, max_size=rows))
    questions = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=2))
    options = {**OPTIONS, **options}
    always = {"max_new_tokens": st.integers(1, 16), **{name: options.pop(name) for name in of_each}}
    options = {**draw(st.fixed_dictionaries(always, optional=options)), "do_sample": do_sample}
    config = hf_ssd.SSDConfig(asynchronous=False, **draw(st.fixed_dictionaries(SETTINGS)))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    masks_pads, seed = draw(st.booleans()), draw(st.integers(0, 99))
    return prompts, questions, options, config, dtype, masks_pads, seed


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def arguments(options, prompt_length, tokenizer):
    """The options as generate() takes them, with objects made anew, and what these note."""
    options, shown, asked = dict(options), [], []
    length, modulus = options.pop("criterion", (None, None))
    criterion = Stops(length, modulus, prompt_length)
    if length is not None:
        options["stopping_criteria"] = StoppingCriteriaList([criterion])
    if "processor" in options:
        options["logits_processor"] = LogitsProcessorList([Notes(options.pop("processor"), shown)])
    if "constraint" in options:
        options["prefix_allowed_tokens_fn"] = Trie(options.pop("constraint"), prompt_length, asked)
    if "stop_strings" in options:
        options["stop_strings"] = tokenizer.convert_ids_to_tokens(options["stop_strings"])
        options["tokenizer"] = tokenizer
    return options, shown, asked, criterion.calls


def turns(target, draft, dialogue, tokenizer, planned=ahead):
    """Plays a dialogue with one cache: after each turn the output, and what users' objects were shown."""
    prompts, questions, options, config, dtype, masks_pads, seed = dialogue
    ssd = {} if draft is None else {"assistant_model": draft, "ssd_config": config}
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache, played = None, []
    for question in [*questions, None]:
        given, *notes = arguments(options, ids.shape[1], tokenizer)
        torch.manual_seed(seed)
        before = ids.clone(), mask.clone()
        with default_dtype(dtype), preparing(planned) as hits:
            output = target.generate(ids, attention_mask=mask, **{CACHE: cache}, **RETURNED, **given, **ssd)
        assert torch.equal(ids, before[0]) and torch.equal(mask, before[1])
        assert output[CACHE].get_seq_length() == output.sequences.shape[1] - 1
        played.append((output, *notes))
        HITS.extend(hits)
        if question is not None:
            answer = output.sequences[:, ids.shape[1] :]
            said = torch.tensor([question]).expand(len(ids), -1)
            of_answer = (answer != 0).long() if masks_pads else torch.ones_like(answer)
            mask = torch.cat([mask, of_answer, torch.ones_like(said)], dim=1)
            ids, cache = torch.cat([output.sequences, said], dim=1), output[CACHE]
    return played


def check_scores(ours, theirs, options):
    """Of each row's tokens up to its first end; what follows belongs to padding, whatever the end was."""
    ends = [*options.get("eos_token_id", []), options.get("forced_eos_token_id", -1)]
    new = ours.sequences[:, -len(ours.scores) :]
    are_ends = torch.isin(new, torch.tensor(ends)).long()
    kept = (are_ends.cumsum(1) - are_ends == 0) & (new != 0)
    scores = (torch.stack(each.scores, 1)[kept] for each in (ours, theirs))
    torch.testing.assert_close(*scores, atol=1e-3, rtol=1e-3)


def check_greedy(target, draft, tokenizer, examples, of_each=()):
    def check_one(dialogue):
        played = turns(target, draft, dialogue, tokenizer), turns(target, None, dialogue, tokenizer)
        for (ours, *our_notes), (theirs, *their_notes) in zip(*played, strict=True):
            assert torch.equal(ours.sequences, theirs.sequences)
            check_scores(ours, theirs, dialogue[2])
            assert len(ours.scores) == len(theirs.scores) and ours.ssd_stats.draft_failure is None
            (shown, asked, judged), (shown_in_plain, asked_in_plain, judged_in_plain) = our_notes, their_notes
            assert shown == shown_in_plain and judged == judged_in_plain
            assert all(prefix in asked_in_plain for prefix in asked)
            accepted.append(sum(k for _, k, _ in ours.ssd_stats.verified_rows()))

    accepted = []
    HITS.clear()
    check(dialogues(False, {}, of_each), check_one, examples)
    assert of_each or (sum(accepted) > examples and 0.1 < sum(HITS) / len(HITS) < 0.9)


def check_sampled(target, draft, tokenizer, examples):
    """What must hold whatever is drawn, and the tokens of drafting in turn where those do not depend on hits."""

    def check_one(dialogue):
        prompts, questions, options, config, *_ = dialogue
        ends, length = options.get("eos_token_id", []), max(map(len, prompts))
        try:
            played = turns(target, draft, dialogue, tokenizer)
        except (RuntimeError, ValueError) as error:  # options leave no token, where plain generation raises too
            assert "constraint" in options and any(text in str(error) for text in NO_TOKEN_LEFT)
            impossible.append(options)
            return
        if config.fallback == "primary":
            in_turn = turns(target, draft, dialogue, tokenizer, lambda plan, _: plan)
            assert all(torch.equal(one[0].sequences, other[0].sequences) for one, other in zip(played, in_turn))
        for (output, shown, asked, judged), question in zip(played, [*questions, []], strict=True):
            new = output.sequences[:, length:].tolist()
            assert len(new[0]) == len(output.scores) <= options["max_new_tokens"]
            rows = output.sequences.tolist()
            for row, tokens in enumerate(new):
                first = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
                assert not any(tokens[first + 1 :])  # padding
                cut = tokens.index(0) if ends and 0 in tokens else len(tokens)
                for step in range(min(first, len(tokens) - 1, cut) + (cut > first)):
                    assert output.scores[step][row, tokens[step]] > -torch.inf
            lengths = list(range(length, output.sequences.shape[1]))
            assert [len(one[0]) for one in shown] == (lengths if "processor" in options else [])
            assert all(one == [text[: len(one[0])] for text in rows] for one in shown + judged)
            assert all(prefix == rows[row][: len(prefix)] for row, *prefix in asked)
            length = output.sequences.shape[1] + len(question)

    impossible = []
    check(dialogues(True, WARPERS), check_one, examples)
    assert len(impossible) <= examples / 20, len(impossible)


def check(calls, of_one_call, examples):
    """Draws the same calls each time, and shrinks nothing: each takes a moment."""
    options = {"derandomize": True, "database": None, "phases": [Phase.generate], "report_multiple_bugs": False}
    settings(max_examples=examples, suppress_health_check=list(HealthCheck), **options)(given(calls)(of_one_call))()


@pytest.mark.parametrize("examples", [10, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("checked", [check_greedy, check_sampled])
def test_calls_of_any_kind(target, draft, tokenizer, checked, examples):
    checked(target, draft, tokenizer, examples)


@instead_of(deciding.CallRows, "__init__")
def rows_by_themselves(init, self, *arguments, **options):
    """A row goes on although another, which a processor may look at, has rejected."""
    init(self, *arguments, **options)
    self.in_step = False


@instead_of(Sequences, "as_in_plain_generation")
def behind_the_end(_, self, length):
    """An EOS among the drafted tokens ends a row when the round is over."""
    return self.ids[:, :length]


MUTANTS = [  # and the option without which there is nothing to notice
    # Users' own processors, and constraints, are asked for all that was drafted, as transformers' are.
    ("processor", lambda m: m.setattr(deciding, "are_by_row", lambda _: True)),
    ("constraint", lambda m: m.setattr(deciding, "has_constraint", lambda _: False)),
    ("processor", rows_by_themselves),
    ("eos_token_id", lambda m: m.setattr(CachedModel, "finish", lambda *_: None)),  # the cache is as rounds left it
    ("eos_token_id", behind_the_end),
    # Criteria are asked while some rows are still shorter.
    ("criterion", lambda m: m.setattr(Sequences, "_common_length", property(lambda self: max(self.lengths)))),
]


@pytest.mark.parametrize("option, mutate", quick_first(MUTANTS, 2))
def test_mistakes_are_noticed(target, draft, tokenizer, option, mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError)):
        check_greedy(target, draft, tokenizer, 100, [option])


def test_draft_randomness_that_depends_on_when_it_is_drawn_is_noticed(target, draft, tokenizer, monkeypatch):
    """The mutant for the sampled calls."""
    in_their_order = torch.Generator().manual_seed(0)

    def gather(self, rows, starts, depth):
        noise = torch.empty(len(rows), len(starts[rows[0]]), self.noise.vocab_size)
        return noise.exponential_(generator=in_their_order)

    monkeypatch.setattr(SpeculationNoise, "gather", gather)
    with pytest.raises(AssertionError):
        check_sampled(target, draft, tokenizer, 25)
