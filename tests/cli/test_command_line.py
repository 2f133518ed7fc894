"""The command line as people use it: chats that go on, pairs of any kind, and refusals before work."""

import dataclasses
import io
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest
from transformers import TextStreamer

import hf_ssd
from hf_ssd.cli import chat as chat_module
from hf_ssd.cli import check, models
from hf_ssd.cli.chat import Chat, drafting
from hf_ssd.cli.main import COMMANDS, main
from hf_ssd.cli.methods import Bench
from hf_ssd.rounds import AHEAD, IN_TURN, RoundRecord
from hf_ssd.stats import SSDStats

from ..helpers.suites import slowly
from ..helpers.tiny import tiny_draft, tiny_model
from ..helpers.vocabularies import TARGET, renamed_draft, tokenizer
from .conftest import checked, goes_on_as_plain

OTHER = [*reversed(TARGET)]  # the same tokens with other ids
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def typed(monkeypatch, text: str | bytes) -> None:
    raw = text if isinstance(text, bytes) else text.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


# ---------------------------------------------------------------- a chat goes on


@pytest.mark.parametrize("family", ["mistral", "gemma"])
def test_a_chat_with_full_windows_goes_on_when_its_template_changes_an_old_answer(family):
    """The windows have 6 tokens, and the draft is in this process, so that it starts at once."""
    its_tokenizer = tokenizer(TARGET)
    its_tokenizer.chat_template = TEMPLATE
    target = hf_ssd.enable(tiny_model(family, vocab_size=len(TARGET)))
    args = SimpleNamespace(system=None, temperature=0.0, max_new_tokens=10)
    chat = Chat(args, target, tiny_draft(family, vocab_size=len(TARGET)), its_tokenizer)
    chat.answer("hello")
    chat.messages[-1]["content"] = chat.messages[-1]["content"][:-2] + "..."
    goes_on_as_plain(chat, "again")


def test_ctrl_c_in_an_answer_keeps_the_answer_so_far_and_the_conversation(chat, monkeypatch, capsys):
    chat.answer("import os\n")
    before, shows = chat.text, TextStreamer.on_finalized_text

    def interrupted(streamer, text, stream_end=False):
        shows(streamer, text, stream_end)
        if text and not stream_end:
            signal.raise_signal(signal.SIGINT)

    chat.args.max_new_tokens = 40
    words = "class Reader:\n    def __init__(self, path):\n"
    with monkeypatch.context() as patch:
        patch.setattr(TextStreamer, "on_finalized_text", interrupted)
        assert re.fullmatch(r"\[stopped after \d+ tokens\]", chat.answer(words))
    said = chat.text.removeprefix(f"{before}{words}\n")
    assert chat.text.startswith(before) and 0 < len(chat.tokenizer(said)["input_ids"]) < 40
    assert capsys.readouterr().out.rstrip().endswith(said.rstrip())
    chat.args.max_new_tokens = 12
    goes_on_as_plain(chat, "\n    def read(self):\n")


def test_a_message_longer_than_the_positions_gets_a_sentence_and_the_chat_goes_on(monkeypatch, capsys):
    typed(monkeypatch, "import os\n" + "word " * 3000 + "\nimport sys\n/quit\n")
    assert main(["chat", "--max-new-tokens", "8", "--stats"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"> The text has \d{4} tokens with this message, and the model has 2048 positions", output)
    assert len(re.findall(r"\[8 tokens, ", output)) == 2


def test_an_answer_ends_where_the_positions_end(chat):
    length = len(chat.tokens_after("import os"))
    words = "import os" + "\n\nimport os" * (
        (2048 - length - 3) // (len(chat.tokens_after("import os\n\nimport os")) - length)
    )
    length = len(chat.tokens_after(words))
    chat.args.max_new_tokens = 500
    figures = chat.answer(words)
    assert int(figures[1:].split()[0]) <= 2048 - length < 500


@pytest.mark.parametrize(
    "text, messages",
    [
        (b"# na\xefve caf\xe9\n   \n\t\n\n/quit\n", ["# na\ufffdve caf\ufffd"]),
        (
            '"""\none\n\n/quit\n"""\n"""two"""\n"""\n"""\nthree\n"""four\nfive',
            ["one\n\n/quit", "two", "three", "four\nfive"],
        ),
    ],
)
def test_bytes_that_are_no_utf8_and_lines_between_quotes(text, messages, monkeypatch):
    typed(monkeypatch, text)
    sent = []
    monkeypatch.setattr(Chat, "answer", lambda chat, words: sent.append(words) or "[1 tokens]")
    assert main(["chat"]) == 0 and sent == messages


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, *words: str):
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 100))
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        # The terminal is the controlling one, so that its Ctrl-C is a signal for the program.
        command = ["setsid", "--ctty", sys.executable, "-m", "hf_ssd", "chat", *words]
        environment = {**os.environ, "TERM": "xterm"}
        self.process = subprocess.Popen(command, **streams, env=environment)
        os.close(theirs)

    def read_until(self, words: str, seconds: float = 90) -> str:
        """Returns the output up to these words, or after so many seconds whatever came."""
        seen, deadline = "", time.monotonic() + seconds
        while words not in seen and time.monotonic() < deadline:
            if select.select([self.ours], [], [], 1)[0]:
                seen += os.read(self.ours, 4096).decode()
        return seen

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.mark.slow
def test_on_a_terminal_a_paste_is_one_message_lines_are_edited_and_ctrl_c_says_how_to_leave(fresh_python):
    """Loading and waiting are seen there too. The prompt asks the terminal to mark pastes, as this one does."""
    prompt, sign_of_life = "\x1b[?2004h> ", "...\r\x1b[K"
    with Terminal("--max-new-tokens", "4", "--stats") as terminal:
        begun = terminal.read_until(prompt)
        assert "Loading weights" in begun and "\ndraft  " in begun.replace("\r", "") and begun.endswith(prompt)
        terminal.type(b"\x1b[200~class A:\r    x = 1\r    y = 2\r\x1b[201~\r")
        seen = terminal.read_until(prompt)
        assert sign_of_life in seen and seen.count("[4 tokens, ") == 1, seen
        terminal.type(b"/hlp\x1b[D\x1b[De\r")  # an "e" is put in after two steps to the left
        helped = terminal.read_until(prompt)
        assert "forgets the text so far" in helped and "[4 tokens, " not in helped  # there was no more to answer
        seen, hint = "", "Type /quit or press Ctrl-D to leave."
        for _ in range(10):  # Python notices a Ctrl-C only once it waits for keys, a moment after the prompt
            terminal.type(b"\x03")
            seen += terminal.read_until(hint, seconds=5)
            if hint in seen:
                break
        assert hint in seen
        terminal.type(b'"""import os\rimport sys"""\r')
        seen = ""
        for _ in range(11):  # prompts after the hints first
            seen += terminal.read_until(prompt, seconds=20)
            if "[4 tokens, " in seen:
                break
        assert seen.count("[4 tokens, ") == 1, seen
        terminal.type(b"\x04")
        assert terminal.process.wait(timeout=60) == 0


