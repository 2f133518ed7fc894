"""Drafts whose vocabulary is not the target's: padded, or of another tokenizer."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import hf_ssd
from hf_ssd.drafting.sampling import DraftSampler
from hf_ssd.drafting.vocabulary import Vocabulary
from hf_ssd.generation import tokenizers
from hf_ssd.generation.tokenizers import translation_between

from ..helpers import comparing
from ..helpers.sampled_strings import SMALL, p_value, power
from ..helpers.tiny import VOCAB, padded_batch, ready, tiny_draft, tiny_model
from ..helpers.vocabularies import DRAFT, TARGET, renamed_draft, resized_draft, tokenizer
from ..matrix import BOTH


def generate(target, model, rows, options):
    inputs = padded_batch(rows)
    inputs["input_ids"].clamp_(max=VOCAB - 8)
    return comparing.generate(target, model, inputs, **options)


@pytest.mark.slow
def test_a_worker_that_was_replaced_is_told_the_vocabulary_again_and_several_know_it():
    target = hf_ssd.enable(tiny_model())
    plain = generate(target, renamed_draft(), 2, BOTH).sequences
    with hf_ssd.launch_draft(renamed_draft(), devices=["cpu", "cpu"], num_threads=1) as assistant:
        for _ in range(2):
            output = generate(target, assistant, 2, BOTH)
            assert torch.equal(output.sequences, plain) and output.ssd_stats.hit_rate > 0
            for worker in assistant.workers:
                worker.kill()
            ready(assistant)


# ---------------------------------------------------------------- the distribution

SMALL_TARGET, SMALL_DRAFT = ["a", "b", "c", "d", "e", "<pad>"], ["d", "x", "c", "<pad>", "b", "a"]
SMALL_BOTH = {"tokenizer": tokenizer(SMALL_TARGET), "assistant_tokenizer": tokenizer(SMALL_DRAFT)}
SMALL_PAIRS = {
    "draft padded": (SMALL + 2, {}),
    "target padded": (SMALL - 1, {}),
    "another tokenizer": (SMALL, SMALL_BOTH),
}


@pytest.fixture(params=SMALL_PAIRS)
def small(request, small):
    size, options = SMALL_PAIRS[request.param]
    return small[0], tiny_draft(seed=3, disagreement=0.12, vocab_size=size, initializer_range=0.12), options


@pytest.mark.slow
def test_three_token_strings_have_the_targets_distribution(small, prepared_in_process):
    target, draft, options = small
    assert p_value(target, draft, calls=16, seed=10, at_least=1.05, options=options, budget=4) > 1e-3
    assert 0.05 < sum(prepared_in_process) / len(prepared_in_process) < 0.95


def not_renormalized(tokens, q):
    return tokens, q * 0.7  # what common tokens have of the draft's whole distribution


def under_the_drafts_ids(tokens, q):
    return tokens, q.roll(1, dims=-1)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [not_renormalized, under_the_drafts_ids])
def test_a_q_that_is_not_the_targets_fails_the_same_test(small, mutant, monkeypatch):
    draw = DraftSampler.draw
    monkeypatch.setattr(DraftSampler, "draw", lambda *arguments: mutant(*draw(*arguments)))
    target, draft, options = small
    assert power(target, draft, calls=16, seed=10, at_least=1.0, options=options, budget=4) > 0.99


# ---------------------------------------------------------------- the map


@pytest.mark.parametrize("name", ["draft padded", "target padded", "another tokenizer"])
def test_what_the_draft_lacks_is_never_drawn_and_what_it_draws_is_exact(name):
    """Enumerated: the softmax of the logits is the draft's distribution, given that it draws a token of both."""
    sizes = {"draft padded": (5, 8), "target padded": (8, 5), "another tokenizer": (len(TARGET), len(DRAFT))}[name]
    translation = translation_between(*BOTH.values(), *sizes) if name == "another tokenizer" else None
    vocabulary = Vocabulary(*sizes, translation)
    logits = torch.randn(3, sizes[1], generator=torch.Generator().manual_seed(1))
    q, own = vocabulary.to_target(logits).softmax(-1), logits.softmax(-1)
    common = {i: i for i in range(min(sizes))}
    if translation is not None:
        common = {i: DRAFT.index(token) for i, token in enumerate(TARGET) if token in DRAFT}
    assert vocabulary.common == len(common) and q.shape == (3, sizes[0])
    for row in range(3):
        total = sum(own[row, j] for j in common.values())
        for i in range(sizes[0]):
            expected = own[row, common[i]] / total if i in common else 0.0
            assert q[row, i].item() == pytest.approx(float(expected), abs=1e-6)
    tokens = torch.arange(sizes[0])
    mapped = vocabulary.to_draft(tokens)
    assert 0 <= mapped.min() and mapped.max() < sizes[1] and all(mapped[i] == j for i, j in common.items())


