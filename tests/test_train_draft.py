"""A draft made for a target: its text, its vocabulary, what it learns, and the program as a user runs it."""

import functools
import itertools
import json
import re
import sys
from argparse import Namespace
from collections import Counter

import cut_draft
import own_texts
import prompt_kinds
import pytest
import small_vocabulary
import torch
import train_draft
import training
import training_time
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import hf_ssd
from hf_ssd.drafting.vocabulary import Vocabulary
from hf_ssd.generation.tokenizers import translation_between

from .helpers.comparing import generate
from .helpers.families import sharp_model, tiny_config
from .helpers.programs import PAIR, ROOT, run
from .helpers.suites import slowly
from .helpers.tiny import FAMILIES, tiny_model
from .helpers.vocabularies import byte_level, sentencepiece

WORDS = "the quick brown fox jumps over the lazy dog, größer als das 日本"


# ---------------------------------------------------------------- prompts and texts


def test_no_prompt_that_is_held_out_is_learned_from():
    held_out, learned = prompt_kinds.held_out(20), prompt_kinds.to_learn_from()
    assert list(held_out) == ["chat", "code", "edit", "summary"] and len(set(held_out["code"])) == 2
    assert all(len(set(of)) > 6 for kind, of in held_out.items() if kind != "code")
    assert len(learned) > 800
    for text in (prompt.split("\n\n", 1)[-1] for of in held_out.values() for prompt in of):
        assert not any(text in prompt for prompt in learned)  # nor its code or text in another prompt


def pair():
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype="float32")
    return target, AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")


def test_a_text_has_the_distribution_in_the_place_of_each_token_of_its_answer():
    target, tokenizer = pair()
    target.generation_config.eos_token_id = [0, tokenizer("\n")["input_ids"][0]]
    prompts = ["def copy_file(source", "x = ", "class Reader:\n    def read"]
    texts = own_texts.write(target, tokenizer, prompts, 12, 0.0)
    assert len({len(text["p"]) for text in texts}) > 1  # some answers ended
    for prompt, text in zip(prompts, texts):
        ids, count = text["ids"].long(), len(text["p"])
        assert tokenizer.decode(ids[:-count]) == prompt
        logits = target(ids[None]).logits[0, -count - 1 : -1]
        p, likely = logits.softmax(-1).topk(own_texts.LIKELIEST)
        assert torch.equal(ids[-count:], likely[:, 0]) and torch.equal(text["likely"][:, 0].long(), likely[:, 0])
        torch.testing.assert_close(text["p"].float(), p, atol=2e-3, rtol=1e-2)


def write_for(seconds, folder, new_tokens=30):
    target, tokenizer = pair()
    args = Namespace(max_new_tokens=new_tokens, temperature=0.0, batch_size=2, seed=0)
    return own_texts.write_texts(target, tokenizer, ["x = ", "import os"], ["def f("], folder, seconds, args)


def test_writing_ends_within_a_batch_and_goes_on_with_the_time_that_is_left(tmp_path, monkeypatch):
    now, shown = iter(range(10**6)), set()
    monkeypatch.setattr(own_texts.time, "perf_counter", lambda: next(now))  # a second passes at each look
    monkeypatch.setattr(own_texts.tqdm, "refresh", lambda bar, **_: shown.add(bar.n))
    texts, _ = write_for(20, tmp_path)
    assert len(list(tmp_path.glob("*.pt"))) == 2 and len(shown) > 5  # the bar moves within batches
    assert all(0 < len(text["p"]) < 30 for text in texts)  # cut, and used
    assert sum(torch.load(path)["seconds"] for path in tmp_path.glob("*.pt")) < 40
    more, _ = write_for(200, tmp_path)
    assert len(more) > len(texts) and all(torch.equal(a["ids"], b["ids"]) for a, b in zip(texts, more))


