"""The chat, typed as a user would, and what it keeps from turn to turn."""

import io
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
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import hf_ssd
from hf_ssd.cache import packed
from hf_ssd.cli import chat as chat_module
from hf_ssd.cli import models, pair
from hf_ssd.cli.chat import Chat, drafting
from hf_ssd.cli.main import main
from hf_ssd.stats import SSDStats

from ..helpers.programs import run
from ..helpers.tiny import tiny_draft, tiny_model
from ..helpers.vocabularies import TARGET, tokenizer
from .conftest import typed


@pytest.fixture(scope="module")
def embedded():
    """The target, the draft and the tokenizer."""
    models = [AutoModelForCausalLM.from_pretrained(pair.folder(name), dtype="float32") for name in ("target", "draft")]
    return hf_ssd.enable(models[0]), models[1], AutoTokenizer.from_pretrained(pair.folder("target"))


@pytest.fixture(scope="module")
def embedded_worker(embedded):
    with hf_ssd.launch_draft(embedded[1], num_threads=1) as assistant:
        yield assistant


def chat_of(target, tokenizer, draft, max_new_tokens: int) -> Chat:
    args = SimpleNamespace(system=None, temperature=0.0, max_new_tokens=max_new_tokens)
    return Chat(args, target, tokenizer, {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig()})


@pytest.fixture
def chat(embedded, embedded_worker):
    return chat_of(embedded[0], embedded[2], embedded_worker, max_new_tokens=12)


def test_a_conversation():
    words = "class Reader:\n\n/help\n/nothing\n/stats\n    def read(self):\n/clear\nimport os\n/quit\nnot read\n"
    said = run("-m", "hf_ssd", "chat", "--max-new-tokens", 16, "--stats", input=words, timeout=120)
    figures = re.findall(r"\[\d+ tokens, [\d.]+ tokens/s, first after \d+ ms, hit rate [\d.]+, accept", said)
    assert len(figures) == 1  # behind the first answer, and then /stats turned them off
    assert "/clear  forgets the text so far" in said
    assert "There is no command /nothing; /help lists them." in said
    assert said.count("> ") == 9  # /quit was the last thing read


def goes_on_as_plain(chat: Chat, words: str) -> None:
    """Sends a message, whose answer must be that of plain generation from the whole text."""
    tokens = torch.tensor([chat.tokens_after(words)])
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": chat.args.max_new_tokens}
    plain = chat.target.generate(tokens, **options, do_sample=False)
    chat.answer(words)
    answer = chat.tokenizer.decode(plain[0, tokens.shape[1] :], skip_special_tokens=True)
    assert chat.messages[-1] == {"role": "assistant", "content": answer}
    assert chat.cache.get_seq_length() == len(chat.cached) == plain.shape[1] - 1


def test_what_the_text_no_longer_begins_with_is_dropped(chat):
    chat.answer("import os\nimport sys\n")
    said = chat.messages[-1]["content"]
    assert chat.tokenizer.decode(chat.tokens_after("def")) == f"import os\nimport sys\n\n{said}def\n"
    cached = list(chat.cached)
    cache = chat._take_cache(cached[:6] + [cached[6] + 1] + cached[7:] + [5])
    assert cache.get_seq_length() == 6 and not chat.cached


@pytest.mark.parametrize("family", ["mistral", "gemma"])
def test_a_chat_with_full_windows_goes_on_when_its_template_changes_an_old_answer(family):
    """The windows have 6 tokens, and the draft is in this process, so that it starts at once."""
    its_tokenizer = tokenizer(TARGET)
    its_tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    target = hf_ssd.enable(tiny_model(family, vocab_size=len(TARGET)))
    chat = chat_of(target, its_tokenizer, tiny_draft(family, vocab_size=len(TARGET)), max_new_tokens=10)
    chat.answer("hello")
    chat.messages[-1]["content"] = chat.messages[-1]["content"][:-2] + "..."
    goes_on_as_plain(chat, "again")


def test_ctrl_c_in_an_answer_keeps_the_answer_so_far_and_the_conversation(chat, monkeypatch, capsys):
    chat.answer("import os\n")
    before, shows = list(chat.messages), TextStreamer.on_finalized_text

    def interrupted(streamer, text, stream_end=False):
        shows(streamer, text, stream_end)
        if text and not stream_end:
            signal.raise_signal(signal.SIGINT)

    chat.args.max_new_tokens = 40
    words = "class Reader:\n    def __init__(self, path):\n"
    with monkeypatch.context() as patch:
        patch.setattr(TextStreamer, "on_finalized_text", interrupted)
        assert re.fullmatch(r"\[stopped after \d+ tokens\]", chat.answer(words))
    said = chat.messages[-1]["content"]
    assert chat.messages[:2] == before and 0 < len(chat.tokenizer(said)["input_ids"]) < 40
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
    words = "import os"
    while (length := len(chat.tokens_after(words))) < 2040:
        words += "\n\nimport os"
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
    assert text.strip() == chat.messages[-1]["content"].strip() and "Give the draft" in warnings


def test_stats_say_why_nothing_was_drafted(chat):
    chat.args.max_new_tokens = 1
    assert "decoded plainly: " in chat.answer("import os\n")
    found = drafting(SSDStats(records=[], reason="a reason", draft_failure="it died"))
    assert found == "decoded plainly: it died"


PACKED = hf_ssd.SSDConfig(lookahead=3, budget=4, pack_weights=True)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["draft", "eagle3"])
def test_a_chat_keeps_no_second_copy_of_packed_weights_unless_a_head_shares_them(draft, embedded, monkeypatch, capsys):
    owned, own, plain = [], packed.own, embedded[0]
    monkeypatch.setattr(packed, "own", lambda model: owned.append(model) or own(model))
    monkeypatch.setattr(models, "settings", lambda args: PACKED)
    typed(monkeypatch, "import os\n\ndef main(\n/stats\nimport sys\n/quit\n")
    assert main(["chat", pair.folder("target"), pair.folder(draft), "--max-new-tokens", "24"]) == 0
    said = capsys.readouterr().out
    assert float(re.search(r"acceptance ([\d.]+)\]", said)[1]) > 0.2
    ids = embedded[2]("import os\n", return_tensors="pt")["input_ids"]
    tokens = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert embedded[2].decode(tokens[0, ids.shape[1] :], skip_special_tokens=True).rstrip() in said
    assert len(owned) == (draft == "draft")
    for model in owned:
        layers = [layer for layer in model.modules() if type(layer) is torch.nn.Linear]
        assert sum(bool(layer.weight.isnan().all()) for layer in layers) >= len(layers) - 1  # the head's may be shared
