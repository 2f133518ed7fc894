"""Structured output: a logits processor that allows only texts of a grammar, such as the JSON of a schema."""

import copy
import json
import weakref
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from transformers import LogitsProcessor

from .devices import from_host

DEFAULTS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as `json.dumps` writes it: a model that may write any white space may write nothing else."""

_tokenizers = weakref.WeakKeyDictionary()  # llguidance's own of each tokenizer, by EOS tokens: each takes a second


class Grammar(LogitsProcessor):
    """
    A logits processor that allows only the tokens with which the text after the prompt is JSON that follows a schema,
    and EOS where it is complete. It works in plain `generate()` too.

    All positions of a round are processed in one call, because the processor follows the drafted tokens of each row and
    is rolled back. One object serves one call at a time. A prompt that is exactly the text of the last call goes on
    with the JSON of that text; after any other prompt the JSON begins.

    Args:
        schema (`dict` or `str`): A JSON schema, or its text. `{"type": "object"}` allows every object. The JSON is
            written on one line, as by `json.dumps`; options of llguidance in `schema["x-guidance"]` change this, for
            example `{"whitespace_flexible": True}`.
        tokenizer (`PreTrainedTokenizerFast`): The model's tokenizer.
        eos_token_id (`int` or `list[int]`, *optional*): The tokens that end the text, by default the tokenizer's EOS
            token. Pass those of the generation config if they are others.

    Raises:
        `ImportError`: llguidance is not installed.
        `TypeError`: `schema` is no JSON object.
        `ValueError`: The schema is invalid or has keywords that llguidance does not support, there is no EOS token, or
            llguidance cannot read the tokenizer, for example because it is not a fast tokenizer.
    """

    def __init__(self, schema: dict | str, tokenizer, eos_token_id: int | list[int] | None = None):
        try:
            found = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError) as error:
            raise TypeError(f"`schema` must be a JSON schema, a dict or its text: {error}.") from None
        if not isinstance(found, dict):
            raise TypeError(f"`schema` must be a JSON schema, a dict or its text, but is {json.dumps(found)}.")
        self._follow(lambda matcher: matcher.grammar_from_json_schema(found, DEFAULTS), tokenizer, eos_token_id)

    @classmethod
    def from_lark(cls, grammar: str, tokenizer, eos_token_id: int | list[int] | None = None) -> "Grammar":
        """
        Returns a processor for another grammar than that of JSON, in the [Lark syntax of
        llguidance](https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
        """
        processor = cls.__new__(cls)
        processor._follow(lambda matcher: matcher.grammar_from_lark(grammar), tokenizer, eos_token_id)
        return processor

    def _follow(self, grammar: Callable, tokenizer, eos_token_id) -> None:
        """Compiles what the function makes of llguidance's class of matchers."""
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ImportError("Structured output needs llguidance: pip install hf_ssd[structured]") from error
        of_llguidance = _tokenizer(getattr(tokenizer, "tokenizer", tokenizer), eos_token_id)
        matcher = LLMatcher(of_llguidance, grammar(LLMatcher), log_level=0)
        if matcher.is_error():
            raise ValueError(f"The grammar cannot be followed: {matcher.get_error().splitlines()[0]}.")
        self.vocab_size = of_llguidance.vocab_size
        is_end = np.isin(np.arange(self.vocab_size), of_llguidance.eos_tokens)
        end = np.packbits(is_end, bitorder="little").tobytes()
        self.rows = defaultdict(lambda: _Row(matcher.deep_copy(), end))

    def another(self) -> "Grammar":
        """Returns a processor for the same grammar, which serves another call."""
        other = copy.copy(self)
        other.rows = defaultdict(self.rows.default_factory)
        return other

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        rows, length = input_ids.shape
        return self.process_positions(scores[:, None], input_ids, [length] * rows, list(range(rows)))[:, 0]

    def process_positions(
        self, scores: torch.FloatTensor, input_ids: torch.LongTensor, lengths: list[int], rows: list[int]
    ) -> torch.FloatTensor:
        """
        Processes the scores `(len(rows), positions, vocab_size)` of consecutive positions of some rows of the batch.
        Position `j` of `rows[i]` follows `input_ids[rows[i], : lengths[i] + j]`, whose last `j` tokens are proposals.
        """
        positions, masks = scores.shape[1], []
        texts = input_ids[:, : max(lengths) + positions - 1].cpu()
        for row, length in zip(rows, lengths):
            self.rows[row].follow(texts[row, :length], positions)
            masks += self.rows[row].masks(texts[row, length : length + positions - 1].tolist())
        packed = from_host(torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8), scores.device)
        bits = packed.view(*scores.shape[:2], -1, 1) >> torch.arange(8, dtype=torch.uint8, device=scores.device) & 1
        allowed = bits.bool().flatten(2)[..., : self.vocab_size]
        known = min(self.vocab_size, scores.shape[2])  # a model may have more tokens than its tokenizer
        result = torch.full_like(scores, -torch.inf)
        result[..., :known] = scores[..., :known].masked_fill(~allowed[..., :known], -torch.inf)
        return result

    def forced(self, row: int, gained: list[int]) -> list[int]:
        """Returns the tokens that must follow in a row of the last call, once it has gained these tokens."""
        return self.rows[row].forced(gained)


