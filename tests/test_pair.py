"""The embedded pair: what it is worth, and how it is trained."""

import ast
import json
import re

import pair_corpus
import pytest
import quickstart
import torch
import train_parallel_draft
import training
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ssd.cli import check, prompts
from hf_ssd.drafting.heads.loading import head_for

from .helpers.programs import PAIR, ROOT, run
from .helpers.tiny import tiny_model

FLOOR = 0.95  # of the recorded acceptance


@pytest.fixture(scope="module")
def pair():
    models = {
        name: AutoModelForCausalLM.from_pretrained(PAIR / name, dtype="float32")
        for name in ("target", "draft", "parallel_draft")
    }
    return {**models, "tokenizer": AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")}


def test_it_is_small_and_stored_in_bfloat16():
    assert sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file()) <= 16e6
    assert sum(path.stat().st_size for path in (PAIR / "eagle3").iterdir()) <= 2e6
    for name in ("target", "draft", "parallel_draft"):
        assert AutoModelForCausalLM.from_pretrained(PAIR / name).dtype == torch.bfloat16


REPORTS = {"draft": "report.json", "parallel_draft": "parallel_draft/report.json", "eagle3": "eagle3/report.json"}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_drafts_agree_as_often_as_recorded(pair, name):
    recorded = json.loads((PAIR / REPORTS[name]).read_text())["acceptance_rate_on_prompts"]
    draft = pair.get(name) or head_for(PAIR / name, pair["target"])
    assert training.acceptance_on_prompts(pair["target"], draft, pair["tokenizer"]) >= FLOOR * recorded > 0.2


@pytest.mark.slow
def test_a_worse_draft_falls_below_the_floor(pair):
    draft = AutoModelForCausalLM.from_pretrained(PAIR / "draft", dtype="float32")
    draft.model.layers[1].mlp.down_proj.weight.data.zero_()
    recorded = json.loads((PAIR / "report.json").read_text())["acceptance_rate_on_prompts"]
    assert training.acceptance_on_prompts(pair["target"], draft, pair["tokenizer"]) < FLOOR * recorded


# ---------------------------------------------------------------- what a newcomer reads first


def all_prompts() -> list[str]:
    """Returns the prompts of the programs, the page, the README and the quickstart."""
    page = (ROOT / "hf_ssd" / "serving" / "page.html").read_text()
    texts = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/quickstart.md", "docs/serving.md"))
    written = map(ast.literal_eval, re.findall(r'(?:tokenizer\(|generator\(|prompt=)("[^"]+")', texts))
    of_page = re.search(r'<textarea id="prompt"[^>]*>(.*?)</textarea>', page, re.DOTALL)[1]
    return [quickstart.PROMPT, of_page, *check.PROMPTS, *prompts.SNIPPETS, *written]


def loops(ids: list[int]) -> bool:
    """Whether one piece of 8 tokens is there three times."""
    return bool(training.repeats(torch.tensor([ids]), size=8).any())


def test_no_prompt_falls_into_a_loop(pair):
    inputs = pair["tokenizer"](all_prompts(), return_tensors="pt", return_token_type_ids=False, padding=True)
    output = pair["target"].generate(**inputs, max_new_tokens=100, do_sample=False)
    texts = output[:, inputs["input_ids"].shape[1] :].tolist()
    assert loops([1, 2, 3] * 10) and len(texts) > 15
    assert [prompt for prompt, text in zip(all_prompts(), texts) if loops(text)] == []


# ---------------------------------------------------------------- how it is trained


