"""SmolLM2-135M-Instruct and Gemma 3 270M as people use them: chats, drafts of another family, and the commands."""

import io
import json
import re
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

import hf_ssd
from hf_ssd.cli import doctor
from hf_ssd.cli.main import main
from hf_ssd.cli.verdict import BUSY

from ..helpers.comparing import as_plain, generate
from ..helpers.public_weights import real_models
from ..helpers.servers import ServerProcess

pytestmark = [pytest.mark.real, pytest.mark.slow]

QUESTION = {"role": "user", "content": "Name three colours."}
CHATS = {
    "the template's system message": [QUESTION],
    "a system message": [{"role": "system", "content": "You answer in French."}, QUESTION],
    "several turns": [
        QUESTION,
        {"role": "assistant", "content": "Red, green and blue."},
        {"role": "user", "content": "And three animals?"},
    ],
}


@pytest.fixture(scope="module")
def smollm(real_folders):
    return hf_ssd.enable(AutoModelForCausalLM.from_pretrained(real_folders["smollm2"], dtype="float32"))


@pytest.fixture(scope="module")
def gemma(real_folders):
    return hf_ssd.enable(AutoModelForCausalLM.from_pretrained(real_folders["gemma3"], dtype="float32"))


@pytest.fixture(scope="module")
def assistant(real_folders):
    """SmolLM2 as its own draft, so that nearly every token is accepted and prepared for."""
    with hf_ssd.launch_draft(real_folders["smollm2"], dtype="float32", num_threads=1) as assistant:
        yield assistant


def asked(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_answers_of_a_chat_are_those_of_plain_generate(smollm, assistant, real_tokenizers, messages):
    inputs = asked(real_tokenizers["smollm2"], messages)
    stats = as_plain(smollm, assistant, inputs, max_new_tokens=16)[0].ssd_stats
    assert stats.hit_rate > 0.5 and stats.tokens_per_round > 3


def test_a_batch_of_chats_with_padding_is_answered_as_by_plain_generate(smollm, assistant, real_tokenizers):
    tokenizer = real_tokenizers["smollm2"]
    texts = [tokenizer.apply_chat_template(of, add_generation_prompt=True, tokenize=False) for of in CHATS.values()]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    output, _ = as_plain(smollm, assistant, inputs, max_new_tokens=10)
    assert output.ssd_stats.tokens_per_round > 1.3


def test_sampled_answers_speculate(smollm, assistant, real_tokenizers):
    set_seed(0)
    inputs = asked(real_tokenizers["smollm2"], [QUESTION])
    options = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.7}
    assert generate(smollm, assistant, inputs, **options).ssd_stats.tokens_per_round > 1.2


def check_coupled(target, draft, inputs, **both):
    """A coupled text is the one of single passes."""
    outputs = []
    for lookahead, with_draft in ((0, {}), (3, {"assistant_model": draft, **both})):
        set_seed(0)
        options = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.7, "return_dict_in_generate": True}
        config = hf_ssd.SSDConfig(lookahead=lookahead, verification="coupled")
        outputs.append(target.generate(**inputs, **options, **with_draft, ssd_config=config))
    assert torch.equal(*(output.sequences for output in outputs)) and outputs[0].ssd_stats.tokens_per_round == 1
    return outputs[1].ssd_stats


def test_a_coupled_text_is_that_of_single_passes(smollm, assistant, real_tokenizers):
    stats = check_coupled(smollm, assistant, asked(real_tokenizers["smollm2"], [QUESTION]))
    assert stats.hit_rate > 0.5 and stats.tokens_per_round > 2


CAPITALS = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is"


def test_smollm_drafts_for_gemma_with_its_own_tokenizer(smollm, gemma, real_tokenizers):
    tokenizer, other = real_tokenizers["gemma3"], real_tokenizers["smollm2"]
    inputs, both = tokenizer(CAPITALS, return_tensors="pt"), {"tokenizer": tokenizer, "assistant_tokenizer": other}
    plain = gemma.generate(**inputs, max_new_tokens=10, do_sample=False)
    output = generate(gemma, smollm, inputs, max_new_tokens=10, **both)
    assert torch.equal(output.sequences, plain) and output.ssd_stats.tokens_per_round > 1.5


