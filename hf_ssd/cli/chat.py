"""A chat in the terminal, answered by speculative speculative decoding as it is generated.

example:
  hf-ssd chat Qwen/Qwen3-8B Qwen/Qwen3-0.6B --temperature 0.7 --stats

The text so far stays in the caches of both models, so a turn costs what is new in it. A model without a chat template,
such as the small pair that comes with hf_ssd, completes what you type.

Type /help for the commands.
"""

import argparse
import os
import time

import hf_ssd

from . import models

HELP = """/clear  forgets the text so far
/stats  turns the figures behind each answer on or off
/help   shows this
/quit   ends (so does Ctrl-D); Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_models(parser)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--system", help="a system message, for models with a chat template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stats", action="store_true", help="figures behind each answer")


class Chat:
    """
    A conversation.

    Args:
        args (`argparse.Namespace`): Of the command line.
        target (`PreTrainedModel`): An enabled model.
        assistant ([`~hf_ssd.DraftAssistant`]): The draft.
        tokenizer (`PreTrainedTokenizerBase`): Of both.
    """

    def __init__(self, args, target, assistant, tokenizer):
        self.args, self.target, self.assistant, self.tokenizer = args, target, assistant, tokenizer
        self.clear()

    def clear(self) -> None:
        """Forgets everything but the system message."""
        from transformers import DynamicCache

        self.messages = [{"role": "system", "content": self.args.system}] if self.args.system else []
        self.text = ""  # of models without a chat template
        self.cache, self.cached = DynamicCache(config=self.target.config), []

    def tokens_after(self, words: str) -> list[int]:
        """Returns the whole text with what was said now, as tokens."""
        if self.tokenizer.chat_template is None:
            self.text += words + "\n"
            return self.tokenizer(self.text)["input_ids"]
        self.messages.append({"role": "user", "content": words})
        return self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False)

    def answer(self, words: str) -> str:
        """Prints the answer as it comes, and returns the figures behind it."""
        import torch
        from transformers import TextStreamer

        tokens = self.tokens_after(words)
        self._keep(tokens)
        input_ids = torch.tensor([tokens], device=self.target.device)
        sampled = {"do_sample": True, "temperature": self.args.temperature} if self.args.temperature else {}
        text = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        start, times = time.perf_counter(), []
        output = self.target.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            past_key_values=self.cache,
            max_new_tokens=self.args.max_new_tokens,
            **(sampled or {"do_sample": False}),
            assistant_model=self.assistant,
            ssd_config=hf_ssd.SSDConfig(),
            streamer=hf_ssd.RoundStreamer(lambda _: times.append(time.perf_counter()), text),
            return_dict_in_generate=True,
        )
        seconds = time.perf_counter() - start
        new = output.sequences[0, len(tokens) :]
        self.cache, self.cached = output.past_key_values, output.sequences[0].tolist()[:-1]
        answer = self.tokenizer.decode(new, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        self.text += answer
        stats, to_first = output.ssd_stats, times[0] - start
        return (
            f"[{len(new)} tokens, {len(new) / seconds:.1f} tokens/s, first after {1e3 * to_first:.0f} ms, "
            f"hit rate {stats.hit_rate:.2f}, acceptance {stats.acceptance_rate:.2f}]"
        )

    def _keep(self, tokens: list[int]) -> None:
        """Drops from the cache what the text does not begin with: a template may write an old answer another way."""
        same = len(os.path.commonprefix([tokens[:-1], self.cached]))
        if same < len(self.cached):
            self.cache.crop(-(len(self.cached) - same))


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    found = models.chosen(args)
    tokenizer = models.load_tokenizer(found.target)
    if tokenizer is None:
        raise ValueError(f"{found.target} has no tokenizer, which a chat needs; choose another TARGET.")
    from transformers import set_seed

    set_seed(args.seed)
    target = hf_ssd.enable(models.load(found.target, found.dtype, found.device))
    with hf_ssd.launch_draft(found.draft, device=found.draft_device, dtype=found.draft_dtype) as assistant:
        chat, shows_stats = Chat(args, target, assistant, tokenizer), args.stats
        print("Type a message, or /help.")
        while True:
            try:
                words = input("> ")
            except (EOFError, KeyboardInterrupt):
                break
            if words == "/quit":
                break
            if words == "/clear":
                chat.clear()
            elif words == "/stats":
                shows_stats = not shows_stats
            elif words == "/help":
                print(HELP)
            elif words.startswith("/") and words.split()[0][1:].isalpha():
                print(f"There is no command {words.split()[0]}; /help lists them.")
            elif words:
                try:
                    figures = chat.answer(words)
                except KeyboardInterrupt:
                    print("\n(stopped; the text so far is forgotten)")
                    chat.clear()
                    continue
                if shows_stats:
                    print(figures)
        print()
    return 0
