"""A chat in the terminal, answered by speculative speculative decoding as it is generated.

example:
  hf-ssd chat Qwen/Qwen3-8B Qwen/Qwen3-0.6B --temperature 0.7 --stats

The text so far stays in the caches of both models, so in each turn they read only the new tokens. A model without a
chat template, such as the small pair that comes with hf_ssd, completes the text that you type.

A paste is one message, and so is what stands between two lines of \"""; type /help for the commands.
"""

import argparse
import os
import sys
import time

import torch
from transformers import DynamicCache, TextStreamer, set_seed

import hf_ssd

from ..cache.cache_name import CACHE
from . import doctor, models, terminal
from .options import add_answers, at_least

HELP = """\"""     begins and ends a message of several lines; so does pasting them
/clear  forgets the text so far
/stats  turns the figures after each answer on or off
/help   shows this
/quit   ends (so does Ctrl-D); Ctrl-C stops an answer, which is kept as far as it came"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_answers(parser, default=256)
    parser.add_argument("--system", help="a system message, for models with a chat template")
    parser.add_argument("--seed", type=at_least(0, below=2**32), default=0)
    parser.add_argument("--stats", action="store_true", help="figures after each answer")


class Answer(TextStreamer):
    """Prints an answer as it is generated, and keeps its tokens, so that they are known if the call is interrupted."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.tokens: list[int] = []  # those of the prompt first
        self.shows_dots = sys.stdout.isatty()  # until the first words come
        if self.shows_dots:
            print("...", end="", flush=True)

    def put(self, value: torch.LongTensor) -> None:
        self.tokens += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text or stream_end:
            self.erase_dots()
        super().on_finalized_text(text, stream_end)

    def erase_dots(self) -> None:
        if self.shows_dots:
            self.shows_dots = False
            print("\r\033[K", end="", flush=True)  # erases the line


class Chat:
    """A conversation with an enabled target. The options are those of generate() that say what drafts for it."""

    def __init__(self, args, target, tokenizer, options: dict):
        self.args, self.target, self.tokenizer, self.options = args, target, tokenizer, options
        self.clear()

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [{"role": "system", "content": self.args.system}] if self.args.system else []
        self._forget_cache()

    def _forget_cache(self) -> None:
        """Drops the cache, so that the next call reads the whole text again."""
        self.cache, self.cached = DynamicCache(config=self.target.config), []

    def tokens_after(self, words: str) -> list[int]:
        messages = [*self.messages, {"role": "user", "content": words}]
        if self.tokenizer.chat_template is None:  # a message ends its line, and the model goes on after it
            lines = (one["content"] + "\n" * (one["role"] == "user") for one in messages)
            return self.tokenizer("".join(lines))["input_ids"]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def answer(self, words: str) -> str:
        """Prints the answer as it comes, keeps what was generated of it, and returns a line with its figures."""
        tokens = self.tokens_after(words)
        positions = getattr(self.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        room = self.args.max_new_tokens if positions is None else min(self.args.max_new_tokens, positions - len(tokens))
        if room < 1:
            sizes = f"The text has {len(tokens)} tokens with this message, and the model has {positions} positions"
            raise ValueError(f"{sizes}, which leaves no room for an answer: send a shorter message, or type /clear.")
        cache = self._take_cache(tokens)
        input_ids = torch.tensor([tokens], device=self.target.device)
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), CACHE: cache}
        options = {**self.options, "max_new_tokens": room, "do_sample": False, "return_dict_in_generate": True}
        if self.args.temperature:
            options |= {"do_sample": True, "temperature": self.args.temperature}
        start, answer, output = time.perf_counter(), Answer(self.tokenizer), None
        with terminal.warnings_held():
            try:
                output = self.target.generate(**inputs, **options, streamer=answer)
                self.cache, self.cached = output[CACHE], output.sequences[0].tolist()[:-1]
            except KeyboardInterrupt:
                answer.end()  # prints the words that the streamer held back
            finally:
                answer.erase_dots()
        seconds, new = time.perf_counter() - start, answer.tokens[len(tokens) :]
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        self.messages += [{"role": "user", "content": words}, {"role": "assistant", "content": text}]
        if output is None:
            return f"[stopped after {len(new)} tokens]"
        speed, stats = f"{len(new) / seconds:.1f} tokens/s", output.ssd_stats
        return f"[{len(new)} tokens, {speed}, first after {1e3 * stats.prefill_seconds:.0f} ms, {drafting(stats)}]"

    def _take_cache(self, tokens: list[int]) -> DynamicCache:
        """Returns the cache, cropped to the tokens that the text begins with: a template may change an old answer."""
        cache, cached = self.cache, self.cached
        self._forget_cache()  # a call that ends in an error or by Ctrl-C leaves unverified tokens in its cache
        same = len(os.path.commonprefix([tokens[:-1], cached]))
        if same < len(cached):
            try:
                cache.crop(-(len(cached) - same))
            except (RuntimeError, ValueError):  # a full sliding window has dropped earlier tokens
                return self.cache
        return cache


def drafting(stats: hf_ssd.SSDStats) -> str:
    """Returns the hit rate and acceptance of a call, or why no token was drafted."""
    if any(lookahead for lookahead, _, _ in stats.verified_rows()):
        return f"hit rate {stats.hit_rate:.2f}, acceptance {stats.acceptance_rate:.2f}"
    return f"decoded plainly: {stats.draft_failure or stats.reason}"


def run(args: argparse.Namespace) -> int:
    found = models.chosen(args)
    print(doctor.in_words(doctor.examine(found)), flush=True)
    tokenizer, name = found.target.tokenizer, found.target.name
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, which a chat needs: name one with --tokenizer.")
    if args.system and tokenizer.chat_template is None:
        raise ValueError(f"--system needs a chat template, which {name} does not have.")
    terminal.prepare()
    set_seed(args.seed)
    target = hf_ssd.enable(found.target.load())
    with found.launch_draft(target) as assistant:
        options = {"assistant_model": assistant, "ssd_config": found.config, **found.tokenizers}
        chat = Chat(args, target, tokenizer, options)
        print("Type a message, or /help.")
        while True:
            words = None
            try:
                words = terminal.read_message()
                if words == "/quit":
                    break
                obey(chat, words)
            except EOFError:
                break
            except KeyboardInterrupt:
                if words is not None:
                    print("[stopped]")
                elif sys.stdin.isatty():
                    print(f"\n{terminal.HINT}")
                else:
                    break
            except ValueError as error:
                print(error)
        print()
    return 0


def obey(chat: Chat, words: str) -> None:
    command = words.split()[0] if words.startswith("/") and "\n" not in words else ""
    if words == "/clear":
        chat.clear()
    elif words == "/stats":
        chat.args.stats = not chat.args.stats
    elif words == "/help":
        print(HELP)
    elif command[1:].isalpha():
        print(f"There is no command {command}; /help lists them.")
    elif words.strip():
        figures = chat.answer(words)
        if chat.args.stats or figures.startswith("[stopped"):
            print(figures)