def test_texts_are_the_same_in_both():
    translation = translation_between(*BOTH.values(), len(TARGET), len(DRAFT))
    text = [TARGET.index(token) for token in ("<s>", "gh", "k", "ab", "hi", "Z")]
    pieces = [DRAFT[i] for i in Vocabulary(len(TARGET), len(DRAFT), translation).encode(torch.tensor(text)).tolist()]
    assert pieces == ["<s>", "g", "h", "k", "h", "i", "Z"]  # "a" and "b" are letters that it lacks


# ---------------------------------------------------------------- what is compared, and refused


def save(folder, model, tokens):
    model.save_pretrained(folder)
    tokenizer(tokens).save_pretrained(folder)
    return str(folder)


def load(folder):
    return hf_ssd.enable(type(tiny_model()).from_pretrained(folder).eval())


@pytest.fixture
def folders(tmp_path):
    other = [*TARGET[:10], *reversed(TARGET[10:])]
    return {
        "target": save(tmp_path / "target", tiny_model(), TARGET),
        "padded": save(tmp_path / "padded", resized_draft(VOCAB + 200), TARGET),
        "same size": save(tmp_path / "same", tiny_draft(), other),
        "other": save(tmp_path / "other", renamed_draft(), DRAFT),
    }


@pytest.mark.parametrize("is_one_file", [True, False])
def test_tokenizers_in_the_folders_are_compared_once(folders, is_one_file, monkeypatch):
    with open(Path(folders["padded"]) / "tokenizer.json", "a") as file:
        file.write("" if is_one_file else "\n")
    target, draft = load(folders["target"]), load(folders["padded"])
    loaded, load_tokenizer = [], AutoTokenizer.from_pretrained
    noted = lambda path, **options: loaded.append(path) or load_tokenizer(path, **options)  # noqa: E731
    monkeypatch.setattr(tokenizers.AutoTokenizer, "from_pretrained", noted)
    for _ in range(2):  # a difference of 200 ids is padding where the tokens are the same
        assert generate(target, draft, 1, {}).ssd_stats.acceptance_rate > 0.1
    assert loaded == [folders["target"], folders["padded"]] * (not is_one_file)


def test_tokens_of_the_same_number_that_are_not_the_same_are_refused(folders):
    target = load(folders["target"])
    shown = "86 ids mean .* the first of them 10 .*, 11 .*, 12 .*, 13 .*, 14 .*assistant_tokenizer"
    with pytest.raises(ValueError, match=shown):
        generate(target, load(folders["same size"]), 1, {})
    with hf_ssd.launch_draft(folders["same size"], num_threads=1) as assistant:
        with pytest.raises(ValueError, match=shown):
            generate(target, assistant, 1, {})


def test_a_draft_of_another_family_takes_both_tokenizers(folders):
    target, draft = load(folders["target"]), load(folders["other"])
    ours, theirs = (AutoTokenizer.from_pretrained(folders[name]) for name in ("target", "other"))
    output = generate(target, draft, 1, {"tokenizer": ours, "assistant_tokenizer": theirs})
    assert output.ssd_stats.acceptance_rate > 0.1
    with pytest.raises(ValueError, match="pass `tokenizer=...` to generate"):
        generate(target, draft, 1, {"assistant_tokenizer": theirs})
    with pytest.raises(ValueError, match="vocabulary of 97 tokens and the draft one of 300; choose .* or pass"):
        generate(target, tiny_draft(vocab_size=300), 1, {})


def test_a_prompt_of_which_the_draft_hardly_knows_a_token_is_decoded_plainly_with_a_warning(caplog):
    lacking = ["p", "q", "r", "s"]
    few = [token for token in DRAFT if token not in lacking]
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft(vocab_size=len(few))
    prompt = torch.tensor([[TARGET.index(token) for token in (*lacking, "z")]])
    options = {**comparing.GREEDY, "max_new_tokens": 4}
    plain = target.generate(prompt, **options).sequences
    options |= {**BOTH, "assistant_tokenizer": tokenizer(few)}
    said = "has 1 of the 5 tokens that the prompts use, less than half"
    for is_ahead in (False, True):
        output = target.generate(prompt, **options, **comparing.settings(draft, asynchronous=is_ahead))
        assert output.sequences.equal(plain) and said in output.ssd_stats.draft_failure and said in caplog.text
        assert [record.lookahead for record in output.ssd_stats.records] == [0, 0, 0]
        caplog.clear()
    with pytest.raises(hf_ssd.DraftError, match=said):
        target.generate(prompt, **options, **comparing.settings(draft, on_draft_failure="raise"))
    hf_ssd.close(draft)