@pytest.mark.parametrize("is_killed", [False, True])
def test_no_text_is_lost_when_writing_is_interrupted(tmp_path, monkeypatch, is_killed):
    """Ctrl-C after ten tokens; or a kill, which leaves what was kept by the clock."""
    steps, record = itertools.count(), own_texts.Recorder.__call__

    def interrupted(self, input_ids, scores):
        if next(steps) == 40:
            raise KeyboardInterrupt
        return record(self, input_ids, scores)

    monkeypatch.setattr(own_texts.Recorder, "__call__", interrupted)
    if is_killed:
        monkeypatch.setattr(own_texts, "KEEP_EVERY", 0)
        monkeypatch.setattr(own_texts.BatchFile, "__exit__", lambda self, *error: None)
    with pytest.raises(KeyboardInterrupt):
        write_for(1000, tmp_path)
    kept = torch.load(tmp_path / "00001.pt")["texts"]
    assert [len(text["p"]) for text in kept] == [10, 10] and len(kept[0]["ids"]) > 10
    assert all(torch.equal(text["ids"][-10:], text["likely"][:, 0]) for text in kept)


# ---------------------------------------------------------------- the vocabulary


@pytest.mark.parametrize("whole, size", [(byte_level(), 300), (sentencepiece(), 300)], ids=["bytes", "sentencepiece"])
def test_a_small_vocabulary_writes_every_text_and_keeps_frequent_tokens(whole, size):
    counts = Counter(whole(WORDS + " fox" * 9)["input_ids"])
    small = small_vocabulary.small_tokenizer(whole, counts, size)
    assert len(small) <= size < len(whole)
    translation = translation_between(whole, small, len(whole), len(small))
    frequent = max(counts, key=counts.get)
    assert translation.is_common[frequent] and not translation.is_common.all()
    ids = whole("a brown fox 日 jumps")["input_ids"]
    pieces = [piece for i in ids for piece in translation.pieces[i]]
    assert small.decode(pieces) == whole.decode(ids)


def test_a_vocabulary_that_is_too_small_or_no_bpe_is_refused():
    with pytest.raises(ValueError, match="100 tokens are too few: the characters and bytes are 256"):
        small_vocabulary.small_tokenizer(byte_level(), Counter(), 100)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(ValueError, match="is not BPE"):
        small_vocabulary.small_tokenizer(words, Counter(), 100)


# ---------------------------------------------------------------- the draft


def texts_of(model, rows=3):
    return list(torch.randint(3, model.config.vocab_size, (rows, 12), generator=torch.Generator().manual_seed(0)))


def cut(target, layers, kept, texts=None):
    draft = cut_draft.last_layers(target, layers, kept)
    table = cut_draft.mean_states(target, layers, kept, texts or texts_of(target))
    draft.get_input_embeddings().load_state_dict({"weight": table})
    return draft.eval()


OTHERS = "gemma2 cohere2 granite gpt_oss gptj granitemoehybrid qwen3_next exaone4 stablelm phi3".split()


@pytest.mark.parametrize("family", [*FAMILIES, *map(slowly, OTHERS)])
def test_a_draft_of_all_layers_and_some_tokens_is_the_target_on_these_tokens(family):
    target = tiny_model(family) if family in FAMILIES else sharp_model(tiny_config(family))
    kept, layers = [5, 3, *range(20, 90)], target.config.num_hidden_layers
    whole, part = (cut(target, count, kept) for count in (layers, layers - 1))
    assert type(whole) is type(target) and whole.config.vocab_size == len(kept)
    ids, logits = torch.arange(4, 16)[None], target(torch.tensor([kept[4:16]])).logits[..., kept]
    torch.testing.assert_close(whole(ids).logits, logits, atol=1e-4, rtol=1e-3)
    assert part.config.num_hidden_layers == layers - 1 and part(ids).logits.shape == logits.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_has_the_last_layers_of_its_target(family):
    target, kept = tiny_model(family), list(range(97))
    draft = cut(target, 2, kept)
    with torch.no_grad():  # the target without its first layer, with the draft's table in place of that layer
        target.model.layers = target.model.layers[1:]
        target.config.num_hidden_layers = 2
        if family == "gemma":
            target.config.layer_types = target.config.layer_types[1:]
        head = target.lm_head.weight.clone()
        target.lm_head.weight = torch.nn.Parameter(head)
        target.get_input_embeddings().weight.copy_(draft.get_input_embeddings().weight)
    ids = torch.tensor([[7, 50, 31, 8, 8, 90, 11, 12, 45]])
    torch.testing.assert_close(draft(ids, use_cache=False).logits, target(ids, use_cache=False).logits)


