"""A model together with its ragged cache: forward passes over new tokens of each row."""

import inspect
from collections.abc import Collection, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import devices
from ..devices import from_host
from . import masks
from .attached import attached_to
from .attention import GROUPED, use_grouped_heads
from .cache_name import cache_argument
from .compiled import is_compiled, uncompiled
from .hidden_states import HiddenStates
from .packed import packed_forwards
from .ragged import RaggedCache
from .support import attention_layout, is_flash_attention, result_of
from .view import view_of

LONGEST_STEP = 64  # tokens of each row; a longer pass is a prefill, which always runs eagerly


class CachedModel:
    """Feeds new tokens to a model, each row at its own length. Callers pass and get tensors of all rows."""

    fewest_tokens = 1  # of each row in a pass

    def __init__(
        self,
        model: PreTrainedModel,
        cache: RaggedCache,
        valid: torch.BoolTensor | None = None,  # (batch_size, columns), `False` where the prompt is padding
        first_positions: list[int] | None = None,  # of column 0 of each row, negative if padded on the left
        column_limit: int | None = None,  # tokens from this column on are never used
        token_type_ids: torch.LongTensor | None = None,  # (batch_size, columns), of the prompt
        hidden_states: HiddenStates | None = None,  # captures those of the passes
        view: PreTrainedModel | None = None,  # computes the passes; a new view by default
        pack_weights: bool | str = False,  # for a new view, see `SSDConfig`
    ):
        self.model, self.cache = model, cache
        self.view = view_for_passes(model, pack_weights=pack_weights) if view is None else view
        self.hidden_states = hidden_states
        # The hidden states (batch_size, new_tokens, width) of the tokens that were fed last; zeros for rows left out.
        self.features: torch.Tensor | None = None
        # Of a row that is to join: how many tokens were read, and their features (tokens, width) in parts.
        self.length, self.features_read = 0, []
        self.valid = None if valid is None or valid.all() else valid
        self.device, self.dtype = devices.of_model(model), model.dtype
        self.layout = attention_layout(model)
        self.reads_2d_masks = is_flash_attention(model)
        # sdpa takes half the time without a mask. For eager attention, transformers would make a mask.
        is_sdpa = model.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
        self.has_grouped_heads = self.view.config.get_text_config(decoder=True)._attn_implementation == GROUPED
        self.needs_no_mask_for_one = self.valid is None and self.layout.window is None and is_sdpa
        self.first_positions = first_positions if any(first_positions or ()) else None
        self.keeps_rows: bool | None = None
        self.column_limit = column_limit
        # As in plain generation, each new token has the type of the prompt's last token.
        self.token_types = None if token_type_ids is None else token_type_ids[:, -1:].to(self.device)
        arguments = inspect.signature(model.forward).parameters.values()  # others are passed on to its attention
        self.takes_lengths = self.reads_2d_masks and any(one.kind == one.VAR_KEYWORD for one in arguments)
        self.preparations = 0  # how often a pass was compiled or captured
        self.takes_logits_to_keep = model._supports_logits_to_keep()  # which takes time in each pass
        self.cache_argument = cache_argument(model)
        self.is_compiled = is_compiled(model)

    def close(self) -> None:
        """Lets the next call use the storage of the cache."""

    def rows(self, unfinished: int) -> int:
        """Returns how many rows a pass computes if `unfinished` rows are not finished."""
        return max(self.fewest_tokens, unfinished)

    def window(self, width: int) -> int | None:
        """Returns the cache's window for steps that use `width` columns, `None` if they see exactly these columns."""
        return None

    def leave_out(self, finished: list[bool]) -> None:
        """Stops computing finished rows: tokens fed to them are ignored from now on, and their logits are zeros."""
        if any(finished) and self.keeps_rows is None:  # hooks may be made for the rows of the call
            self.keeps_rows = attached_to(self.model).may_depend_on_rows
        if not self.keeps_rows:
            self.cache.leave_out(finished, self.rows(finished.count(False)))

    def computed(self, of_rows):
        """Returns the rows of a tensor, or the elements of a list, that belong to rows that are computed."""
        rows = self.cache.rows
        if rows is None or of_rows is None:
            return of_rows
        if isinstance(of_rows, torch.Tensor):
            return of_rows[from_host(rows, of_rows.device)]
        return [of_rows[row] for row in rows]

    def positions(self, columns: torch.LongTensor) -> torch.LongTensor:
        """Returns the position of each column, both of shape `(computed_rows, ...)`, at least 0."""
        if self.column_limit is not None:  # the model may have no further positions
            columns = columns.clamp(max=self.column_limit - 1)
        if self.first_positions is not None:
            first = from_host(self.computed(self.first_positions), columns.device)
            columns = columns + first.view(-1, *[1] * (columns.dim() - 1))
        return columns.clamp(min=0)

    def extend(self, tokens: torch.LongTensor, lengths: list[int], logits_to_keep=None) -> torch.Tensor:
        """
        Feeds tokens `(batch_size, new_tokens)`, which overwrite the columns after the first `lengths` columns of each
        row. Returns raw logits `(batch_size, positions, vocab_size)` of the new tokens `logits_to_keep`, indices or a
        number of last tokens; by default of all, which can fill the memory if the prompt is long.
        """
        missing = self.fewest_tokens - tokens.shape[1] if self.cache.layers else 0
        if missing > 0:  # feed the last token again; the next pass overwrites it like a rejected token
            logits = self.extend(torch.cat([tokens, tokens[:, -missing:]], dim=1), lengths, logits_to_keep)
            return logits[:, :-missing] if logits_to_keep is None else logits
        valid, mask = self.valid, None
        if self.cache.rows is not None:
            tokens, lengths, valid = map(self.computed, (tokens, lengths, valid))
        count, is_prefill = tokens.shape[1], valid is None and not (lengths[0] or self.cache.storage)
        places, width = self._place(lengths, torch.arange(count))
        sees_all = count == 1 and self.cache.placement is None and self.needs_no_mask_for_one
        # Without a mask no column is hidden, and the attention function is causal by itself.
        if not (self.reads_2d_masks or is_prefill or sees_all):
            allowed = masks.visible_up_to(places[0], width, valid)
            mask = self.mask(allowed, places[0], torch.arange(width, device=self.device))
        return self.forward(tokens, places, mask, logits_to_keep)

    def extend_tree(self, tokens: torch.LongTensor, lengths: list[int], sees: torch.BoolTensor) -> torch.Tensor:
        """Feeds tokens as [`~CachedModel.extend`] does, each of which sees those before them, and these in `sees`."""
        # sees: (batch_size, tokens, tokens), of each token its ancestors and itself
        tokens, lengths, sees = self.computed(tokens), self.computed(lengths), self.computed(sees)
        rows, count = tokens.shape
        depths = sees.sum(dim=2) - 1
        places, width = self._place(lengths, depths)
        columns, first = places[0], places[0, :, :1]
        allowed = masks.visible_up_to(first.expand(-1, count), width, self.computed(self.valid))
        allowed.scatter_(2, columns[:, None].expand(-1, count, -1), from_host(sees, self.device))
        positions = first + from_host(depths, self.device)
        of_columns = torch.arange(width, device=self.device).repeat(rows, 1).scatter_(1, columns, positions)
        return self.forward(tokens, places, self.mask(allowed, positions, of_columns[:, None]))

    def _place(self, lengths: list[int], depths: torch.LongTensor) -> tuple[torch.LongTensor, int]:
        """Places new tokens after `lengths` columns. Returns their columns and positions, and the columns seen."""
        count, starts = depths.shape[-1], torch.tensor(lengths)[:, None]  # depths: positions after the first token
        width = self.columns_seen(max(lengths) + count, count)
        places = torch.stack([starts + torch.arange(count), self.positions(starts + depths)])
        places = from_host(places, self.device)  # (2, computed_rows, new_tokens)
        is_slice = min(lengths) == max(lengths) and self.cache.window is None
        self.cache.place(slice(lengths[0], lengths[0] + count) if is_slice else places[0], width)
        return places, width

    def of_one_row(self, cache: RaggedCache | None = None, known: Sequence[int] = ()) -> "CachedModel":
        """Returns the same model for a row that is to join, with a cache that has read the `known` first tokens."""
        reader = CachedModel(self.model, RaggedCache() if cache is None else cache, **self._of_one_row())
        reader.length = len(known)
        return reader

    def _of_one_row(self) -> dict:
        return {"column_limit": self.column_limit, "view": self.view, "hidden_states": self.hidden_states}

    def read(self, tokens: torch.LongTensor) -> None:
        """Reads the next tokens `(count,)` of the row's text."""
        if len(tokens):
            self._read(tokens[None].to(self.device))
            self.length += len(tokens)
            if self.features is not None:
                self.features_read.append(self.features[0])

    def _read(self, tokens: torch.LongTensor) -> None:
        self.extend(tokens, [self.length], 1)

    def take_row(self, row: int, other: "CachedModel") -> None:
        """Takes the row that another model has read, in the place of a row that is left out."""
        self.cache.take_row(row, other.cache)

    def reusable(self, row: int, count: int) -> int:
        """Returns how many of a row's first `count` columns, which are in the cache, another row may begin with."""
        return count

    def of_row(self, row: int, count: int) -> RaggedCache:
        """Returns a cache of one row with the first `count` columns of a row, a number that is `reusable`."""
        return self.cache.of_row(row, count)

    def finish(self, output: torch.LongTensor, fed: list[int], columns_before: int) -> None:
        """Feeds the rest of `output` to rows of which fewer tokens were `fed` before, as plain generation does."""
        start, last = min(fed), output.shape[1] - 1  # the last token is not fed, because no token follows it
        if start < last:
            self.cache.take_back()
            self.leave_out([count == last for count in fed])
            no_logits = torch.zeros(1, dtype=torch.long, device=self.device)
            self.extend(output[:, start:last], [start + columns_before] * len(fed), no_logits)

    def columns_seen(self, width: int, tokens: int) -> int:
        """Opens or closes the window for passes over `tokens` tokens of a row. Returns how many columns they see."""
        is_step = tokens <= LONGEST_STEP and bool(self.cache.layers)
        self.cache.set_window(self.window(width) if is_step else None)
        return self.cache.window or width

    def mask(self, allowed: torch.BoolTensor, query_positions: torch.LongTensor, key_positions: torch.LongTensor):
        """Returns the model's `attention_mask`, or a mask for each kind of layer. Positions count from column 0."""
        full = sliding = masks.additive(allowed, self.dtype)
        window = self.layout.window
        if window is not None and allowed.shape[2] > window:
            within = masks.within_window
            if self.layout.chunked:
                within = masks.within_chunk  # of positions after the padding; windows need only differences
                padding = self._left_padding()
                query_positions, key_positions = query_positions - padding, key_positions - padding[..., None]
            allowed = within(allowed, query_positions, key_positions, window)
            sliding = masks.additive(allowed, self.dtype)
        if self.layout.chunked:
            return {"full_attention": full, "chunked_attention": sliding}
        if not self.layout.mixed:
            return sliding
        hidden = {"full_attention": full, "indexed_attention": full, "sliding_attention": sliding}
        return hidden | {"linear_attention": None, "conv": None} if self.layout.recurrent else hidden

    def _left_padding(self) -> torch.LongTensor:
        """Returns how many columns before the first token of each row are padding: `(computed_rows, 1)`."""
        if self.valid is None:
            return torch.zeros(1, 1, dtype=torch.long, device=self.device)
        return self.computed((self.valid.cumsum(dim=-1) == 0).sum(dim=-1, keepdim=True))

    def forward(self, tokens, places, mask, logits_to_keep=None) -> torch.Tensor:
        """Feeds tokens of computed rows at these columns and positions. Returns logits of all rows."""
        inputs = {"input_ids": tokens, "places": places, "attention_mask": mask}
        if self.token_types is not None:
            inputs["token_type_ids"] = self.computed(self.token_types).expand_as(tokens)
        if self.takes_lengths:
            inputs |= self._lengths_for_flash_attention(tokens.shape[1])
        logits = self.run(inputs, logits_to_keep)
        if self.hidden_states is not None:
            self.features = self.of_all_rows(self.hidden_states.take())
        return self.of_all_rows(logits)

    def run(self, inputs: dict, logits_to_keep: torch.LongTensor | int | None = None) -> torch.Tensor:
        """Runs a pass with arguments of the model, but `places`. Later passes do not change the logits it returns."""
        inputs = inputs | {self.cache_argument: self.cache, "use_cache": True, "return_dict": True}
        _, inputs["position_ids"] = inputs.pop("places").unbind()
        is_step_compiled = self.is_compiled and self.cache.window is not None  # for any logits that are to be kept
        if logits_to_keep is not None and self.takes_logits_to_keep and not is_step_compiled:
            inputs["logits_to_keep"], logits_to_keep = logits_to_keep, None
        logits = result_of(self._call(inputs))
        if isinstance(logits_to_keep, int):
            return logits[:, -logits_to_keep:]
        return logits if logits_to_keep is None else logits[:, logits_to_keep]

    def _call(self, inputs: dict):
        if not self.is_compiled:
            return self.view(**inputs)
        with uncompiled(self.model):
            return self.view(**inputs)

    def of_all_rows(self, of_computed: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of all rows, with zeros for rows left out, for a tensor of the computed rows."""
        if self.cache.rows is None:
            return of_computed
        of_all = of_computed.new_zeros(len(self.cache.rows) + len(self.cache.left_out), *of_computed.shape[1:])
        of_all[from_host(self.cache.rows, of_computed.device)] = of_computed
        return of_all

    def _lengths_for_flash_attention(self, count: int) -> dict:
        """Returns the lengths of the only row. Without them each layer would read them from the device and wait."""
        lengths = {}
        for name, end in (("q", count), ("k", self.cache.get_seq_length() + count)):
            lengths[f"max_length_{name}"] = end
            lengths[f"cu_seq_lens_{name}"] = torch.arange(0, 2 * end, end, dtype=torch.int32, device=self.device)
        return lengths


def view_for_passes(
    model: PreTrainedModel, hooked: Collection[nn.Module] = (), pack_weights: bool | str = False
) -> PreTrainedModel:
    """Returns the view of a model that computes the passes of a call, with hooks in its `hooked` modules."""
    forwards = packed_forwards(model, pack_weights)
    view, configs = view_of(model, hooked, forwards)
    use_grouped_heads(model, configs, forwards)
    return view
