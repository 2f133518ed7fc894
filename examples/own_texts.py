"""Text that a target writes after prompts, kept in files with the target's most likely tokens at each place."""

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm.auto import tqdm
from training import save
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

LIKELIEST = 64  # tokens of each distribution that are kept
KEEP_EVERY = 60  # seconds between two times that an unfinished batch is saved
LEAST_SHARE = 0.1  # of the whole time, which a batch has even if the time is over


def load_tokenizer(name: str):
    """Returns a tokenizer that pads on the left, with a token to pad with."""
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def as_messages(prompts: list[str], tokenizer) -> list[str]:
    """Returns prompts as a user's messages to a model with a chat template; those of other models stay as they are."""
    if tokenizer.chat_template is None:
        return prompts
    options = {"add_generation_prompt": True, "tokenize": False}
    return [tokenizer.apply_chat_template([{"role": "user", "content": text}], **options) for text in prompts]


class Recorder(LogitsProcessor):
    """Keeps the most likely tokens of each step, and their probabilities."""

    def __init__(self):
        self.steps = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        p, ids = scores.float().softmax(-1).topk(min(LIKELIEST, scores.shape[-1]))
        self.steps.append((ids.int().cpu(), p.half().cpu()))
        return scores


class Clock(StoppingCriteria):
    """
    Ends all answers when the time is over.

    Args:
        seconds (`float`): The time.
        moved (`Callable[[torch.LongTensor], None]`): Is called after each step with the tokens so far.
    """

    def __init__(self, seconds: float, moved: Callable[[torch.LongTensor], None]):
        self.end, self.moved = time.perf_counter() + seconds, moved

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        self.moved(input_ids)
        is_over = time.perf_counter() >= self.end
        return torch.full((len(input_ids),), is_over, dtype=torch.bool, device=input_ids.device)


def write(
    target, tokenizer, prompts: list[str], new_tokens: int, temperature: float, seconds: float = math.inf, moved=None
) -> list[dict]:
    """
    Lets a target answer prompts, all at once.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, which pads on the left.
        prompts (`list[str]`): The prompts, with their chat templates.
        new_tokens (`int`): Most tokens of an answer.
        temperature (`float`): 0 is greedy.
        seconds (`float`, *optional*): Answers that are not finished then are cut.
        moved (`Callable`, *optional*): Is called after each step with a function that returns the texts so far.

    Returns:
        `list[dict]`: A text for each prompt: `ids` of shape `(length,)`, the tokens of the prompt and of the answer;
        `likely` and `p` of shape `(answer_length, 64)`, the most likely tokens in the place of each token of the
        answer, and the probabilities of these tokens at temperature 1.
    """
    templated = tokenizer.chat_template is not None
    inputs = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False,
                       add_special_tokens=not templated).to(target.device)  # fmt: skip
    recorder, length = Recorder(), inputs["input_ids"].shape[1]
    ends = target.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends)
    masks = inputs["attention_mask"].cpu().bool()

    def texts_of(sequences: torch.LongTensor) -> list[dict]:
        sequences = sequences.cpu()
        likely, p = (torch.stack(parts[: sequences.shape[1] - length], dim=1) for parts in zip(*recorder.steps))
        texts = []
        for row, (ids, mask) in enumerate(zip(sequences, masks)):
            is_end = torch.isin(ids[length:], ends)
            count = int(is_end.int().argmax()) + 1 if is_end.any() else len(ids) - length
            kept = torch.cat([ids[:length][mask], ids[length : length + count]])
            texts.append({"ids": kept.int(), "likely": likely[row, :count].clone(), "p": p[row, :count].clone()})
        return texts

    clock = Clock(seconds, lambda sequences: moved and moved(lambda: texts_of(sequences)))
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    sequences = target.generate(
        **inputs, max_new_tokens=new_tokens, logits_processor=LogitsProcessorList([recorder]),
        stopping_criteria=StoppingCriteriaList([clock]), **(drawn if temperature else {"do_sample": False}),
    )  # fmt: skip
    return texts_of(sequences)


def write_texts(target, tokenizer, prompts: list[str], held_out: list[str], folder: Path, seconds: float, args):
    """
    Writes texts until the time is over, every second batch greedily, and keeps each batch in a file, so that an
    interrupted run goes on: the texts of an unfinished batch are kept as far as they were written. The first batch
    answers the prompts held out, greedily.

    Returns:
        `tuple[list[dict], list[dict]]`: The texts to learn from, as [`write`] returns them, and those held out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    batches, spent = [], 0.0
    with tqdm(total=round(seconds), desc="writing", unit="s", bar_format="{l_bar}{bar}| {n}/{total} s{postfix}") as bar:
        while spent < seconds or len(batches) < 2:
            index = len(batches)
            path = folder / f"{index:05}.pt"
            if not path.exists():
                torch.manual_seed(args.seed + index)
                chosen = block(prompts, index - 1, args.batch_size, args.seed) if index else held_out
                temperature = args.temperature if index and index % 2 == 0 else 0.0
                file = BatchFile(path, functools.partial(_show, bar, spent))
                left = max(seconds - spent, LEAST_SHARE * seconds)
                with file:
                    file.texts = write(target, tokenizer, chosen, args.max_new_tokens, temperature, left, file.moved)
            batches.append(torch.load(path))
            spent += batches[-1]["seconds"]
            tokens = sum(len(text["p"]) for batch in batches for text in batch["texts"])
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            _show(bar, spent, 0.0)
    return [text for batch in batches[1:] for text in batch["texts"]], batches[0]["texts"]


def _show(bar: tqdm, before: float, seconds: float) -> None:
    bar.n = min(bar.total, round(before + seconds))
    bar.refresh()


class BatchFile:
    """
    Keeps the texts of a batch in a file: once in [`KEEP_EVERY`] seconds, and when the context ends, even by an error.

    Args:
        path (`Path`): The file.
        passed (`Callable[[float], None]`): Is called after each step with the seconds since the batch began.
    """

    def __init__(self, path: Path, passed: Callable[[float], None]):
        self.path, self.passed = path, passed
        self.start = self.saved = time.perf_counter()
        self.texts: list[dict] | None = None
        self.so_far: Callable[[], list[dict]] | None = None

    def moved(self, so_far: Callable[[], list[dict]]) -> None:
        """Takes the function that returns the texts so far."""
        self.so_far, now = so_far, time.perf_counter()
        self.passed(now - self.start)
        if now - self.saved > KEEP_EVERY:
            self._save(so_far())

    def _save(self, texts: list[dict]) -> None:
        self.saved = time.perf_counter()
        save(self.path, {"texts": texts, "seconds": self.saved - self.start})

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        if self.texts is not None:
            self._save(self.texts)
        elif self.so_far is not None:
            self._save(self.so_far())


def block(prompts: list, index: int, size: int, seed: int, blocks: int = 8, key: Callable = len) -> list:
    """
    Returns the prompts of a batch: all prompts in a random order, again and again. Those of 8 batches are sorted by
    their lengths, so that a batch has little padding.
    """
    size = min(size, len(prompts))
    group, place = divmod(index, blocks)
    orders, chosen = {}, []
    for number in range(group * blocks * size, (group + 1) * blocks * size):
        epoch, i = divmod(number, len(prompts))
        if epoch not in orders:
            orders[epoch] = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed + epoch))
        chosen.append(prompts[orders[epoch][i]])
    place = int(torch.randperm(blocks, generator=torch.Generator().manual_seed(seed + group))[place])
    return sorted(chosen, key=key)[place * size : (place + 1) * size]
