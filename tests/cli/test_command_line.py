"""What a command does before it works, how a check spends its time, and pairs with two tokenizers."""

import dataclasses
import json
import re
import signal
import sys
from types import SimpleNamespace

import pytest

import hf_ssd
from hf_ssd.cli import check, models
from hf_ssd.cli.chat import drafting
from hf_ssd.cli.main import COMMANDS, main
from hf_ssd.cli.methods import Bench
from hf_ssd.rounds import AHEAD, IN_TURN, RoundRecord
from hf_ssd.stats import SSDStats

from ..helpers.suites import slowly
from ..helpers.tiny import tiny_model
from ..helpers.vocabularies import TARGET, renamed_draft, tokenizer
from .conftest import checked, typed

OTHER = [*reversed(TARGET)]  # the same tokens with other ids


def test_bars_are_for_terminals(monkeypatch, capsys):
    switched = []
    monkeypatch.setattr("transformers.utils.logging.disable_progress_bar", lambda: switched.append("off"))
    monkeypatch.setattr(models, "chosen", lambda args, **_: (_ for _ in ()).throw(ValueError("enough")))
    assert main(["chat"]) == 2 and switched == ["off"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["chat"]) == 2 and switched == ["off"]


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_a_command_starts_ends_it_without_a_traceback(command, monkeypatch):
    pytest.importorskip("fastapi")
    monkeypatch.setattr(models, "chosen", lambda args, **_: signal.raise_signal(signal.SIGINT))
    assert main([command] + ["--port", "0"] * (command == "serve")) == 130


# ---------------------------------------------------------------- a check ends in time, and says one thing


class Clock:
    """A clock that only calls move: by `seconds` for a prompt, and as much for each token."""

    def __init__(self, monkeypatch, seconds: float):
        self.now, self.seconds, self.calls, self.run, longest = 0.0, seconds, [], Bench.run, Bench.longest
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        for module in ("check", "methods"):
            monkeypatch.setattr(f"hf_ssd.cli.{module}.time", clock)
        monkeypatch.setattr(Bench, "run", lambda bench, method, turn: self.timed(bench, method, turn))
        self.limits = []  # the clock of transformers is real, so calls have no limit
        monkeypatch.setattr(Bench, "longest", lambda bench: self.limits.append(longest(bench)))

    def timed(self, bench, method, turn):
        before, found = self.now, self.run(bench, method, turn)
        limit = self.limits[-1]
        took = self.seconds * (found.tokens if limit is None else max(1, min(found.tokens, limit / self.seconds)))
        self.now = before + took
        name = "SSD" if found.stats else "assisted" if "assistant_model" in method.options else "plain"
        self.calls.append((name, bench.options["max_new_tokens"], limit, took))
        return dataclasses.replace(found, prefill=self.seconds, seconds=took)


@pytest.mark.parametrize(
    "seconds, tokens, turns",
    [*(slowly(*one) for one in ((0.01, 64, 5), (0.15, 24, 3), (0.4, 12, 3))), (0.9, 12, 1)],
)
def test_a_check_measures_within_its_seconds_what_fits(monkeypatch, capsys, seconds, tokens, turns):
    """The quickest pair is measured whole, and of slower pairs shorter answers, until there is plain and SSD alone."""
    clock = Clock(monkeypatch, seconds)
    code = main(["check", "--json", "--seconds", "60"])
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert code in (0, 1) and found["verdict"] and found["not_measured"] is None and clock.now <= 61
    assert [name for name, *_ in clock.calls[:2]] == ["plain", "SSD"]
    assert all(limit is None for _, _, limit, _ in clock.calls[:2]) and all(limit for _, _, limit, _ in clock.calls[2:])
    assert all(tokens <= asked <= 64 for _, asked, _, _ in clock.calls[2:])
    names = [name for name, *_ in clock.calls]
    assert names.count("plain") == 1 + turns and found["skipped"] == (seconds >= 0.4) == ("assisted" not in names)
    assert ("a check of this pair takes about" in output.err) == (tokens < 64) and "loading both models" in output.err


