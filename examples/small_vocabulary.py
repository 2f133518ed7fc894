"""A tokenizer with the most frequent tokens of another one."""

import json
from collections import Counter

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


def small_tokenizer(tokenizer, counts: Counter, size: int) -> PreTrainedTokenizerFast:
    """
    Returns a tokenizer with the most frequent tokens of another one. It keeps single characters and bytes, with which
    it can write any text, and the tokens of which a frequent token is merged.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): A tokenizer whose model is BPE.
        counts (`Counter`): How often each of its tokens was written.
        size (`int`): Most tokens of the new one.

    Raises:
        `ValueError`: the tokenizer's model is not BPE, or its characters and bytes alone are more than `size` tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    known = {} if backend is None else json.loads(backend.to_str())
    if known.get("model", {}).get("type") != "BPE":
        raise ValueError(f"{type(tokenizer).__name__} is not BPE, so its vocabulary cannot be made smaller here.")
    model, vocab = known["model"], known["model"]["vocab"]
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    parts = {}
    for left, right in merges:
        parts.setdefault(left + right, (left, right))

    # 1. The tokens without which a text could not be written.
    special = {tokenizer.convert_ids_to_tokens(i) for i in tokenizer.all_special_ids}
    added = [token for token in known["added_tokens"] if token["content"] in special or counts[token["id"]]]
    others = vocab.keys() - {token["content"] for token in known["added_tokens"]}
    frequent = sorted(others, key=lambda token: (-counts[vocab[token]], vocab[token]))
    kept = dict.fromkeys(token["content"] for token in added)
    kept |= dict.fromkeys(token for token in frequent if is_basic(token))
    if len(kept) > size:
        raise ValueError(f"{size} tokens are too few: the characters and bytes are {len(kept)}.")

    # 2. The most frequent ones, each with the tokens that it is made of.
    for token in frequent:
        needed, left = [], [token]
        while left:
            one = left.pop()
            if one not in kept:
                needed.append(one)
                left += parts.get(one, ())
        if len(kept) + len(needed) <= size:
            kept |= dict.fromkeys(needed)

    # 3. The same tokenizer with these alone.
    ids = {token: i for i, token in enumerate(kept)}
    model["vocab"] = ids
    model["merges"] = [[a, b] for a, b in merges if a in ids and b in ids and a + b in ids]
    known["added_tokens"] = [{**token, "id": ids[token["content"]]} for token in added]
    known |= {"post_processor": None, "truncation": None, "padding": None}
    names = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    small = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(known)),
        **names,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    small.chat_template = tokenizer.chat_template
    return small


def is_basic(token: str) -> bool:
    """Whether a token is a byte to fall back on, such as `<0x0A>`, or a letter of which bytes and Latin are written."""
    return len(token) == 1 and ord(token) < 0x180 or len(token) == 6 and token.startswith("<0x") and token.endswith(">")