def _tokenizer(tokenizer, eos_token_id: int | list[int] | None):
    """Returns a tokenizer as llguidance reads it."""
    from llguidance.hf import from_tokenizer

    ends = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    ends = tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)
    if None in ends:
        raise ValueError("The tokenizer has no EOS token, with which the JSON would end: pass `eos_token_id`.")
    known = _tokenizers.setdefault(tokenizer, {})
    if ends not in known:
        try:
            known[ends] = from_tokenizer(tokenizer, eos_token=list(ends))
        except ValueError as error:
            raise ValueError(f"llguidance cannot read this {type(tokenizer).__name__}: {error}.") from error
    return known[ends]


class _Row:
    """The matcher of a row, which has taken in the verified tokens after the prompt."""

    def __init__(self, matcher, end: bytes):
        self.matcher, self.end = matcher, end
        self.text = torch.empty(0, dtype=torch.long)  # prompt and verified tokens of the last call
        self.start = 0  # the length of the prompt
        self.taken = 0  # tokens in the matcher: fewer than the text has after its end
        self.positions = -1  # how many tokens the text may have gained since

    def follow(self, text: torch.LongTensor, positions: int) -> None:
        """Brings the matcher to the end of a text, which goes on from the last text or is another prompt."""
        before = len(self.text)
        differs = (text[:before] != self.text[: len(text)]).nonzero()
        same = int(differs[0]) if len(differs) else before
        if same < self.start or not before <= len(text) <= before + self.positions:
            self.matcher.reset()
            self.start, self.taken = len(text), 0
        elif self.taken > same - self.start:  # beams change places
            self.matcher.rollback(self.taken - (same - self.start))
            self.taken = same - self.start
        self.taken += self.matcher.try_consume_tokens(text[self.start + self.taken :].tolist())
        self.text, self.positions = text.clone(), positions

    def masks(self, proposed: list[int]) -> list[bytes]:
        """Returns a bit for each token that is allowed next, and after each proposed token up to one that is not."""
        if self.start + self.taken < len(self.text):  # the text has ended
            return [self.end] * (len(proposed) + 1)
        found, taken = [self._mask()], 0
        for token in proposed:
            if not self.matcher.try_consume_tokens([token]):
                break
            taken += 1
            found.append(self._mask())
        self.matcher.rollback(taken)
        return found + [self.end] * (len(proposed) - taken)

    def forced(self, gained: list[int]) -> list[int]:
        """Returns the only tokens with which the text can go on after these tokens, if there is no choice."""
        if self.start + self.taken < len(self.text):
            return []
        taken = self.matcher.try_consume_tokens(gained)
        found = self.matcher.compute_ff_tokens() if taken == len(gained) else []
        self.matcher.rollback(taken)
        return found

    def _mask(self) -> bytes:
        mask = self.matcher.compute_bitmask()
        if self.matcher.is_error():
            raise RuntimeError(f"The grammar cannot be followed any further: {self.matcher.get_error()}")
        return mask[: len(self.end)]  # llguidance may add bytes
