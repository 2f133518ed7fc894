"""Stop strings: cuts a text before the first stop string, whole or streamed, wherever tokens begin and end."""

FIELDS = ("text", "content", "reasoning_content")  # the fields with the text of an answer in OpenAI's form


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


class StreamCut:
    """Cuts the events of a streamed answer before the first stop string."""

    def __init__(self, strings: list[str]):
        self.cut, self.last, self.field = Cut(strings), {}, None

    def events(self, event: dict) -> list[dict]:
        """Returns the events that replace an event."""
        result = []
        choice, texts = _parts(event)
        is_text = choice.get("finish_reason") is None
        field = next((name for name in FIELDS if is_text and texts.get(name) is not None), None)
        if field != self.field:  # a stop string does not span two fields
            result += self._with_text(self.cut.release())
        self.last, self.field = event, field
        if field is not None:
            return result + self._with_text(self.cut.add(texts[field]))
        _end_by_stop(choice, self.cut.is_over)
        return [*result, event]

    def _with_text(self, text: str) -> list[dict]:
        """Returns the last event with this text in it, or nothing if the text is empty."""
        if text:
            _parts(self.last)[1][self.field] = text
        return [self.last] if text else []


def cut_answer(answer: dict, strings: list[str], is_over: bool = False) -> dict:
    """
    Returns the answer of a call that is not streamed, cut before the first stop string. `is_over` says that the call
    ended by one: a parser of answers may have stripped its last blanks.
    """
    choice, texts = _parts(answer)
    _end_by_stop(choice, is_over)
    for field in FIELDS:
        if texts.get(field):
            cut = Cut(strings)
            texts[field] = cut.add(texts[field]) + cut.release()
            _end_by_stop(choice, cut.is_over)
            is_over &= not cut.is_over
    if is_over and texts.get("content"):
        ends = [end for end in (one.rstrip() for one in strings) if end and texts["content"].endswith(end)]
        texts["content"] = texts["content"].removesuffix(max(ends, key=len, default=""))
    return answer


def _parts(event: dict) -> tuple[dict, dict]:
    """Returns the choice of an answer or event, and the part of the choice with the texts; an error has neither."""
    choice = next(iter(event.get("choices", ())), {})
    return choice, choice.get("delta") or choice.get("message") or choice


def _end_by_stop(choice: dict, is_over: bool) -> None:
    """Corrects the reason of an answer whose last possible token completed a stop string."""
    if is_over and choice.get("finish_reason") == "length":
        choice["finish_reason"] = "stop"
