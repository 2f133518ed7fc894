"""The bytes that each token of a tokenizer stands for, and the tokens that a tokenizer has for given bytes."""

from collections.abc import Callable

from transformers.convert_slow_tokenizer import bytes_to_unicode

NEXT_TO = "a"  # put on both sides of a token to decode it, because decoders change the ends of a text


def spelled_tokens(tokenizer, size: int) -> dict[int, bytes | str]:
    """Returns the bytes of each token below `size`, as the tokenizer's decoder writes it; special tokens as strings."""
    if callable(getattr(tokenizer, "added_tokens_decoder", None)):  # that of mistral-common, a method that raises
        return _spelled_by_decode(tokenizer, size)
    vocab, special = tokenizer.get_vocab(), set(tokenizer.all_special_tokens)
    special |= {str(t) for t in getattr(tokenizer, "added_tokens_decoder", {}).values() if getattr(t, "special", True)}
    spell, is_byte = _spelling_of(tokenizer)
    # Single bytes to fall back on come last: the tokenizer writes another token that stands for the same byte.
    ids = sorted((is_byte(token), i, token) for token, i in vocab.items() if i < size)
    return {i: token if token in special else spell(token) for _, i, token in ids}


def _spelled_by_decode(tokenizer, size: int) -> dict[int, bytes | str]:
    """Spells the tokens of a tokenizer of another library, without those that are part of a character."""
    (next_to,) = tokenizer([NEXT_TO], add_special_tokens=False, return_attention_mask=False)["input_ids"]
    head = tokenizer.decode(next_to)
    tail, special = tokenizer.decode([*next_to, *next_to]).removeprefix(head), set(tokenizer.all_special_ids)
    texts = tokenizer.batch_decode([[*next_to, i, *next_to] for i in range(min(size, len(tokenizer)))])
    texts = {i: text.removeprefix(head).removesuffix(tail) for i, text in enumerate(texts) if "\ufffd" not in text}
    return {i: text if i in special else text.encode() for i, text in texts.items()}


class Encoder:
    """Writes bytes in a tokenizer's tokens."""

    def __init__(self, tokenizer, spelled: dict[int, bytes | str]):
        self.tokenizer, self.spelled = tokenizer, spelled
        self.known: dict[bytes | str, int] = {}
        for i, token in spelled.items():
            self.known.setdefault(token, i)
        self.longest = max((len(token) for token in self.known if isinstance(token, bytes)), default=0)

    def encode(self, texts: list[bytes]) -> list[list[int]]:
        """Returns the tokens of each text, or the longest that fit where the tokenizer's own spell another text."""
        strings = {text: text.decode(errors="ignore") for text in texts}
        readable = {text: string for text, string in strings.items() if string.encode() == text}
        written = {}
        if readable:
            strings = list(readable.values())
            ids = self.tokenizer(strings, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            written = dict(zip(readable, ids))
        return [self._best(text, [i for i in written.get(text, []) if i in self.spelled]) for text in texts]

    def _best(self, text: bytes, ids: list[int]) -> list[int]:
        if self._decode(ids) == text:
            return ids
        longest = self._longest_first(text)
        if self._decode(longest) != text and self._decode(ids).strip() == text.strip():
            return ids  # some tokenizers write no blanks
        return longest or ids

    def _decode(self, ids: list[int]) -> bytes:
        tokens = (self.spelled[i] for i in ids)
        return b"".join(token.encode() if isinstance(token, str) else token for token in tokens)

    def _longest_first(self, text: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self.longest), start, -1)
            end = next((end for end in ends if text[start:end] in self.known), None)
            ids += [] if end is None else [self.known[text[start:end]]]
            start = end or start + 1
        return ids


def _spelling_of(tokenizer) -> tuple[Callable[[str], bytes], Callable[[str], bool]]:
    """Returns a function that spells a token, and a function that tells whether it is a single byte to fall back on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    has_decoder = backend is None or backend.decoder is not None
    read = tokenizer.convert_tokens_to_string if has_decoder else _reader_of(backend)
    if read([NEXT_TO, "Ċ", NEXT_TO]) == f"{NEXT_TO}\n{NEXT_TO}":
        table = {letter: byte for byte, letter in bytes_to_unicode().items()}

        def from_byte_level(token: str) -> bytes:  # a token with a letter outside of the alphabet stands for itself
            return bytes(table[letter] for letter in token) if table.keys() >= set(token) else token.encode()

        return from_byte_level, lambda token: False
    has_bytes = read([NEXT_TO, "<0x0A>", NEXT_TO]) == f"{NEXT_TO}\n{NEXT_TO}" or hasattr(tokenizer, "sp_model")
    head = read([NEXT_TO])
    tail = read([NEXT_TO, NEXT_TO]).removeprefix(head)

    def is_byte(token: str) -> bool:
        return has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def spell(token: str) -> bytes:
        if is_byte(token):
            return bytes([int(token[3:5], 16)])
        return read([NEXT_TO, token, NEXT_TO]).removeprefix(head).removesuffix(tail).encode()

    return spell, is_byte


def _reader_of(backend) -> Callable[[list[str]], str]:
    """Returns a decoder for a tokenizer without one, from how it writes blanks and the ends of lines."""

    def write(text: str) -> str:
        text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        pieces = [] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
        return "".join(piece for piece, _ in pieces) or text

    written = {" ": "", "\n": ""}
    for sign in written:
        *_, written[sign], _ = ["", *write(NEXT_TO + sign + NEXT_TO).split(NEXT_TO)]

    def read(tokens: list[str]) -> str:
        text = "".join(tokens)
        for sign, letters in written.items():
            text = text.replace(letters, sign) if letters else text
        return text

    return read
