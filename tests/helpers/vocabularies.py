"""Tiny tokenizers, and drafts that know the target's tokens under other ids."""

import json
import string

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from .tiny import VOCAB, tiny_draft

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


def resized_draft(vocab_size: int):
    """The draft with more or fewer tokens, of which those that remain are as they were."""
    draft = tiny_draft(vocab_size=vocab_size)
    states = draft.state_dict()
    for name, weight in tiny_draft().state_dict().items():
        rows = min(len(weight), len(states[name]))
        states[name][:rows] = weight[:rows]
    return draft


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


def printable() -> PreTrainedTokenizerFast:
    """Of single characters, one for each token of the tiny models."""
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    assert len(vocabulary) == VOCAB
    bpe = Tokenizer(BPE(vocabulary, merges=[], unk_token="<pad>"))
    bpe.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", padding_side="left")


def characters(of: str = "".join(map(chr, range(32, 127)))) -> PreTrainedTokenizerFast:
    """Of single characters after padding and EOS, in a form that llguidance reads."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *of.replace(" ", "Ġ")])}
    bpe = Tokenizer(BPE(vocabulary, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<s>", padding_side="left")


# ---------------------------------------------------------------- tokenizers of every kind, trained on a few sentences

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a quick dog jumps over the brown fox",
    "größer als das 日本",
]


def byte_level(texts: list[str] = SENTENCES, size: int = 320) -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen and SmolLM2."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(texts * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def sentencepiece(prefix: bool = False, names: tuple[str, ...] = ("Ġ", "Ġorġ", "Ċ")) -> PreTrainedTokenizerFast:
    """As Gemma, with bytes to fall back on and with names of the letter Ġ; with a `prefix` as Llama 2."""
    bpe = Tokenizer(BPE())
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    bpe.train_from_iterator(SENTENCES * 4, trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>", "<bos>"]))
    state = json.loads(bpe.to_str())
    state["model"] |= {"byte_fallback": True, "unk_token": "<unk>"}
    pieces = [piece for piece in state["model"]["vocab"] if piece not in ("<unk>", "<bos>")]
    every = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *names]
    state["model"]["vocab"] = {piece: i for i, piece in enumerate(dict.fromkeys(every))}
    bpe = Tokenizer.from_str(json.dumps(state))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), bpe.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    bpe.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<bos>")


def metaspace() -> PreTrainedTokenizerFast:
    """As T5 and XGLM."""
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    unigram.train_from_iterator(SENTENCES * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=unigram, unk_token="<unk>")


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT."""
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    words.train_from_iterator(SENTENCES * 4, trainers.WordPieceTrainer(vocab_size=110, special_tokens=["[UNK]"]))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


def word_ends() -> PreTrainedTokenizerFast:
    """As GPT-1 and CLIP, whose words end in a mark."""
    bpe = Tokenizer(BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(vocab_size=110, end_of_word_suffix="</w>", special_tokens=["<unk>"])
    bpe.train_from_iterator(SENTENCES * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>")


KINDS = {
    "byte-level": byte_level,
    "SentencePiece": sentencepiece,
    "SentencePiece, prefix": lambda: sentencepiece(prefix=True),
    "Metaspace": metaspace,
    "WordPiece": word_piece,
    "ends of words": word_ends,
}