@pytest.mark.parametrize("as_json", [slowly(False), True])
def test_a_pair_too_slow_for_the_seconds_is_not_measured_and_the_seconds_that_it_needs_suffice(
    as_json, monkeypatch, capsys
):
    """The first answers of the pair take longer than all seconds, and are waited for."""
    words, clock = ["check", "--repeats", "3", "--max-new-tokens", "16"], Clock(monkeypatch, 4.0)
    assert main([*words, *["--json"] * as_json]) == 3
    output = capsys.readouterr()
    said = json.loads(output.out)["not_measured"] if as_json else output.err
    found = re.search(r"a check of this pair takes about (\d+) min: --seconds (\d+)", said)
    assert len(clock.calls) == 2 and "programs for each core" in said
    if as_json:
        assert list(json.loads(output.out)) == check.KEYS
        return
    assert abs(int(found[2]) / 60 - int(found[1])) <= 1
    Clock(monkeypatch, 4.0)
    assert main([*words, "--json", "--seconds", found[2]]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert not found["skipped"] and found["verdict"] and list(found) == check.KEYS


def test_a_check_asks_mixed_questions_of_a_model_with_a_chat_template_and_lets_answers_end(monkeypatch):
    chats, texts = (check.prompts_for(SimpleNamespace(chat_template=of)) for of in ("a template", None))
    assert len(chats) == 3 and all(word in text for word, text in zip(("class", "Explain", "Summarize"), chats))
    assert texts == check.prompts_for(None) == check.PROMPTS
    seen = []
    monkeypatch.setattr(Bench, "run", lambda bench, method, turn: seen.append(bench.options) or sys.exit())
    with pytest.raises(SystemExit):
        main(["check"])
    assert "min_new_tokens" not in seen[0]


@pytest.mark.parametrize("command", ["check", slowly("bench")])
def test_answers_that_end_with_their_first_token_have_no_speed(command, monkeypatch, capsys):
    """A slow plain call comes no further within its time, and an answer may end at once."""
    run, changed = Bench.run, []

    def short(bench, method, turn):
        found = run(bench, method, turn)
        if not method.options:
            changed.append(turn)
            return dataclasses.replace(found, tokens=found.first)
        return found

    monkeypatch.setattr(Bench, "run", short)
    words = {"check": [], "bench": ["--in-turn-lookaheads", "3", "--assistant-tokens", "3", "--one-table"]}
    code = main([command, "--repeats", "1", "--max-new-tokens", "8", *words[command]])
    assert code == {"check": 3, "bench": 2}[command]
    assert changed and "end with their first tokens, so no speed is known" in capsys.readouterr().err


def test_the_plan_of_a_check_is_that_of_most_rounds_whatever_was_planned_last(monkeypatch, capsys):
    """The last plan may be a probe of another mode, which has another reason."""
    conclude = check.conclude

    def probing(methods, first, planner, *rest):
        planner.reason = "probe: drafting in turn at acceptance 0.5"
        return conclude(methods, first, planner, *rest)

    monkeypatch.setattr(check, "conclude", probing)
    _, found = checked(capsys, "--repeats", "1", "--max-new-tokens", "16")
    assert "probe: drafting in turn at acceptance" not in found["plan"]
    plainly = ("not drafting", "decoded plainly", "the pair is not known yet: decoded plainly")
    assert found["drafts"] != found["plan"].startswith(plainly) or "n-grams" in found["plan"]  # in plain rounds


def test_acceptance_is_one_figure_of_all_tokens_that_were_drafted():
    def run(*rounds):
        records = [RoundRecord(sources=["primary"], lookahead=k, accepted=[n]) for k, n in rounds]
        return SimpleNamespace(stats=SSDStats(records=records))

    assert check.acceptance_of([run((4, 4), (4, 0)), run((0, 0), (0, 0))]) == 4 / 5
    assert check.acceptance_of([run((0, 0))]) is None


# ---------------------------------------------------------------- different tokenizers


@pytest.fixture(scope="module")
def different(tmp_path_factory):
    """A target and a draft that always agrees with it and has other ids, each with its tokenizer, in two folders."""
    folders = [tmp_path_factory.mktemp("different") for _ in range(2)]
    models = (tiny_model(vocab_size=len(TARGET)), renamed_draft(OTHER, disagreement=0.0))
    for folder, model, tokens in zip(folders, models, (TARGET, OTHER)):
        model.save_pretrained(folder)
        tokenizer(tokens).save_pretrained(folder)
    return [*map(str, folders)]


def test_check_measures_a_pair_with_different_tokenizers(different, capsys):
    code, found = checked(capsys, *different, "--repeats", "1", "--max-new-tokens", "24")
    assert code in (0, 1) and found["verdict"].startswith(("yes: ", "no: ")), found
    assert found["acceptance"] > 0.9, found  # some rounds are drafted in any case, to know the pair


def test_a_chat_with_a_pair_of_different_tokenizers(different, monkeypatch, capsys):
    typed(monkeypatch, "hello\n/quit\n")
    seen, says = [], drafting
    monkeypatch.setattr("hf_ssd.cli.chat.drafting", lambda stats: seen.append(stats) or says(stats))
    assert main(["chat", *different, "--max-new-tokens", "60", "--stats"]) == 0
    found = re.search(r"\[60 tokens, .* hit rate [\d.]+, acceptance ([\d.]+)\]", capsys.readouterr().out)
    assert float(found[1]) > 0.9
    assert {record.mode for record in seen[0].records if record.lookahead} & {IN_TURN, AHEAD}


def test_a_server_gets_the_tokenizer_of_a_draft_that_has_its_own(different, monkeypatch, capsys):
    pytest.importorskip("fastapi")
    from hf_ssd.serving.server import Server

    seen = []
    monkeypatch.setattr(hf_ssd, "enable", lambda model, *_, assistant_tokenizer, **__: seen.append(assistant_tokenizer))
    monkeypatch.setattr(Server, "run", lambda server: None)
    assert main(["serve", *different, "--port", "0"]) == 0
    assert [len(one) for one in seen] == [len(OTHER)]