def test_a_token_of_a_draft_begins_with_the_mean_of_its_hidden_states():
    target, kept, first = tiny_model(), [9, 60], cut_draft.FIRST
    texts = [torch.tensor([1, 9, 60, 9, 9, 70]), torch.tensor([1, 5, 5, 9, 80])]
    rows = [torch.tensor([[1, 9, 60, 9]]), torch.tensor([[1, 9, 60, 60]]), *(text[None] for text in texts)]
    if torch.randperm(2, generator=torch.Generator().manual_seed(0))[0]:
        rows[:2] = torch.tensor([[1, 5, 5, 9]]), torch.tensor([[1, 5, 5, 60]])
    states = [target(row, output_hidden_states=True).hidden_states[1][0] for row in rows]
    found = {i: [state[p] for row, state in zip(rows, states) for p in range(first, row.shape[1]) if row[0, p] == i]
             for i in kept}  # fmt: skip
    means = torch.stack([torch.stack(found[i]).mean(0) for i in kept])
    assert [len(found[i]) for i in kept] == [4, 1]
    torch.testing.assert_close(cut(target, 2, kept, texts).get_input_embeddings().weight, means)


def test_a_target_that_cannot_be_cut_is_named():
    with pytest.raises(ValueError, match="A draft of 4 layers cannot be cut out of a target of 3; change `--layers`"):
        cut(tiny_model(), 4, [1, 2])
    target = tiny_model()
    target.model.layers[2].mlp.up_proj = torch.nn.Linear(32, 48, bias=False)  # a layer unlike those before it
    with pytest.raises(ValueError, match="No draft can be cut out of LlamaForCausalLM: its last 2 layers do not work"):
        cut(target, 2, [1, 2])


# ---------------------------------------------------------------- learning


def lessons_of(whole, small):
    translation = translation_between(whole, small, len(whole), len(small))
    target = tiny_model(vocab_size=len(whole))
    whole.padding_side = "left"
    whole.pad_token = whole.decode([0])
    texts = own_texts.write(target, whole, ["the quick", "größer als das 日本 a fox"], 6, 0.0)
    return train_draft.Lessons(texts, translation, 64), texts, translation


@pytest.mark.parametrize("shift", [0, 1])
def test_a_draft_learns_in_the_places_where_it_drafts(shift):
    """With the target's answer cut before any token, the draft reads what it reads in training. A shift must differ."""
    whole = byte_level()
    small = small_vocabulary.small_tokenizer(whole, Counter(), 270)
    lessons, texts, translation = lessons_of(whole, small)
    draft = tiny_model(vocab_size=len(small))
    ids, places, likely, p = lessons.batch([0, 1], "cpu")
    logits = train_draft.logits_at(draft, ids, (places + shift) % ids.numel())
    vocabulary, expected = Vocabulary(len(whole), len(small), translation), []
    for text in texts:
        for i in range(-len(text["p"]), 0):
            expected.append(draft(vocabulary.encode(text["ids"][:i].long())[None]).logits[0, -1])
    same = torch.allclose(logits, torch.stack(expected), atol=1e-4)
    assert same == (shift == 0)
    known = torch.cat([translation.is_common[text["likely"].long()] for text in texts])
    assert torch.equal(p > 0, known & (torch.cat([text["p"] for text in texts]) > 0)) and not known.all()
    names = [small.convert_ids_to_tokens(i) for i in likely[p > 0].tolist()]
    theirs = torch.cat([text["likely"] for text in texts])[p > 0].tolist()
    assert names == [whole.convert_ids_to_tokens(i) for i in theirs]


# ---------------------------------------------------------------- how long it takes


def test_writing_is_timed_by_prompts_that_are_read_and_steps_of_a_whole_batch(monkeypatch):
    """A second passes for each token of a pass. The mutants leave out the prompts, or time a step of one row."""
    passes, (target, tokenizer) = [], pair()
    monkeypatch.setattr(training_time.time, "perf_counter", lambda: float(sum(passes)))
    target.register_forward_pre_hook(lambda *call: passes.append(call[2]["input_ids"].numel()), with_kwargs=True)
    args = Namespace(batch_size=4, max_new_tokens=8)
    prompts = [f"def read_{name}(self" for name in ("file", "line", "page", "word", "byte", "text")]
    read = len(tokenizer(prompts[0])["input_ids"])
    measured = training_time.tokens_per_second(target, tokenizer, prompts, args)
    assert measured == pytest.approx(4 * 8 / (4 * read + 8 * 4))
    assert measured not in (pytest.approx(1.0), pytest.approx(4 * 8 / (4 * read + 8)))