def test_an_interrupted_run_ends_like_one_that_was_not(tmp_path):
    weights = {}
    model, windows = tiny_model(), torch.randint(2, 97, (16, 20), generator=torch.Generator().manual_seed(0))

    def train(name: str, stops_at: int | None) -> None:
        model = tiny_model()

        def loss_of(step):
            if step == stops_at:
                raise KeyboardInterrupt
            ids = training.batch(windows, step, 4, seed=0)
            return training.distillation_loss(model(input_ids=ids).logits[:, :-1], torch.zeros(4, 19, 97))

        training.train(model, loss_of, 8, 1e-2, tmp_path / f"{name}.pt", name, save_every=2)
        weights[name] = model.state_dict()

    train("whole", None)
    with pytest.raises(KeyboardInterrupt):
        train("divided", 5)
    train("divided", None)
    assert all(torch.equal(one, weights["divided"][name]) for name, one in weights["whole"].items())
    assert not torch.equal(weights["whole"]["lm_head.weight"], model.state_dict()["lm_head.weight"])


def trained(program, folder, *words):
    """Runs a program for two steps, with the text of few packages, and with few prompts."""
    fewer = f"import pair_corpus, training, {program}; del pair_corpus.PACKAGES[3:], training.SNIPPETS[2:]"
    return run(
        "-c", f"{fewer}; {program}.main()", "--output", folder, "--checkpoints", folder.parent / "now", "--steps", 2,
        "--steps-per-text", 2, "--num-threads", 1, "--max-files", 2, *words, cwd=ROOT / "examples",
    )  # fmt: skip


@pytest.mark.slow
def test_train_pair_trains_and_saves_a_pair(tmp_path):
    assert all(pair_corpus.files_of(name) and pair_corpus.licence(name) for name in pair_corpus.PACKAGES)
    words = "--draft-steps 2 --loop-steps 2 --batch-size 2 --length 64 --vocab-size 300".split()
    trained("train_pair", tmp_path / "pair", *words)
    report = json.loads((tmp_path / "pair" / "report.json").read_text())
    assert report["acceptance_rate_on_prompts"] <= 1 and report["held_out_loss_nats_per_byte"]["target"] > 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "pair" / "draft").config.vocab_size == 300
    with pytest.raises(AssertionError, match="is of a run with other options"):
        trained("train_pair", tmp_path / "pair", *words, "--batch-size", 4)


@pytest.mark.slow
def test_train_parallel_draft_trains_and_saves_a_draft_that_is_used_as_one(tmp_path):
    output = trained("train_parallel_draft", tmp_path / "draft", "--lookahead", 3)
    assert len(json.loads(output)["acceptance_by_position"]["parallel_temperature_1"]) == 3
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "draft").config.pard_token == 2048


@pytest.mark.slow
def test_train_eagle3_trains_and_saves_a_head_that_loads(pair, tmp_path):
    output = trained("train_eagle3", tmp_path / "head", "--lookahead", 3, "--rows", 2)
    assert len(json.loads(output)["acceptance_by_position"]["eagle3_temperature_1"]) == 3
    assert head_for(tmp_path / "head", pair["target"]).config.target_layers == [2, 6, 11]


@pytest.mark.parametrize("hidden_from_others", [True, False])
def test_a_mask_token_learns_from_what_it_sees_in_use(hidden_from_others):
    draft = train_parallel_draft.with_mask_token(tiny_model())
    ids = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    followed, distance = train_parallel_draft.drop_mask_tokens(12, 4, 0.7, 0.4, torch.Generator().manual_seed(1))
    assert [(distance == d).sum().item() for d in range(4)] == [12, 5, 3, 3]  # of 8 tokens that may be followed
    if not hidden_from_others:  # the mutant
        followed = torch.where(distance > 0, 8, followed)
    logits, errors = train_parallel_draft.all_logits(draft, ids, followed, distance), []
    for node, (start, d) in enumerate(zip(followed.tolist(), distance.tolist())):
        alone = torch.cat([ids[:, : start + 1], torch.full((2, d), draft.config.pard_token)], dim=1)
        errors.append((draft(alone).logits[:, -1, :97] - logits[:, node]).abs().max().item())
    assert (max(errors) < 1e-4) == hidden_from_others