def test_a_coupled_text_with_a_draft_of_another_tokenizer_is_that_of_single_passes(smollm, gemma, real_tokenizers):
    tokenizer, other = real_tokenizers["gemma3"], real_tokenizers["smollm2"]
    inputs = tokenizer(CAPITALS, return_tensors="pt")
    with hf_ssd.launch_draft(smollm, num_threads=1) as worker:
        stats = check_coupled(gemma, worker, inputs, tokenizer=tokenizer, assistant_tokenizer=other)
    assert stats.draft_failure is None and stats.tokens_per_round > 1.2


def test_a_model_as_it_comes_from_a_gguf_file_is_target_and_draft(smollm, real_cache, real_tokenizers):
    file = real_models.gguf_file("smollm2", real_cache)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    state = smollm.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in read.state_dict().items())
    inputs = asked(real_tokenizers["smollm2"], [QUESTION])
    with hf_ssd.launch_draft(read, num_threads=1) as assistant:
        drafted, _ = as_plain(smollm, assistant, inputs, max_new_tokens=10)
    verified, _ = as_plain(hf_ssd.enable(read), smollm, inputs, max_new_tokens=10)
    assert drafted.ssd_stats.acceptance_rate == verified.ssd_stats.acceptance_rate == 1
    assert drafted.ssd_stats.hit_rate > 0.5


# ---------------------------------------------------------------- the commands


def answer(target, tokenizer, messages):
    """Of twelve tokens, by plain generate()."""
    inputs = asked(tokenizer, messages)
    ids = target.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_check_measures_the_pair(real_folders, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": QUESTION["content"]}) + "\n")
    words = "--json --seconds 120 --max-new-tokens 12 --repeats 1 --prompts"
    folder = str(real_folders["smollm2"])
    code = main(["check", folder, folder, *words.split(), str(prompts)])
    found = json.loads(capsys.readouterr().out)
    assert found["acceptance"] > 0.9 and found["failure"] is None
    # A draft as large as its target pays at most by its packed weights.
    assert found["verdict"].startswith(["yes", "no: "][code]) and (found["over_plain"] or 0) < 2
    assert found["target"]["parameters"] == 134_515_008


def test_check_of_a_large_pair_gives_a_verdict_in_its_seconds(real_cache, capsys):
    """A machine that other programs keep busy may be too slow for that, and is then told how long it takes."""
    names = ("qwen-coder-1.5b", "qwen-coder-0.5b")
    missing = [package for name in names for package in real_models.missing_packages(name)]
    if missing and not all((real_cache / name).exists() for name in names):
        pytest.skip(f"examples/real_models.py says how to get {', '.join(missing)}")
    folders = [real_models.model_folder(name, real_cache) for name in names]
    start = time.monotonic()
    code, load = main(["check", *map(str, folders), "--json"]), doctor.load()
    found = json.loads(capsys.readouterr().out)
    if load > BUSY and code == 3:
        assert re.search(r"takes about \d+ min: --seconds \d+", found["not_measured"])
        return
    assert code in (0, 1) and found["failure"] is None and found["acceptance"] > 0.4, found
    assert found["draft"]["parameters"] == 630_167_424 and time.monotonic() - start < 300


def test_a_chat_goes_on_for_several_turns(smollm, real_folders, real_tokenizers, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION['content']}\nAnd three animals?\n/quit\n"))
    words = "--max-new-tokens 12 --system".split()
    assert main(["chat", str(real_folders["smollm2"]), str(real_folders["smollm2"]), *words, "You are terse."]) == 0
    printed, messages = capsys.readouterr().out, [{"role": "system", "content": "You are terse."}]
    for words in (QUESTION["content"], "And three animals?"):
        messages.append({"role": "user", "content": words})
        messages.append({"role": "assistant", "content": answer(smollm, real_tokenizers["smollm2"], messages)})
        assert messages[-1]["content"].strip() in printed


def test_a_server_answers_a_chat(smollm, real_folders, real_tokenizers):
    folder = real_folders["smollm2"]
    with ServerProcess(str(folder), "--lookahead", "3", "--budget", "6", draft=folder) as server:
        answered = server.chat(QUESTION["content"], 12).choices[0].message.content
        assert answered == answer(smollm, real_tokenizers["smollm2"], [QUESTION])
        assert server.figures()["accepted_total"] > 0 and server.draft_state == "ready"
