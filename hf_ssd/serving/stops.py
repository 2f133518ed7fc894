"""Stop strings: cuts a text before the first of them, wherever tokens begin and end."""


class Cut:
    """Returns the part of a text before the first stop string. Text that may begin one is held back until clear."""

    def __init__(self, strings: list[str]):
        self.strings, self.held, self.is_over = strings, "", False
        self.read = self.clear = 0  # characters that were added, and that were returned

    def add(self, piece: str) -> str:
        """Returns the new text that is certain to come before any stop string."""
        if self.is_over:
            return ""
        text, self.held, self.read = self.held + piece, "", self.read + len(piece)
        if found := [text.index(one) for one in self.strings if one in text]:
            self.is_over, text = True, text[: min(found)]
        else:
            sure = (i for i in range(len(text)) if any(one.startswith(text[i:]) for one in self.strings))
            end = next(sure, len(text))
            text, self.held = text[:end], text[end:]
        self.clear += len(text)
        return text

    def release(self) -> str:
        """Returns the text that was held back, once no more text follows."""
        held, self.held = self.held, ""
        return held
