"""The target in a call: its passes over tokens of all rows, and the cache that they leave."""

import numpy as np
import torch
from transformers import DynamicCache

from .. import devices
from ..cache.cache_name import CACHE, cache_argument
from ..cache.cached_model import CachedModel, view_for_passes
from ..cache.compiled import uncompiled
from ..cache.hidden_states import HiddenStates, hooked_modules
from ..cache.passes import cached_model
from ..cache.ragged import RaggedCache
from ..cache.row_store import RowStore
from ..cache.support import empty_cache, last_position_limit
from ..config import SSDConfig
from ..devices import from_host
from .sequences import kept_columns
from .settings import Settings


class Target:
    """The target and the rows that it decodes. `reads` says which layers keep their hidden `states`, if any."""

    decoder: CachedModel
    columns_before_ids: list[int]  # of each row, columns of the cache before its first token; negative for padding

    def __init__(self, model, config: SSDConfig, rows, reads=()):
        self.model, self.config, self.rows = model, config, rows
        hooked = hooked_modules(model, *reads) if reads else ()
        self.view = view_for_passes(model, hooked, config.pack_weights)
        self.hidden_states = HiddenStates(self.view, *reads) if reads else None
        self.states: Features | None = None

    def begin(self, rows: int, width: int = 0) -> None:
        """Makes a cache for rows that join later, with features of this `width`. The decoder is to be closed."""
        limit = last_position_limit(self.model)
        cache = RaggedCache(empty_cache(self.model))
        device = devices.of_model(self.model)
        tokens = RowStore(torch.zeros(rows, 0, dtype=torch.long, device=device))
        options = {"column_limit": limit, "view": self.view, "hidden_states": self.hidden_states}
        self.decoder = cached_model(self.model, cache, tokens=tokens, **options)
        self.decoder.cache.have_free_rows(rows)
        self.columns_before_ids = [0] * rows
        if self.hidden_states is not None:
            self.states = Features(torch.zeros(rows, 0, width, dtype=self.model.dtype, device=device), None, 0)

    def take_row(self, row: int, reader: CachedModel, padding: int) -> None:
        """Lets a row that was left out join, with the features of the text that was read."""
        self.decoder.take_row(row, reader)
        self.columns_before_ids[row] = -padding
        if self.states is not None:
            self.states.take_row(row, reader.features_read)

    def prefill(self, settings: Settings, input_ids: torch.LongTensor, model_kwargs: dict) -> torch.Tensor:
        """Runs transformers' own prefill into a ragged cache. Returns the last logits `(rows, 1, vocab_size)`."""
        self.theirs: DynamicCache = model_kwargs[CACHE]  # of the user or of transformers
        self.returns_cache = settings.options.return_dict_in_generate or getattr(self.theirs, "_is_user_defined", False)
        prompt_length, max_length = input_ids.shape[1], settings.max_length
        cache = RaggedCache(self.theirs)
        position_ids = model_kwargs.get("position_ids")
        if position_ids is not None and position_ids.ndim > 2:  # in text, all kinds of positions are the same
            position_ids = position_ids[0]
        mask = model_kwargs.get("attention_mask")
        with uncompiled(self.model):
            inputs = {**model_kwargs, CACHE: cache}
            outputs = self.view._prefill(input_ids, settings.options, inputs)
        columns = cache.get_seq_length()
        before = columns - prompt_length
        self.columns_before_ids = [before] * len(input_ids)
        last = [columns - 1] * len(input_ids) if position_ids is None else position_ids[:, -1].tolist()
        self.decoder = cached_model(
            self.model,
            cache,
            valid=None if mask is None else mask.bool().to(devices.of_model(self.model)),
            first_positions=[position - (columns - 1) for position in last],
            token_type_ids=model_kwargs.get("token_type_ids"),
            column_limit=None if max_length is None else before + max_length,
            cuda_graphs=self.config.cuda_graphs,
            hidden_states=self.hidden_states,
            view=self.view,
        )
        if self.hidden_states is not None:
            self.states = Features(self.hidden_states.take(), mask, prompt_length)
        return outputs.logits[:, -1:]

    def verify(self, following: torch.LongTensor) -> torch.Tensor:
        """Feeds the last and the drafted tokens of each row. Returns logits `(rows, lookahead + 1, vocab_size)`."""
        fed = torch.cat([self.rows.last[:, None], following[:, :-1]], dim=1).to(self.decoder.device)
        lengths = zip(self.rows.lengths, self.columns_before_ids)
        return self.decoder.extend(fed, [length - 1 + before for length, before in lengths])

    def verify_tree(self, tokens: list[list[int]], sees: np.ndarray) -> torch.Tensor:
        """As `verify`, for the nodes of each row's tree, which see others as `(batch_size, N + 1, N + 1)` tells."""
        nodes = from_host(tokens, self.rows.last.device)
        fed = torch.cat([self.rows.last[:, None], nodes], dim=1).to(self.decoder.device)
        self.starts = [n - 1 + before for n, before in zip(self.rows.lengths, self.columns_before_ids)]
        return self.decoder.extend_tree(fed, self.starts, torch.from_numpy(sees))

    def follow(self, paths: list[list[int]]) -> None:
        """Keeps the columns and features of these nodes, negative for none, in the place of those of a chain."""
        moves = [
            (row, start + 1 + node, start + 1 + place)
            for row, (start, path) in enumerate(zip(self.starts, paths))
            for place, node in enumerate(path)
            if node > place
        ]
        self.decoder.cache.move_columns(moves)
        if self.decoder.features is not None:
            index = from_host([[0, *[node + 1 for node in path]] for path in paths], self.decoder.features.device)
            self.decoder.features = self.decoder.features[torch.arange(len(index))[:, None], index]

    def take_in(self, accepted: list[int]) -> None:
        """Keeps the hidden states of the tokens that are verified."""
        self.states.add(self.decoder.features, accepted)

    def verify_alone(self, rows: list[int], place: int) -> torch.Tensor:
        """
        Feeds the last token of these rows again, after `place` verified tokens of the round, and clears the columns
        behind it: they are masked, but NaN times 0 is NaN. The other rows keep their drafted tokens.
        """
        lengths = self.rows.lengths
        starts = [length - 1 + before for length, before in zip(lengths, self.columns_before_ids)]
        self.decoder.cache.clear_behind(rows, starts)
        ids, count = self.rows.ids, self.decoder.fewest_tokens
        columns = from_host(lengths, ids.device)[:, None] - 1 + torch.arange(count, device=ids.device)
        tokens = ids.gather(1, columns)  # the token, and the drafted tokens after it
        tokens[rows] = tokens[rows, :1]
        of_round = self.decoder.features
        logits = self.decoder.extend(tokens.to(self.decoder.device), starts)[:, :1]
        if of_round is not None:
            of_round[rows, place] = self.decoder.features[rows, 0]
            self.decoder.features = of_round
        return logits

    def give_cache(self, output: torch.LongTensor) -> None:
        """Copies the columns of the output to the cache of the user or of transformers, if somebody gets it."""
        if not self.returns_cache:
            return
        last = output.shape[1] - 1  # the last token is not fed, because no token follows it
        fed = [min(self.rows.kept(row), n - 1, last) for row, n in enumerate(self.rows.lengths)]
        before = self.columns_before_ids[0]
        self.decoder.finish(output.to(self.decoder.device), fed, before)
        if 0 < len(self.theirs.layers) < len(self.decoder.cache.layers):
            # A model that repeats its layers (Dory) adds cache layers for the repetitions in its first pass.
            theirs = {cache_argument(self.model): self.theirs}
            self.model(output[:, -1:].to(self.decoder.device), use_cache=True, **theirs)
        self.decoder.cache.copy_to(self.theirs, output.shape[1] - 1 + before)