def test_training_by_the_clock_ends_and_goes_on_with_the_time_that_is_left(tmp_path, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(now))  # a second passes at each look
    model, figures = tiny_model(), []

    def loss_of(step):
        return model(input_ids=torch.tensor([[1, 2, 3]])).logits.square().mean()

    def train(seconds):
        return training.train(
            model, loss_of, 10**6, 1e-3, tmp_path / "m.pt", "m", seconds=seconds, measure=lambda: figures.append(1)
        )

    first = train(30)
    assert 5 < first < 30 and figures
    assert train(30) == first  # there is no time left
    assert first < train(60) < 3 * first


def test_an_estimate_names_both_rates_what_the_minutes_give_and_minutes_that_suffice():
    assert training_time.estimate(tokens=400.0, steps=0.5, minutes=30, writing=0.25).splitlines() == [
        "Writing: about 400 tokens/s. Learning: about 2 s a step.",
        "30 minutes give about 180,000 tokens and 675 steps.",
        "480,000 tokens and 2,600 steps take about 20 min and 87 min: --minutes 107 --writing 0.19",
    ]


@pytest.mark.slow
def test_without_minutes_the_program_measures_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    words = f"{PAIR / 'target'} --output {tmp_path / 'draft'} --checkpoints {tmp_path / 'now'} --minutes 0"
    monkeypatch.setattr(sys, "argv", ["train_draft.py", *words.split(), "--repository-prompts", *QUICK])
    train_draft.main()
    assert not list(tmp_path.iterdir())
    said = re.search(r"about ([\d.e+,]+) tokens/s. Learning: about ([\d.e+,-]+) s a step", capsys.readouterr().err)
    assert all(float(rate.replace(",", "")) > 0 for rate in said.groups())


def test_prompts_are_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_draft.py", "TARGET", "--output", "DRAFT"])
    with pytest.raises(SystemExit, match="2"):
        train_draft.main()
    assert "the arguments --prompts --repository-prompts is required" in capsys.readouterr().err


# ---------------------------------------------------------------- the program

QUICK = "--max-new-tokens 12 --layers 1 --vocab-size 600 --rows 8 --batch-size 32 --num-threads 1".split()


@pytest.mark.slow
def test_train_draft_makes_a_draft_that_is_accepted_and_goes_on_where_it_stopped(tmp_path):
    program = "import train_draft; train_draft.HELD_OUT = 2; train_draft.main()"
    folders = [PAIR / "target", "--output", tmp_path / "draft", "--checkpoints", tmp_path / "now"]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def {name}_{part}(self"}) + "\n" for name in ("read", "write", "copy")
                for part in ("file", "line", "all", "name", "path", "data"))
    )  # fmt: skip
    words = [*folders, *QUICK, "--prompts", tmp_path / "prompts.jsonl", "--minutes"]
    trained = functools.partial(run, "-c", program, *words, cwd=ROOT / "examples")
    first, second = (json.loads(trained(minutes)) for minutes in (0.1, 0.3))
    assert second["steps"] > first["steps"] and second["tokens_written"] >= first["tokens_written"]
    assert list(second["acceptance"]) == ["prompts, temperature 0", "prompts, temperature 0.7"]
    assert second["acceptance"]["prompts, temperature 0"]["rate"] > 0.2
    target, tokenizer = pair()
    both = {"tokenizer": tokenizer, "assistant_tokenizer": AutoTokenizer.from_pretrained(tmp_path / "draft")}
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype="float32")
    inputs = tokenizer("def read_name(self", return_tensors="pt", return_token_type_ids=False)
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    output = generate(hf_ssd.enable(target), draft, inputs, max_new_tokens=24, **both)
    assert torch.equal(output.sequences, plain) and sum(k for _, k, _ in output.ssd_stats.verified_rows()) > 0
    with pytest.raises(AssertionError, match="is of a run with other options"):
        trained(0.3, "--seed", 1)
