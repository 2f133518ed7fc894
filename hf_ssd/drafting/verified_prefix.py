"""The verified tokens of each row, which all branches share, and their place in the draft's cache."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from .. import devices
from ..cache.branches import Branches, extend_with_branches
from ..cache.cached_model import CachedModel
from ..cache.kept_prefixes import WORTH_KEEPING, KeptPrefixes
from ..cache.passes import cached_model
from ..cache.ragged import RaggedCache
from ..cache.row_store import RowStore
from ..cache.support import last_position_limit
from ..devices import from_host
from ..rounds import Outcome, padded
from .request import SessionRequest
from .vocabulary import Vocabulary


class VerifiedPrefix:
    """The verified tokens of each row, in the target's tokens and the draft's, and its speculation behind them."""

    branches_kind = Branches
    most_states = 0  # recurrent states of each row that the memory has room for; 0 if the draft has none

    def __init__(
        self,
        model: PreTrainedModel,
        request: SessionRequest,
        earlier: "VerifiedPrefix | None" = None,  # of the previous call, whose cache is used if this call continues it
    ):
        self.device, own = devices.of_model(model), model.config.get_text_config(decoder=True).vocab_size
        self.vocabulary = Vocabulary(request.vocab_size, own, request.translation, self.device)
        prompts = [prompt.to(self.device) for prompt in request.prompts]
        self.fed = [0] * len(prompts)  # columns of each row, speculation included, that are in the cache
        # The target's tokens (batch_size, capacity), and how many are verified, the last bonus token included.
        self.ids, self.lengths = RowStore.of(prompts), list(map(len, prompts))
        texts = [text if len(text) else prompts[0].new_zeros(1) for text in self._texts(prompts)]
        # The draft's tokens (batch_size, capacity), and how many of them the verified tokens are: several may be one
        # token of the target, but never one that was drafted. A token's column is its position.
        self.inputs, self.columns = RowStore.of(texts), list(map(len, texts))
        longest = None if request.translation else request.generation_config.max_length  # in the target's tokens
        limits = [limit for limit in (longest, last_position_limit(model)) if limit is not None]
        continues = None  # the earlier prefix, if this call continues its text
        if earlier is not None and len(earlier.lengths) == len(prompts):
            shared = [self._shared(earlier, row) for row in range(len(prompts))]
            if min(shared) >= WORTH_KEEPING:
                self.fed, continues = shared, earlier
                earlier.decoder.cache.take_back()
        if earlier is not None and continues is None:
            earlier.decoder.close()
        of_passes = {"cuda_graphs": request.config.cuda_graphs, "pack_weights": request.config.pack_weights}
        of_passes["column_limit"] = min(limits, default=None)  # branches look ahead beyond the text
        self.decoder = self._decoder(model, continues, **of_passes)
        self.joining: dict[int, CachedModel | None] = {}  # rows whose text is being read, or comes next
        self.rows_join = not any(self.lengths)
        self.kept = KeptPrefixes()
        if self.rows_join:
            self.decoder.cache.have_free_rows(len(prompts))
            self._free(list(range(len(prompts))))

    def _decoder(self, model: PreTrainedModel, continues: "VerifiedPrefix | None", **options) -> CachedModel:
        cache = RaggedCache() if continues is None else continues.decoder.cache
        return cached_model(model, cache, **options)

    def adopt(self, branches: Branches, chosen: list[int]) -> torch.Tensor | None:
        """Takes in each row's chosen branch, if branches can be taken in, and returns raw logits after its tokens."""
        return None

    # ---------------------------------------------------------------- rows that join

    def read(self, row: int, start: int, tokens: list[int], is_all: bool) -> None:
        """Reads the next tokens of a row that joins in a free place, and takes part with its last tokens."""
        if start == 0:
            self.joining[row] = None
            self.fed[row] = self.lengths[row] = self.columns[row] = 0
        new = from_host(tokens, self.device)
        self.lengths[row] = self.ids.put(row, self.lengths[row], new)
        self.columns[row] = self.inputs.put(row, self.columns[row], self.vocabulary.encode(new))
        if is_all and not self.columns[row]:
            self.columns[row] = 1  # the draft has no tokens for this text; it gets some token
        self._read(row, is_all)

    def _read(self, row: int, is_all: bool) -> None:
        """Reads the next columns of a row that joins, all but the last one if no more come."""
        reader, end = self.joining[row], self.columns[row] - is_all
        if reader is None:
            rows, text = range(len(self.fed)) if self.kept.most else (), self.inputs.values[row, :end].tolist()
            live = {other: self._fed(other)[:end].tolist() for other in rows if self.fed[other]}
            reader = self.joining[row] = self.kept.reader(text, self.decoder, live)
        reader.read(self._inputs(row, slice(reader.length, end)))
        if is_all:
            self.decoder.take_row(row, reader)
            del self.joining[row]
            self.fed[row] = reader.length

    def _fed(self, row: int) -> torch.LongTensor:
        """Returns the verified tokens of a row whose columns are in the cache."""
        return self.inputs.values[row, : min(self.fed[row], self.columns[row])]

    def keep(self, rows: Iterable[int]) -> None:
        """Keeps the texts of rows that have ended, in a running batch."""
        for row in rows if self.kept.most else ():
            self.kept.add(self._fed(row).tolist(), self.decoder, row)

    def _free(self, rows: list[int]) -> None:
        """Forgets the texts of rows that are left out, so that passes need not make room for them."""
        for row in rows:
            self.fed[row], self.lengths[row], self.columns[row] = 0, 1, 1

    # ---------------------------------------------------------------- a round

    def _texts(self, prompts: list[torch.LongTensor]) -> list[torch.LongTensor]:
        return [self.vocabulary.encode(prompt) for prompt in prompts]

    def _shared(self, earlier: "VerifiedPrefix", row: int) -> int:
        """Returns how many first columns of this row an earlier prefix's cache holds, the last column excluded."""
        most = min(earlier.fed[row], self.columns[row] - 1)
        differ = (earlier.inputs.values[row, :most] != self.inputs.values[row, :most]).nonzero()
        return int(differ[0]) if len(differ) else most

    @property
    def rows(self) -> list[int]:
        """The rows that are fed."""
        return list(range(len(self.lengths))) if self.decoder.cache.rows is None else self.decoder.cache.rows

    def ends(self, count: int | torch.LongTensor = 0) -> torch.LongTensor:
        """Returns the position after each row's prefix and `count` more tokens, `(batch_size, 1 or N)`, on the CPU."""
        return torch.tensor(self.lengths)[:, None] + count

    def write(self, tokens: torch.LongTensor, behind: int = 0) -> None:
        """Writes tokens `(batch_size, M)` into the rows, `behind` tokens after each row's prefix."""
        self.ids.write(tokens, [n + behind for n in self.lengths])
        self.inputs.write(self.vocabulary.to_draft(tokens), [n + behind for n in self.columns])

    def grow(self, tokens: list[list[int]], kept: list[int]) -> None:
        """Adds the new tokens of each row to its prefix. The first `kept` of them have been drafted after it."""
        self.write(from_host(padded(tokens, max(map(len, tokens))), self.device))
        self.fed = [min(fed, n + max(0, k)) for fed, n, k in zip(self.fed, self.columns, kept)]
        self._take_in(list(map(len, tokens)))
        if self.rows_join:
            ended = [row for row, new in enumerate(tokens) if not new and row not in self.joining]
            self.keep(ended)
            self._free(ended)

    def read_target(self, outcome: Outcome) -> None:
        """Takes in the states of an outcome, after [`~VerifiedPrefix.grow`]. Only heads do."""

    def _take_in(self, counts: list[int]) -> None:
        """Makes the next `counts` tokens of each row, which already stand after its prefix, part of the prefix."""
        translation = self.vocabulary.translation
        if translation is None:
            self.columns = [n + count for n, count in zip(self.columns, counts)]
        for row in [row for row, count in enumerate(counts) if count and translation is not None]:
            new = self.ids.values[row, self.lengths[row] :][: counts[row]]
            others = (~translation.is_common[new[:-1].cpu()]).nonzero()  # proposed by a fallback, and fed as others
            if len(others):
                self.fed[row] = min(self.fed[row], self.columns[row] + int(others[0]))
            self.columns[row] = self.inputs.put(row, self.columns[row], self.vocabulary.encode(new))
        self.lengths = [n + count for n, count in zip(self.lengths, counts)]

    def feed(self, count: int, wanted: int) -> torch.Tensor:
        """Feeds each row up to `count` tokens after its prefix. Returns the last outputs `(rows, wanted, ...)`."""
        # A row that lacks fewer columns feeds cached tokens again; one too short writes columns beyond its end,
        # which are overwritten before any query sees them.
        tokens, starts, width = self._next(count, wanted)
        places = [n + count - wanted - start for n, start in zip(self.columns, starts)]
        if wanted == 1 and {*places} == {width - 1}:
            found = self.decoder.extend(tokens, starts, 1)
        else:
            kept, place = (torch.tensor(places)[:, None] + torch.arange(wanted)).unique(return_inverse=True)
            found = self.decoder.extend(tokens, starts, from_host(kept, self.device))
            if min(places) < max(places):
                found = found[torch.arange(len(place), device=self.device)[:, None], from_host(place, self.device)]
        self._have_fed(count)
        return found

    def feed_with_branches(self, count: int, forks: torch.LongTensor, branches: torch.LongTensor) -> torch.Tensor:
        """As `feed`, with branches `(batch_size, N, T)`, which see a row's first `forks` columns. Returns theirs."""
        tokens, starts, width = self._next(count, 1)
        base = max(max(self.columns) + count, max(starts) + width)
        logits = extend_with_branches(self.decoder, tokens, starts, forks, branches, base)
        self._have_fed(count)
        return logits

    def forget_speculation(self) -> None:
        """Marks the speculation's cache columns as stale, so that they are fed again."""
        self.fed = [min(fed, n) for fed, n in zip(self.fed, self.columns)]

    def _next(self, count: int, at_least: int) -> tuple[torch.LongTensor, list[int], int]:
        """Returns the tokens to feed to each row, the column of its first token, and how many tokens each row feeds."""
        lacking = max(self.columns[row] + count - self.fed[row] for row in self.rows)
        width = max(at_least, lacking, self.decoder.fewest_tokens)
        starts = [max(0, n + count - width) for n in self.columns]
        columns = from_host(starts, self.device)[:, None] + torch.arange(width, device=self.device)
        return self._inputs(torch.arange(len(starts), device=self.device)[:, None], columns), starts, width

    def _inputs(self, rows: torch.LongTensor | int, columns: torch.LongTensor | slice) -> torch.Tensor:
        return self.inputs.values[rows, columns]

    def _have_fed(self, count: int) -> None:
        for row in self.rows:
            self.fed[row] = self.columns[row] + count