class Features(RowStore):
    """
    The hidden states of some layers, side by side, at all tokens of each row but the last, which is not fed yet. They
    are kept until the row ends, because a draft may join late.
    """

    def __init__(self, prompts: torch.Tensor, attention_mask: torch.Tensor | None, length: int):
        # `prompts` end with the last of `length` padded columns; tokens that the user's cache held before have zeros.
        rows, fed, width = prompts.shape
        everything = torch.ones(rows, length, dtype=torch.bool)
        kept = everything if attention_mask is None else kept_columns(attention_mask, length).cpu()
        self.lengths = kept.sum(1).tolist()  # tokens of each row that have features
        super().__init__(prompts.new_zeros(rows, max(self.lengths), width))
        for row, end in enumerate(self.lengths):
            places = kept[row, length - fed :].nonzero()[:, 0]
            self.values[row, end - len(places) : end] = prompts[row, from_host(places, prompts.device)]
        self.values.nan_to_num_(0.0, 0.0, 0.0)

    def add(self, features: torch.Tensor, accepted: list[int]) -> None:
        """Takes in states `(batch_size, lookahead + 1, width)` of each row's last token and `accepted` drafted ones."""
        # Columns of rejected tokens are written again before they are read.
        self.write(features.to(self.values).nan_to_num(0.0, 0.0, 0.0), self.lengths)
        self.lengths = [n + max(0, k + 1) for n, k in zip(self.lengths, accepted)]

    def take_row(self, row: int, texts: list[torch.Tensor]) -> None:
        """Begins a row anew with the features `(tokens, width)` of these parts of its text."""
        self.lengths[row] = sum(map(len, texts))
        if texts:
            self.put(row, 0, torch.cat(texts).to(self.values).nan_to_num(0.0, 0.0, 0.0))

    def between(self, starts: list[int], ends: list[int]) -> torch.Tensor:
        """Returns features `(tokens, width)`: those of each row from token `starts` to `ends`, row after row."""
        return torch.cat([of_row[start:end] for of_row, start, end in zip(self.values, starts, ends)])
