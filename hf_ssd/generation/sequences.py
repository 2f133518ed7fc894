"""The rows of a batch, which grow by different amounts, and where each of them stops."""

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria

from ..devices import from_host
from .settings import Settings

BY_COUNTING = (MaxLengthCriteria, EosTokenCriteria)
"""Criteria that need not be called: their answer follows from a row's length and last token."""

BY_ROW = (*BY_COUNTING, StopStringCriteria, MaxTimeCriteria)
"""Criteria that look at each row by itself, and keep no state."""


class Sequences:
    """Token ids of each row, with room to grow, and the length at which plain generation would have stopped."""

    def __init__(self, input_ids: torch.LongTensor, settings: Settings, attention_mask: torch.Tensor | None = None):
        stopping_criteria, self.pad_token, self.max_length = settings.criteria, settings.pad_token, settings.max_length
        self.batch_size, self.prompt_length = input_ids.shape
        self.prompts = list(input_ids)  # without padding; the last token is always kept
        if attention_mask is not None:
            kept = kept_columns(attention_mask, self.prompt_length)
            self.prompts = [row[of_row] for row, of_row in zip(input_ids, kept)]
        self.padding = [self.prompt_length - len(prompt) for prompt in self.prompts]
        self.ids = torch.full((self.batch_size, self.prompt_length + 256), self.pad_token, device=input_ids.device)
        self.ids[:, : self.prompt_length] = input_ids
        self.last = input_ids[:, -1]  # the last token of each row
        self.proposed: list[list[int]] = [[]] * self.batch_size
        self.lengths = [self.prompt_length] * self.batch_size
        self.ends = from_host([[length] for length in self.lengths], input_ids.device)  # the lengths on the device
        self.stops: list[int | None] = [None] * self.batch_size
        self.has_eos = any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)
        self.simple = all(type(criteria) in BY_COUNTING for criteria in stopping_criteria)
        self.by_row = StoppingCriteriaList(c for c in stopping_criteria if type(c) in BY_ROW)
        self.by_batch = StoppingCriteriaList(c for c in stopping_criteria if type(c) not in BY_ROW)
        # Plain generation pads stopped rows only if there is an EOS token; otherwise they grow until all are stopped.
        self.ends_by_row = not self.by_batch and (self.has_eos or self.simple)
        self.judged = self.prompt_length  # the length up to which `by_batch` was asked
        self.eos_tokens = {
            token
            for criteria in stopping_criteria
            if type(criteria) is EosTokenCriteria
            for token in criteria.eos_token_id.flatten().tolist()
        }

    def propose(self, tokens: list[list[int]]) -> torch.LongTensor:
        """Writes the drafted tokens that are needed after each row. Returns them, and a -1, `(rows, count + 1)`."""
        if self.max_length is not None:
            live = [n for n, stop in zip(self.lengths, self.stops) if stop is None or not self.has_eos]
            room = self.max_length - min(live)
            tokens = [of_row[: room - 1] for of_row in tokens]
        self.proposed, count = tokens, len(tokens[0])
        if max(self.lengths) + count >= self.ids.shape[1]:  # room for the bonus token as well
            room = self.ids.new_full((self.batch_size, max(count + 1, self.ids.shape[1] // 2)), self.pad_token)
            self.ids = torch.cat([self.ids, room], dim=1)
        following = from_host([[*of_row, -1] for of_row in tokens], self.ids.device)
        drafted = following[:, :-1]
        if any(-1 in of_row for of_row in tokens):  # for no token, where paths differ in length
            drafted = drafted.clamp(min=0)
        self.ids.scatter_(1, self.ends + torch.arange(count, device=self.ids.device), drafted)
        return following

    def accept(self, tokens: list[list[int]], on_device: torch.LongTensor | None = None) -> None:
        """Makes proposed tokens, and a last token each, which may have been decided `on_device`, part of the rows."""
        if on_device is None:
            on_device = from_host([of_row[-1] if of_row else 0 for of_row in tokens], self.ids.device)
        if not all(tokens):
            on_device = torch.where(from_host([not of_row for of_row in tokens], self.ids.device), self.last, on_device)
        self.last, self.lengths = on_device, [n + len(of_row) for n, of_row in zip(self.lengths, tokens)]
        self.ends = from_host([[length] for length in self.lengths], self.ids.device)
        self.ids.scatter_(1, self.ends - 1, self.last[:, None])

    def stop_where_plain_generation_would(self, new_tokens: list[list[int]], scores) -> None:
        """Finds where rows stop within new tokens. `scores(length)` are those that plain generation would record."""
        first = [stop - len(tokens) + 1 for stop, tokens in zip(self.lengths, new_tokens)]
        if self.simple:
            for row, tokens in enumerate(new_tokens):
                for length, token in enumerate(tokens, first[row]):
                    if token in self.eos_tokens or (self.max_length is not None and length >= self.max_length):
                        self._stop(row, length)
            return
        for length in range(min(first), max(self.lengths) + 1):
            growing = [row for row, start in enumerate(first) if start <= length <= self.lengths[row]]
            growing = [row for row in growing if self.stops[row] is None]
            stopped = self.by_row(self.ids[:, :length], scores(length)).tolist() if growing else []
            for row in growing:
                if stopped[row]:
                    self._stop(row, length)
        # The other criteria may compare rows or keep a state. They see the batch as in plain generation, once for each
        # length, as soon as all rows have reached it.
        while self.by_batch and self.judged < self._sure_length:
            self.judged += 1
            stopped = self.by_batch(self.as_in_plain_generation(self.judged), scores(self.judged)).tolist()
            for row in range(self.batch_size):
                if stopped[row]:
                    self._stop(row, self.judged)

    def _stop(self, row: int, length: int) -> None:
        self.stops[row] = length if self.stops[row] is None else min(length, self.stops[row])

    @property
    def _common_length(self) -> int:
        """Length that all rows have reached that would still grow in plain generation."""
        growing = [length for length, stop in zip(self.lengths, self.stops) if stop is None or not self.has_eos]
        return min(growing, default=max(self.lengths))

    @property
    def _sure_length(self) -> int:
        """Length that the output of plain generation would have with the tokens that are known."""
        common, final = self._common_length, self.final_length
        return common if final is None else min(common, final)

    def as_in_plain_generation(self, length: int) -> torch.LongTensor:
        """Returns the batch at this length. Rows that stopped at a smaller length are padded."""
        ids = self.ids[:, :length]
        if self.has_eos and any(stop is not None and stop < length for stop in self.stops):
            ids = ids.clone()
            for row, stop in enumerate(self.stops):
                ids[row, length if stop is None else stop :] = self.pad_token
        return ids

    @property
    def final_length(self) -> int | None:
        """Length of the output, once every row has stopped."""
        return None if None in self.stops else max(self.stops)

    @property
    def unfinished(self) -> list[bool]:
        """Which rows need tokens. Without EOS tokens a row that has stopped does, until it is as long as the output."""
        if self.has_eos:
            return [stop is None for stop in self.stops]
        final = self.max_length if None in self.stops else max(self.stops)
        return [final is None or length < final for length in self.lengths]

    def kept(self, row: int) -> int:
        """Returns the length of a row in the output, without the padding after it."""
        stop = self.stops[row] if self.has_eos else self.final_length
        return self.lengths[row] if stop is None else stop

    def settled(self, row: int) -> int:
        """Returns how many tokens of a row are certain to be in the output."""
        reached = [length if stop is None else stop for length, stop in zip(self.lengths, self.stops)]
        length = reached[row] if self.has_eos else min(self.lengths[row], max(reached))
        return min(length, self.judged + 1) if self.by_batch else length

    @property
    def settled_columns(self) -> int:
        """How many columns of the output are certain: the columns that plain generation would have by now."""
        return min(self._sure_length, self.judged + 1) if self.by_batch else self._sure_length


def kept_columns(attention_mask: torch.Tensor, length: int) -> torch.BoolTensor:
    """Returns which of the last `length` columns are tokens `(batch_size, length)`; the last column always is."""
    mask = attention_mask[:, -length:].bool().clone()  # `bool()` of booleans is the user's own tensor
    mask[:, -1] = True
    return mask
