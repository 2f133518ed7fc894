"""The draft's work in one call of generate(), without any communication."""

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..cache.branches import Branches
from ..cache.cached_model import CachedModel
from ..cache.ragged import RaggedCache
from ..cache.speculation import Speculation, SpeculationCache
from ..config import SSDConfig
from ..logits_processing import needs_history, process_branches
from .outcomes import choose, fan_out
from .sampling import PositionNoise, draw

SKIPPED = -1  # the accepted count of a row that is finished: the draft leaves the row alone


class Speculator:
    """
    Drafts for a batch of rows: ahead of time for the likely outcomes ([`~Speculator.prepare`]), and just in time for
    the outcomes that were not prepared ([`~Speculator.answer`]). With `asynchronous=False` it never prepares, and is
    the draft of ordinary speculative decoding.

    What it answers depends on the outcomes alone, not on what had been prepared.

    Args:
        model (`PreTrainedModel`): The draft model.
        config (`SSDConfig`): Lookahead, budget and fan-out.
        generation_config (`GenerationConfig`): The target's. Its warpers and penalties shape the proposals too.
        prompts (`list[torch.LongTensor]`): The prompt of each row without padding, at least one token each.
        seed (`int`): Seed of the draft's randomness.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SSDConfig,
        generation_config: GenerationConfig,
        prompts: list[torch.LongTensor],
        seed: int,
    ):
        self.config, self.device = config, model.device
        self.lengths = [len(prompt) for prompt in prompts]
        """Columns of each row's trunk that hold verified tokens and the token that the next outcome follows."""
        width = max(self.lengths)
        self.ids = torch.zeros(len(prompts), width + 256, dtype=torch.long, device=self.device)
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = prompt
        limit = generation_config.max_length
        capacity = width + 2 * (config.lookahead + 1) + config.budget * config.lookahead + 256
        self.decoder = CachedModel(model, RaggedCache(capacity), position_limit=limit)
        self.processors = draft_processors(model, generation_config, width)
        self.needs_history = needs_history(self.processors)
        self.noise = None
        if generation_config.do_sample:
            self.noise = PositionNoise(seed, model.config.get_text_config(decoder=True).vocab_size, self.device)
        self.drafted = torch.zeros(len(prompts), 0, dtype=torch.long, device=self.device)
        self.known_logits: list[torch.Tensor] = []  # after the first tokens of the speculation, if already computed
        self.unfed: torch.LongTensor | None = None  # last token(s) of the trunk and speculation without a column yet
        self.prepared: SpeculationCache | None = None

    def prefill(self) -> None:
        """Feeds the prompts. Rows are padded on the right: what stands there is overwritten later, and never seen."""
        ends = torch.tensor(self.lengths, device=self.device) - 1
        kept, place = ends.unique(return_inverse=True)
        logits = self.decoder.extend(self.ids[:, : max(self.lengths)], [0] * len(self.lengths), logits_to_keep=kept)
        self.known_logits = [logits[torch.arange(len(ends), device=self.device), place].unsqueeze(1)]

    # ---------------------------------------------------------------- ahead of time

    def prepare(self) -> None:
        """Drafts the next speculation for the likely outcomes of the one that is being verified."""
        lookahead = self.drafted.shape[1]

        # 1. Feed what is not in the trunk yet; now there are logits to fork from after each accepted count.
        if self.unfed is not None:
            first = 1 + lookahead - self.unfed.shape[1]
            fed = self.decoder.extend(self.unfed, [length - 1 + first for length in self.lengths])
            self.known_logits.append(fed)
            self.unfed = None
        logits = torch.cat(self.known_logits, dim=1).float()
        forks = torch.tensor(self.lengths, device=self.device)[:, None] + torch.arange(
            lookahead + 1, device=self.device
        )

        # 2. Choose the outcomes.
        accepted, bonus = choose(
            self._process_forks(logits, forks), logits, self.drafted, fan_out(self.config, lookahead)
        )

        # 3. Grow all branches together, one token of each per forward pass.
        forks = forks[:, accepted]
        base = max(self.lengths) + lookahead
        branches = Branches(self.decoder, forks, base, self.config.lookahead)
        prepared, tokens = SpeculationCache(accepted, bonus), bonus
        histories = self._branch_histories(forks) if self.needs_history else None
        for depth in range(self.config.lookahead):
            if histories is not None:
                histories.scatter_(2, (forks + depth)[:, :, None], tokens[:, :, None])
            scores = branches.grow(tokens).float()
            scores = self._process(scores, histories, forks + depth + 1)
            tokens, probabilities = self._propose(scores, accepted.tolist(), depth)
            prepared.append(tokens, probabilities)
        self.prepared = prepared

    # ---------------------------------------------------------------- the answer

    def answer(self, accepted: torch.LongTensor, bonus: torch.LongTensor) -> Speculation:
        """
        Returns the next speculation of each row, and moves on to verify it.

        Args:
            accepted (`torch.LongTensor` of shape `(batch_size,)`): How many tokens of the last speculation the target
                accepted, or `SKIPPED` for a row that is finished.
            bonus (`torch.LongTensor` of shape `(batch_size,)`): The token that follows them.
        """
        accepted, bonus = accepted.to(self.device), bonus.to(self.device)
        skipped = accepted == SKIPPED
        if self.prepared is not None:
            speculation = self.prepared.lookup(accepted, bonus)
        else:
            shape = (len(accepted), self.config.lookahead)
            speculation = Speculation(torch.zeros(shape, dtype=torch.long, device=self.device), None, skipped & False)
        self.prepared = None
        self._commit(accepted, bonus)
        settled = speculation.hits | skipped
        if not settled.all():
            speculation = self._draft_just_in_time(speculation, settled)
        else:
            self.known_logits = []
            self.unfed = torch.cat([bonus.masked_fill(skipped, 0)[:, None], speculation.tokens], dim=1)
        self.drafted = speculation.tokens
        self._remember(speculation.tokens, self.lengths)
        return speculation

    def _commit(self, accepted: torch.LongTensor, bonus: torch.LongTensor) -> None:
        """The trunk grows by the accepted tokens, which are in it already, and the bonus token."""
        moved = [n if k == SKIPPED else n + k for n, k in zip(self.lengths, accepted.tolist())]
        self._remember(bonus[:, None], moved)
        self.lengths = [m if k == SKIPPED else m + 1 for m, k in zip(moved, accepted.tolist())]
        if self.noise is not None:
            self.noise.forget_before(self.lengths)

    def _draft_just_in_time(self, speculation: Speculation, settled: torch.BoolTensor) -> Speculation:
        """Drafts for the rows that missed. The other rows feed the tokens they have: their trunk needs them anyway."""
        rows = torch.arange(len(self.lengths), device=self.device)
        last = torch.tensor(self.lengths, device=self.device) - 1
        # The token before the last is fed once more: if it was the last one of a speculation, it has no column yet.
        fed = torch.stack([self.ids[rows, last - 1], self.ids[rows, last]], dim=1)
        tokens, probabilities, self.known_logits = [], [], []
        for depth in range(self.config.lookahead):
            logits = self.decoder.extend(fed, [n - fed.shape[1] + depth for n in self.lengths])[:, -1:].float()
            self.known_logits.append(logits)
            starts = torch.tensor(self.lengths, device=self.device)[:, None]
            histories = self.ids[:, None] if self.needs_history else None
            scores = self._process(logits, histories, starts + depth)
            token, probability = self._propose(scores, [-1], depth)
            token = torch.where(settled, speculation.tokens[:, depth], token[:, 0])[:, None]
            self._remember(token, [n + depth for n in self.lengths])
            tokens.append(token)
            if probability is not None:
                if speculation.probabilities is not None:
                    kept = speculation.probabilities[:, depth : depth + 1]
                    probability = torch.where(settled[:, None, None], kept, probability)
                probabilities.append(probability)
            fed = token
        self.unfed = fed
        stacked = torch.cat(probabilities, dim=1) if probabilities else None
        return Speculation(torch.cat(tokens, dim=1), stacked, speculation.hits)

    # ---------------------------------------------------------------- shared pieces

    def _propose(self, scores: torch.Tensor, forks: list[int], depth: int):
        """Draws tokens `(batch_size, N)` from scores `(batch_size, N, vocab)`; `forks` is -1 for the trunk itself."""
        if self.noise is None:
            return scores.argmax(-1), None
        probabilities = scores.softmax(-1)
        distinct = sorted(set(forks))
        noise = self.noise.gather([[n + k + 1 + depth for k in distinct] for n in self.lengths])
        noise = noise[:, [distinct.index(k) for k in forks]]
        return draw(probabilities, noise), probabilities

    def _process(self, scores: torch.Tensor, histories: torch.LongTensor | None, lengths: torch.LongTensor):
        """Applies the warpers to scores `(batch_size, N, vocab)` that follow the first `lengths` of each history."""
        if not self.processors:
            return scores
        flat = scores.flatten(0, 1)
        histories = None if histories is None else histories.flatten(0, 1)
        return process_branches(self.processors, flat, histories, lengths.flatten()).view_as(scores)

    def _process_forks(self, logits: torch.Tensor, forks: torch.LongTensor) -> torch.Tensor:
        histories = self.ids[:, None].expand(-1, forks.shape[1], -1) if self.needs_history else None
        return self._process(logits, histories, forks)

    def _branch_histories(self, forks: torch.LongTensor) -> torch.LongTensor:
        room = torch.zeros(len(self.ids), self.config.lookahead + 1, dtype=torch.long, device=self.device)
        return torch.cat([self.ids, room], dim=1)[:, None].repeat(1, forks.shape[1], 1)

    def _remember(self, tokens: torch.LongTensor, starts: list[int]) -> None:
        """Writes tokens `(batch_size, M)` into the rows' ids, from the given columns on."""
        stop = max(starts) + tokens.shape[1]
        if stop > self.ids.shape[1]:
            room = torch.zeros(len(self.ids), max(256, stop), dtype=torch.long, device=self.device)
            self.ids = torch.cat([self.ids, room], dim=1)
        columns = torch.tensor(starts, device=self.device)[:, None] + torch.arange(tokens.shape[1], device=self.device)
        self.ids.scatter_(1, columns, tokens)


def draft_processors(model: PreTrainedModel, generation_config: GenerationConfig, prompt_length: int):
    """
    Rebuilds the target's processors from its generation config with transformers' own code. Processors that the user
    made are not among them: the draft proposes without, which costs acceptance and nothing else.

    Returns:
        `LogitsProcessorList`, empty when decoding greedily without penalties.
    """
    model._prepare_special_tokens(generation_config, True, device=model.device)
    return model._get_logits_processor(
        generation_config=generation_config,
        input_ids_seq_length=prompt_length,
        encoder_input_ids=None,
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList(),
        device=model.device,
        model_kwargs={},
    )
