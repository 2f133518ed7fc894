"""Tiny tokenizers, and drafts that know the target's tokens under other ids."""

import string

from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from .conftest import tiny_draft

SPECIAL = ["<pad>", "<s>"]
LETTERS = list(string.ascii_letters + string.digits + string.punctuation)
TARGET = [*SPECIAL, *LETTERS[:80], *(first + second for first, second in zip(LETTERS[:15], LETTERS[1:16]))]
DRAFT = [*reversed(LETTERS[5:]), "</s>", *SPECIAL]  # lacks five letters, and has all pairs of others as two tokens


def tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    """Of letters, and of pairs of letters."""
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(token[0], token[1]) for token in tokens if len(token) == 2]
    model = BPE(vocab=vocab, merges=[(a, b) for a, b in pairs if a in vocab and b in vocab])
    special = {"pad_token": "<pad>", "bos_token": "<s>"} if "<pad>" in tokens else {}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)


def renamed_draft(tokens: list[str] = DRAFT, of: list[str] = TARGET, **changes):
    """A draft that often agrees with the target of `of`, and has each of its tokens under the draft's id."""
    sizes = {"vocab_size": len(of), **changes}
    known, draft = tiny_draft(**sizes), tiny_draft(**{**sizes, "vocab_size": len(tokens)})
    states, theirs = draft.state_dict(), known.state_dict()
    for name, weight in theirs.items():
        if weight.shape == states[name].shape and weight.shape[0] != len(of):
            states[name].copy_(weight)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        for i, token in enumerate(tokens):
            if token in of:
                states[name][i] = theirs[name][of.index(token)]
    return draft
