"""Compares the tokens of target and draft, and translates between them if they differ."""

import filecmp
import os
import weakref
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from ..distributed.sessions import DraftError
from ..drafting.resolver import ResolvedDraft
from ..drafting.vocabulary import MOST_PADDING, Translation
from ..gguf_files import gguf_place
from .spelling import Encoder, spelled_tokens

logger = logging.get_logger(__name__)

SHOWN = 5  # differing ids that a message names
LEAST_COVERAGE = 0.5  # share of the prompts' tokens that the draft must have


def translation_for(model, resolved: ResolvedDraft, tokenizer=None, assistant_tokenizer=None) -> Translation | None:
    """Returns a translation if both tokenizers are given and differ, or raises `ValueError`. Compares a pair once."""
    if resolved.info is None:
        if assistant_tokenizer is not None:
            raise ValueError("`assistant_tokenizer` is of a draft model, and there is none; leave it out.")
        return None
    if assistant_tokenizer is not None and tokenizer is None:
        raise ValueError("`assistant_tokenizer` needs the target's tokenizer too: pass `tokenizer=...` to generate().")
    sizes = model.config.get_text_config(decoder=True).vocab_size, resolved.info.vocab_size
    if assistant_tokenizer is not None:
        known = _translations.setdefault(tokenizer, weakref.WeakKeyDictionary()).setdefault(assistant_tokenizer, {})
        if sizes not in known:
            pair = tokenizer, assistant_tokenizer, *sizes
            known[sizes] = translation_between(*pair) if _differences(*pair) else None
        return known[sizes]
    names, compared = (model.config._name_or_path or "", resolved.name), _compared.setdefault(model, set())
    if (*names, *sizes) not in compared:
        if not _are_one_file(*names):
            _check_same(*map(_tokenizer_of, names), *sizes)
        compared.add((*names, *sizes))
    return None


def check_coverage(translation: Translation, prompts: list[torch.LongTensor]) -> None:
    """Raises [`DraftError`] if the draft has less than half of the tokens that occur in the prompts."""
    used = torch.cat(prompts).unique().cpu()
    covered = int(translation.is_common[used].sum())
    if covered < LEAST_COVERAGE * len(used):
        raise DraftError(
            f"The draft's vocabulary has {covered} of the {len(used)} tokens that the prompts use, less than half, so "
            "it could hardly propose anything; choose a draft whose tokenizer is more like the target's."
        )


def _check_same(tokenizer, assistant_tokenizer, size: int, draft_size: int) -> None:
    """Raises `ValueError` if the tokens differ, as far as the tokenizers, or else the sizes, tell."""
    if tokenizer is None or assistant_tokenizer is None:
        if abs(size - draft_size) > MOST_PADDING:
            raise ValueError(
                f"The target has a vocabulary of {size} tokens and the draft one of {draft_size}; choose a draft with "
                "the target's tokenizer, or pass `tokenizer=...` and `assistant_tokenizer=...` to generate()."
            )
        if size != draft_size:
            logger.warning_once(
                f"The target has a vocabulary of {size} tokens and the draft one of {draft_size}. No tokenizers were "
                "found to compare, so tokens are taken to be the same up to padding; if the draft is hardly ever "
                "accepted, they are not."
            )
        return
    differ = _differences(tokenizer, assistant_tokenizer, size, draft_size)
    if differ:
        shown = ", ".join(f"{i} ({ours!r} and {theirs!r})" for i, ours, theirs in differ[:SHOWN])
        raise ValueError(
            f"Target and draft have different tokenizers: {len(differ)} ids mean different tokens, the first of them "
            f"{shown}. Choose a draft with the target's tokenizer, or pass `tokenizer=...` and "
            "`assistant_tokenizer=...` to generate()."
        )


def _differences(tokenizer, assistant_tokenizer, size: int, draft_size: int) -> list[tuple[int, str, str]]:
    """Returns the ids that mean different tokens, with both tokens."""
    ours, theirs = ({i: token for token, i in one.get_vocab().items()} for one in (tokenizer, assistant_tokenizer))
    both = sorted(ours.keys() & theirs.keys())
    return [(i, ours[i], theirs[i]) for i in both if i < min(size, draft_size) and ours[i] != theirs[i]]


def translation_between(tokenizer, assistant_tokenizer, size: int, draft_size: int) -> Translation:
    """Finds each token's token of the draft (token-level intersection; Timor et al., 2025), or those of its text."""
    encoder = Encoder(assistant_tokenizer, spelled_tokens(assistant_tokenizer, draft_size))
    pieces, is_common = [[] for _ in range(size)], torch.zeros(size, dtype=torch.bool)
    seen, others = set(), {}
    for i, token in spelled_tokens(tokenizer, size).items():
        if token in encoder.known:
            # Of two tokens that stand for the same bytes, the draft proposes the token that the target writes.
            pieces[i], is_common[i] = [encoder.known[token]], token not in seen
            seen.add(token)
        else:  # a special token is text to another tokenizer
            others[i] = token if isinstance(token, bytes) else token.encode()
    for i, ids in zip(others, encoder.encode(list(others.values()))):
        pieces[i] = ids
    return Translation(pieces, is_common)


def _are_one_file(*folders: str) -> bool:
    """Whether these folders have the same tokenizer file; then the tokenizers need not be loaded."""
    files = [Path(folder, "tokenizer.json") for folder in folders if folder]
    return len(files) == 2 and all(map(Path.is_file, files)) and filecmp.cmp(*files, shallow=False)


def _tokenizer_of(path: str):
    """Returns the tokenizer in the folder, or in the hub's cache, that a model was loaded from, or `None`."""
    if not path or not (os.path.exists(path) or path.count("/") == 1):
        return None
    try:
        place, options = gguf_place(path, {"local_files_only": True, "trust_remote_code": False})
        return AutoTokenizer.from_pretrained(place, **options)
    except Exception:  # there is no tokenizer, or it needs a package that is not installed
        return None


_translations: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by the two tokenizers that were given
_compared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by model: drafts whose tokens are the same
