"""Log-probabilities of tokens by the model's raw logits, in OpenAI's two forms."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers.decoders import DecodeStream
from transformers import DynamicCache, PreTrainedModel

from ..cache.cache_name import cache_argument
from ..generation.spelling import spelled_tokens

LOWEST = -9999.0  # as OpenAI's, for a token that the model excludes: JSON has no infinity
PIECE = 256  # positions of a prompt whose logits are in memory at a time


@dataclass
class Entry:
    """A token, its log-probability, and the most likely tokens at its place with theirs. A first token has neither."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


def entries(tokens: list[int], logits: torch.Tensor, count: int) -> list[Entry]:
    """Returns the entries of tokens, with `count` likely tokens each, by logits `(tokens, vocab_size)`."""
    scores = logits.to(torch.float32).log_softmax(-1).nan_to_num(LOWEST, neginf=LOWEST).clamp(min=LOWEST)
    chosen = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    values, ids = (part.tolist() for part in scores.topk(min(count, scores.shape[1])))
    return [Entry(token, one, list(zip(*top))) for token, one, *top in zip(tokens, chosen, ids, values)]


@torch.no_grad()
def entries_of_prompt(model: PreTrainedModel, tokens: list[int], count: int, check: Callable) -> list[Entry]:
    """Returns the entries of a prompt, which is read in pieces. `check` is called before each."""
    found, ids = [Entry(tokens[0])], torch.tensor([tokens], device=model.device)
    cache = {cache_argument(model): DynamicCache(config=model.config)}
    for start in range(0, len(tokens) - 1, PIECE):
        check()
        stop = min(start + PIECE, len(tokens) - 1)
        mask = torch.ones_like(ids[:, :stop])
        output = model(ids[:, start:stop], attention_mask=mask, use_cache=True, return_dict=True, **cache)
        found += entries(tokens[start + 1 : stop + 1], output.logits[0], count)
    return found


class Names:
    """The tokens of a tokenizer as clients are told them."""

    def __init__(self, tokenizer, size: int):
        self.tokenizer, self.size = tokenizer, size

    @functools.cached_property
    def spelled(self) -> dict[int, bytes | str]:
        return spelled_tokens(self.tokenizer, self.size)

    def name(self, token: int) -> str:
        """Returns the text of a token, and the bytes of one that is part of a character, each by another name."""
        spelled = self.spelled.get(token, f"token_id:{token}")
        if isinstance(spelled, str):
            return spelled
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def in_chat(self, entries: list[Entry]) -> dict:
        content = [
            {**self._described(one.token, one.logprob), "top_logprobs": [self._described(*top) for top in one.top]}
            for one in entries
        ]
        return {"content": content, "refusal": None}

    def _described(self, token: int, logprob: float) -> dict:
        spelled = self.spelled.get(token)  # a special token shows nothing, so it has no bytes
        numbers = list(spelled) if isinstance(spelled, bytes) else None
        return {"token": self.name(token), "logprob": logprob, "bytes": numbers}

    def in_completion(self, entries: list[Entry], offsets: list[int]) -> dict:
        """Returns entries in the form of completions. The likely tokens of each include the token itself."""
        return {
            "tokens": [self.name(one.token) for one in entries],
            "token_logprobs": [one.logprob for one in entries],
            "top_logprobs": [None if one.top is None else self._by_name(one) for one in entries],
            "text_offset": offsets,
        }

    def _by_name(self, entry: Entry) -> dict[str, float]:
        found = {}
        for token, logprob in [*entry.top, (entry.token, entry.logprob)]:  # the likelier of two with one name
            found.setdefault(self.name(token), logprob)
        return found

    def offsets(self, tokens: list[int]) -> list[int]:
        """Returns how many characters of a text come before each of its tokens."""
        decoder, length, found = DecodeStream([], skip_special_tokens=True), 0, []
        for token in tokens:
            found.append(length)
            length += len(decoder.step(self.tokenizer.backend_tokenizer, token) or "")
        return found
