"""The rows of a running batch: requests with settings of their own, which join between two rounds, and leave."""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from .. import devices
from ..cache.kept_prefixes import KeptPrefixes
from ..devices import from_host
from ..rounds import Outcome, of_row
from ..stats import SSDStats
from .draft import FaultTolerantDraft
from .loop import Pair
from .request import Request
from .sequences import Sequences
from .target import Target
from .verification import verify_greedy

SPARE = 4  # times the memory of the new columns: old and new storage exist at once, of both models


class RunningRows:
    """At most `count` requests at a time, with the interface of [`CallRows`]. A request that raises ends alone."""

    uses_q = False  # requests that sample are coupled
    join = streams = True

    def __init__(self, pair: Pair, count: int, prefill_chunk: int):
        self.pair, self.count, self.prefill_chunk = pair, count, prefill_chunk
        self.device = devices.of_model(pair.model)
        self.blank = torch.zeros(1, dtype=torch.long, device=self.device)  # in the place of a row without a request
        self.waiting: deque[Request] = deque()  # other threads append
        self.reading: dict[int, Request] = {}  # by row, whose prompts are being read
        self.live: dict[int, Request] = {}  # by row, that are decoded
        self.pieces: dict[int, int] = {}  # by row, tokens of the prompt to read in this round
        self.verifying: dict[int, Request] = {}  # by row, those of the live ones that the round is about
        self.proposed: list[list[int]] = []  # what they verify, of equal lengths
        self.stats = SSDStats(count)
        self.has_read = self.is_closing = self.wants_draft = False
        self.planned_rows = 0
        self.draft: FaultTolerantDraft | None = None
        self.kept = KeptPrefixes()  # of the target
        self.on_round: Callable[[SSDStats], None] = lambda stats: None  # is told of each round of all rows

    # ---------------------------------------------------------------- the batch as the target and the loop see it

    @property
    def sequences(self) -> list[Sequences | None]:
        return [self.live[row].sequences if row in self.live else None for row in range(self.count)]

    @property
    def lengths(self) -> list[int]:
        return [own.lengths[0] if own else 1 for own in self.sequences]

    @property
    def last(self) -> torch.LongTensor:
        return torch.cat([own.last if own else self.blank for own in self.sequences])

    @property
    def ids(self) -> torch.LongTensor:
        """All tokens, which are looked at where logits are not finite."""
        return pad_sequence([own.ids[0] if own else self.blank for own in self.sequences], batch_first=True)

    @property
    def unfinished(self) -> list[bool]:
        return [row in self.live for row in range(self.count)]

    @property
    def pause(self) -> bool:
        """Whether no round follows with this draft. A request that joins after it has failed gets another draft."""
        return self.wants_draft or self.is_closing

    def decide(self, logits: torch.Tensor | None, q: None, following: torch.LongTensor | None) -> Outcome:
        found = self._decide_together(logits, following)
        tokens = [found.get(row, []) for row in range(self.count)]
        for row, request in list(self.verifying.items()):
            if row not in found:
                with self._blaming(row):
                    own = request.following
                    tokens[row] = request.decide(logits[row : row + 1, : own.shape[1]], None, own).tokens[0]
        return Outcome(tokens)

    def _decide_together(self, logits: torch.Tensor, following: torch.LongTensor) -> dict[int, list[int]]:
        """Returns the new tokens of the greedy rows whose logits nothing processes and are finite."""
        simple = {row: request for row, request in self.verifying.items() if request.is_simple}
        if len(simple) < 2:
            return {}
        accepted, bonus = verify_greedy(logits, following[:, :-1])
        unsound = logits[..., 0].isnan().any(dim=1)
        accepted, bonus, unsound = torch.stack([accepted, bonus, unsound.long()]).tolist()  # a single copy
        found = {}
        for row, request in simple.items():
            if not unsound[row]:  # the row may need fewer tokens than others
                tokens = [*self.proposed[row][: accepted[row]], bonus[row]]
                found[row] = tokens[: request.following.shape[1]]
                request.of_round = None, (), None
        return found

    def forced(self, row: int, gained: list[int]) -> list[int]:
        """Returns the tokens that the grammar of a request forces after these."""
        of_request = self.live[row].settings.forced
        return [] if of_request is None else of_request(0, gained)

    def keep(self, outcome: Outcome) -> None:
        for row, request in list(self.verifying.items()):
            with self._blaming(row):
                request.text += outcome.tokens[row]
                request.keep(Outcome([outcome.tokens[row]]))

    def choices(self, logits: torch.Tensor, depths: np.ndarray) -> list[list[int]]:
        """See [`CallRows.choices`]. Rows without a request choose nothing."""
        chosen = [[0] * logits.shape[1] for _ in range(self.count)]
        for row, request in self.live.items():
            (chosen[row],) = request.choices(logits[row : row + 1], depths[row : row + 1])
        return chosen

    def propose(self, tokens: list[list[int]]) -> torch.LongTensor:
        self.verifying, self.proposed = dict(self.live), tokens
        for row, request in self.verifying.items():
            request.following = request.propose([tokens[row]])
        return from_host([[*of_row, -1] for of_row in tokens], self.device)

    def report(self) -> None:
        """Gives each request its tokens and its part of the record, and ends those that have all tokens."""
        record = self.stats.records[-1] if self.stats.records else None
        self.on_round(self.stats)
        for row, request in list(self.verifying.items()):
            with self._blaming(row):
                if request.is_cancelled:
                    raise Cancelled("The request was cancelled.")
                request.stats.records.append(of_row(record, row))
                request.report()
                request.on_change(request)
                if not any(request.unfinished):
                    self._leave(row).end()
        del self.stats.records[:-2]

    # ---------------------------------------------------------------- joining and leaving

    def planner(self, rows: int):
        self.planned_rows = rows
        return self.pair.planner(dataclasses.replace(self.pair.kind(rows, max(self.lengths)), ends_together=False))

    def admit(self, draft: FaultTolerantDraft) -> None:
        """Gives waiting requests the places of rows that have ended, and the draft the next tokens of their prompts."""
        self.draft = draft
        for row in range(self.count):
            if row in self.live or row in self.reading:
                continue
            request = self._next()
            if request is None:
                break
            self.reading[row] = request
            request.row = row
            self.wants_draft = draft.failure is not None
        self.pieces = {}
        for row, request in list(self.reading.items()):
            if request.is_cancelled:
                self._leave(row).end(Cancelled("The request was cancelled."))
                continue
            # Nobody has to wait for a prompt if no row is decoded.
            most = self.prefill_chunk if self.live else len(request.prompt)
            if self.live and not request.read:
                decoder = next(iter(self.live.values())).target.decoder
                most += self.kept.known(request.prompt[:-1], decoder, self._texts())
            self.pieces[row] = piece = min(most, len(request.prompt) - request.read)
            tokens = request.prompt[request.read : request.read + piece]
            is_all = request.read + piece == len(request.prompt)
            draft.join(row, tokens, request.options if is_all else None, request.seed)
            if self.live:
                break  # one piece in a round
        rows = len(self.live) + len(self.pieces)
        planned = 1 << (rows - 1).bit_length() if rows else 0
        if planned not in (0, self.planned_rows):
            draft.planner = self.planner(planned)
            draft.planner.begin_call()

    def read(self, target: Target) -> None:
        """Reads the next tokens of prompts, while the draft does the same, and lets rows join whose prompts end."""
        self.has_read = bool(self.pieces)
        for row, piece in list(self.pieces.items()):
            with self._blaming(row):
                request = self.reading[row]
                end = request.read + piece
                is_all = end == len(request.prompt)
                # The last token is fed in the next round, in which it gives the first token of the answer.
                tokens = request.prompt[: end - is_all]
                if request.reader is None:
                    request.target = target
                    request.reader = self.kept.reader(tokens, target.decoder, self._texts())
                    request.known = request.reader.length
                request.reader.read(torch.tensor(tokens[request.reader.length :], dtype=torch.long))
                request.read = end
                if is_all:
                    target.take_row(row, request.reader, request.padding)
                    self.live[row] = self.reading.pop(row)
                    request.reader = None
        self.pieces = {}

    def resume(self, draft: FaultTolerantDraft) -> None:
        """Gives the rows to another draft."""
        self.draft, self.wants_draft, self.verifying = draft, False, {}  # it has proposed nothing yet
        for row, request in self.live.items():
            draft.join(row, request.text, request.options, request.seed)
        for row, request in self.reading.items():
            draft.join(row, request.prompt[: request.read], None, request.seed)

    def end_all(self, error: BaseException) -> None:
        while self.waiting:
            self.waiting.popleft().end(error)
        self.kept.close()
        for row in [*self.live, *self.reading]:
            self._leave(row).end(error)

    def _next(self) -> Request | None:
        """Returns the next request that waits, unless the memory for its tokens is taken by rows that will end."""
        while self.waiting:
            request = self.waiting[0]
            if not request.is_cancelled and (self.live or self.reading) and not self._has_memory(request):
                return None
            self.waiting.popleft()
            if not request.is_cancelled:
                return request
            request.end(Cancelled("The request was cancelled."))
        return None

    def _has_memory(self, request: Request) -> bool:
        """Whether the caches of target and draft, taken to be of one size, can grow to the columns of a request."""
        free = devices.free_memory(self.device)
        if free is None or not self.live:  # how large a column is, is known once a row has joined
            return free is None
        cache = next(iter(self.live.values())).target.decoder.cache
        columns = (request.options.max_length or len(request.prompt)) - request.padding - cache.capacity
        lacking = SPARE * columns * self.count * cache.bytes_of_a_column - free
        return lacking <= 0 or self.kept.give_up(lacking)

    def _texts(self) -> dict[int, list[int]]:
        """Returns the tokens of the rows that are decoded, to look for those of a row that joins."""
        return {row: one.text[:-1] for row, one in self.live.items()} if self.kept.most else {}

    def _leave(self, row: int) -> Request:
        if row in self.live and self.kept.most:
            self.kept.add(self.live[row].text[:-1], self.live[row].target.decoder, row)
        request = self.live.pop(row, None) or self.reading.pop(row)
        self.verifying.pop(row, None)
        self.pieces.pop(row, None)
        if self.draft is not None:
            self.draft.leave(row)
        return request

    @contextlib.contextmanager
    def _blaming(self, row: int) -> Iterator[None]:
        """A block in which an exception ends the request of this row alone."""
        try:
            yield
        except Exception as error:
            if row in self.live or row in self.reading:
                self._leave(row).end(error)


class Cancelled(RuntimeError):
    """The request was cancelled before it had all its tokens."""