def test_bars_are_for_terminals(monkeypatch, capsys):
    switched = []
    monkeypatch.setattr("transformers.utils.logging.disable_progress_bar", lambda: switched.append("off"))
    monkeypatch.setattr(models, "chosen", lambda args, **_: (_ for _ in ()).throw(ValueError("enough")))
    assert main(["chat"]) == 2 and switched == ["off"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["chat"]) == 2 and switched == ["off"]


@pytest.mark.parametrize("owner, name", [(Chat, "tokens_after"), (Chat, "_take_cache"), (chat_module, "drafting")])
def test_ctrl_c_beside_the_call_stops_that_message_alone(owner, name, monkeypatch, capsys):
    function, stopped = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        if not stopped:
            stopped.append(name)
            signal.raise_signal(signal.SIGINT)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    typed(monkeypatch, "import os\nimport sys\n/quit\n")
    assert main(["chat", "--max-new-tokens", "4", "--stats"]) == 0
    output = capsys.readouterr().out
    assert stopped and output.count("[stopped]") == 1 and output.count("[4 tokens, ") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_a_command_starts_ends_it_without_a_traceback(command, monkeypatch):
    pytest.importorskip("fastapi")
    monkeypatch.setattr(models, "chosen", lambda args, **_: signal.raise_signal(signal.SIGINT))
    assert main([command] + ["--port", "0"] * (command == "serve")) == 130


def test_a_call_that_fails_leaves_a_chat_that_goes_on(chat, monkeypatch):
    chat.answer("import os\n")
    generate = chat.target.generate

    def fail(**options):
        generate(**{**options, "max_new_tokens": 4})
        raise ValueError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(chat.target, "generate", fail)
        with pytest.raises(ValueError, match="no more"):
            chat.answer("import sys\n")
    assert chat.cache.get_seq_length() == len(chat.cached)
    goes_on_as_plain(chat, "import re\n")


def test_characters_that_the_terminal_cannot_show_do_not_end_the_chat(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(Chat, "answer", lambda chat, words: print("caf\u00e9") or "[1 tokens]")
    typed(monkeypatch, "one\ntwo\n/quit\n")
    assert main(["chat"]) == 0
    shown.flush()
    assert shown.buffer.getvalue().count(b"caf?") == 2


def test_a_warning_does_not_land_inside_the_text_that_is_streamed(chat, monkeypatch, capsys):
    shows = TextStreamer.on_finalized_text

    def warn(streamer, text, stream_end=False):
        logging.getLogger("hf_ssd.planning.planner").warning("Give the draft a device of its own.")
        shows(streamer, text, stream_end)

    monkeypatch.setattr(TextStreamer, "on_finalized_text", warn)
    monkeypatch.setattr(sys, "stderr", sys.stdout)  # as a terminal, which shows both
    chat.answer("import os\n")
    text, warnings = capsys.readouterr().out.split("Give the draft", 1)
    assert text.strip() == chat.text.removeprefix("import os\n\n").strip() and "Give the draft" in warnings


def test_stats_say_why_nothing_was_drafted(chat):
    chat.args.max_new_tokens = 1
    assert "decoded plainly: " in chat.answer("import os\n")
    found = drafting(SSDStats(records=[], reason="a reason", draft_failure="it died"))
    assert found == "decoded plainly: it died"


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
    chats, texts = (check.prompts_for(SimpleNamespace(chat_template=of)) for of in (TEMPLATE, None))
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
