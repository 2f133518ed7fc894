"""The rows of a call, or of a request of a running batch: how they are decided, kept and streamed."""

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from ..advice import adjustable
from ..argmax import argmax
from ..config import COUPLED
from ..devices import from_host
from ..distributed.target_ranks import TargetRanks
from ..logits_processing import STATELESS, are_by_row, has_constraint, process_positions
from ..noise import Noise
from ..rounds import FINISHED, Outcome
from ..stats import SSDDecoderOnlyOutput, SSDStats
from .sequences import Sequences
from .settings import Settings
from .streaming import Stream
from .target import Target
from .verification import Chance, coupled_choices, verify_coupled, verify_greedy, verify_sampled

SLICE_BYTES = 2**28
"""Bytes of float32 scores that are processed and verified at a time, in whole rows. Bounds the memory use."""


def check_drawn(tokens: list[int]) -> None:
    """Raises `RuntimeError`, with the message of `torch.multinomial`, if a row had no distribution to draw from."""
    if min(tokens, default=0) < 0:
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0, or sums to 0")


class CallRows:
    """Rows with the same settings, decided at all positions at once, or one by one where a processor needs that."""

    join = pause = has_read = False  # only the rows of a running batch do
    row = 0  # of the target, where the first of these rows stands

    def __init__(
        self,
        settings: Settings,
        sequences: Sequences,
        seed: int,
        vocab_size: int,
        target: Target | None = None,
        ranks: TargetRanks | None = None,
        streamer: BaseStreamer | None = None,
    ):
        options, self.settings, self.processors = settings.options, settings, settings.processors
        self.do_sample, self.wants_dict = options.do_sample, options.return_dict_in_generate
        self.uses_q, self.target, self.ranks = settings.uses_q, target, ranks or TargetRanks()
        self.noise = Noise(seed, vocab_size, settings.config.verification == COUPLED) if self.do_sample else None
        self.sequences, self.propose = sequences, sequences.propose
        self.unfinished = sequences.unfinished  # which rows still need tokens
        self.streams = streamer is not None
        self.stream = Stream(streamer, sequences) if self.streams else None
        self.on_logits = getattr(streamer, "on_logits", None)  # see [`RoundStreamer`]
        wants = {"scores": options.output_scores, "logits": options.output_logits} if self.wants_dict else {}
        # What the tokens of each row were chosen from, (vocab_size,) each. Rows may advance by different amounts.
        self.steps = {name: [[] for _ in sequences.prompts] for name, is_wanted in wants.items() if is_wanted}
        self.stats = SSDStats(sequences.batch_size, adjustable=adjustable(settings.config, self.uses_q))
        self.of_round: tuple | None = None  # what `keep` needs of the round that was decided, if it is not kept yet
        constrained, unknown = has_constraint(self.processors), not are_by_row(self.processors)
        # They are called for a position only when all tokens before it are decided, so that they see the same tokens as
        # in plain generation.
        self.by_step = unknown or constrained
        # All rows keep the same length, so the first rejection ends the round for all of them. An unknown processor may
        # compare rows or keep a state. A constraint must not see tokens after a row's end, which may depend on others.
        self.in_step = unknown or (constrained and not sequences.ends_by_row)
        # Whether greedy tokens are all that is wanted of logits that nothing processes.
        self.is_simple = not (self.by_step or self.processors or self.do_sample or self.steps or self.on_logits)

    # ---------------------------------------------------------------- keeping

    def keep(self, outcome: Outcome) -> None:
        """Adds the tokens of the outcome to the rows, and finds out which rows have ended."""
        if self.of_round is not None:
            self._keep(range(self.sequences.batch_size), outcome.tokens, *self.of_round)
            self.of_round = None
        self.unfinished = self.sequences.unfinished

    def _keep(self, rows, new_tokens: list[list[int]], logits, scores, on_device: torch.LongTensor | None = None):
        """`logits` and `scores` are those of the `rows` that were decided, of the positions of their tokens."""
        self.sequences.accept(new_tokens, on_device)
        for name, steps in self.steps.items():
            for row, of_row in zip(rows, scores if name == "scores" else logits):
                dtype = of_row.dtype if name == "scores" else torch.float32
                new = of_row[: len(new_tokens[row])]
                steps[row].extend(new.to(device=self.sequences.ids.device, dtype=dtype, copy=True))
        for row, of_row in zip(rows, logits) if self.on_logits else ():
            self.on_logits(row, new_tokens[row], of_row[: len(new_tokens[row])])
        self.sequences.stop_where_plain_generation_would(new_tokens, lambda length: self._steps("scores", length))
        if not self.sequences.simple:  # a time limit, for example, may pass earlier on some ranks
            self.sequences.stops = self.ranks.share_values(self.sequences.stops)

    def _steps(self, name: str, length: int) -> tuple[torch.Tensor, ...] | None:
        """Returns a tensor `(batch_size, vocab_size)` for each token up to a length, with zeros for shorter rows."""
        if name not in self.steps:
            return None
        rows, count = self.steps[name], length - self.sequences.prompt_length
        blank = torch.zeros_like(next(row[0] for row in rows if row))
        return tuple(torch.stack([row[i] if i < len(row) else blank for row in rows]) for i in range(count))

    def report(self) -> None:
        """Streams the new tokens, once all bookkeeping of a round is done."""
        if self.stream is not None:
            self.stream.update(self.stats)

    def finish(self) -> torch.LongTensor:
        """Returns the output, and completes the statistics."""
        sequences = self.sequences
        if self.stream is not None:
            self.stream.streamer.end()
        kept = sum(map(sequences.kept, range(sequences.batch_size)))
        self.stats.generated_tokens = kept - sequences.batch_size * sequences.prompt_length
        return sequences.as_in_plain_generation(sequences.final_length).clone()

    def result(self, sequences: torch.LongTensor, **cache) -> torch.LongTensor | SSDDecoderOnlyOutput:
        """Returns what `generate()` would with the output of [`~CallRows.finish`]."""
        if not self.wants_dict:
            return sequences
        steps = {name: self._steps(name, sequences.shape[1]) for name in self.steps}
        return SSDDecoderOnlyOutput(sequences=sequences, ssd_stats=self.stats, **steps, **cache)

    # ---------------------------------------------------------------- deciding

    def decide(self, logits: torch.Tensor, q: torch.Tensor | None, following: torch.LongTensor | None) -> Outcome:
        """Returns the outcome, valid only on the leader, by raw logits `(batch_size, lookahead + 1, vocab_size)`."""
        if following is None:  # nothing was proposed before the first round
            following = self.sequences.ids.new_full((self.sequences.batch_size, 1), -1)
        if self.by_step:
            return self.decide_by_step(logits, q, following[:, :-1])
        unfinished, scores = self.unfinished, []
        decided = self._decide(logits, following, q, scores).to(following.device)
        accepted, bonus, unlikely, unsound = decided.tolist()  # a single copy, so a single wait
        if following.shape[1] > 1 and any(is_bad and goes_on for is_bad, goes_on in zip(unsound, unfinished)):
            return self.decide_by_step(logits, q, following[:, :-1])
        if self.do_sample:
            check_drawn([token for token, goes_on in zip(bonus, unfinished) if goes_on])
            self.stats.unlikely_tokens += sum(count for count, goes_on in zip(unlikely, unfinished) if goes_on)
        accepted = [k if goes_on else FINISHED for k, goes_on in zip(accepted, unfinished)]
        # The processed scores (positions, vocab_size) of each row, if they are wanted, and the bonus tokens on the
        # device (batch_size,), unless there are several ranks.
        self.of_round = logits, scores, decided[1] if self.ranks.size == 1 else None
        return Outcome.of(self.sequences.proposed, accepted, bonus)

    def choices(self, logits: torch.Tensor, depths: np.ndarray) -> list[list[int]]:
        """Guesses what the target chooses by raw logits `(batch_size, N, vocab_size)` after `depths` more tokens."""
        rows, size, chosen = range(len(logits)), max(1, SLICE_BYTES // (4 * logits[0].numel())), []
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            chosen += self._choices(logits[part], depths[part], rows[part])
        return chosen

    def _choices(self, logits: torch.Tensor, depths: np.ndarray, rows: range) -> list[list[int]]:
        warpers = LogitsProcessorList(one for one in self.processors if type(one) in STATELESS)
        ids = self.sequences.ids
        scores = warpers(None, logits.to(ids.device, torch.float32).flatten(0, 1)).view_as(logits)
        if not self.do_sample:
            return argmax(scores).tolist()
        starts = [self.sequences.lengths[row] - 1 - self.sequences.padding[row] for row in rows]
        chance = Chance(self.noise, *from_host([list(rows), starts], ids.device))
        noise = chance.of_draws(torch.arange(depths.max() + 1, device=ids.device)[None])
        index = from_host(torch.from_numpy(depths), ids.device)
        return coupled_choices(scores, noise[torch.arange(len(logits), device=ids.device)[:, None], index]).tolist()

    def _decide(self, logits, following, q, kept: list) -> torch.LongTensor:
        """Returns accepted counts, bonus tokens, numbers of unlikely tokens and whether logits are NaN `(4, rows)`."""
        rows, drafted = range(len(logits)), following[:, :-1]
        size = max(1, SLICE_BYTES // (4 * logits[0].numel()))
        outcomes = [drafted.new_zeros(3, 0 if self.ranks.is_leader else len(rows))]
        for start in range(0, len(rows), size) if self.ranks.is_leader or "scores" in self.steps else ():
            part = slice(start, start + size)
            scores = process_positions(
                self.processors, logits[part], self.sequences.ids, self.sequences.lengths, rows[part]
            )
            if "scores" in self.steps:
                kept.extend(scores)
            if self.ranks.is_leader:
                of_part = None if q is None else q[part]
                outcomes.append(self._verify(scores, drafted[part], of_part, rows[part], self.sequences.lengths))
        # If a hidden state is NaN, all logits of its position are NaN, so the first logit of each position is enough.
        unsound = logits[..., 0].isnan().any(dim=1).long().to(drafted.device)
        return torch.cat([torch.cat(outcomes, dim=1), unsound[None]])

    def _verify(self, scores, drafted, q, rows, lengths: list[int], depth: int = 0) -> torch.LongTensor:
        """Returns accepted counts, bonus tokens and numbers of unlikely tokens `(3, rows)` by processed scores."""
        if self.do_sample:
            starts = [lengths[row] - 1 - self.sequences.padding[row] for row in rows]
            chance = Chance(self.noise, *from_host([list(rows), starts], scores.device), depth)
            if self.noise.coupled:
                return torch.stack(verify_coupled(scores, drafted, chance))
            return torch.stack(verify_sampled(scores, q, drafted, chance))
        accepted, bonus = verify_greedy(scores, drafted)
        return torch.stack([accepted, bonus, torch.zeros_like(accepted)])

    def verify_alone(self, rows: list[int], place: int) -> torch.Tensor:
        """See [`Target.verify_alone`]."""
        return self.target.verify_alone([self.row + row for row in rows], place)[self.row :]

    def _sound(self, rows: list[int], logits: torch.Tensor) -> list[int]:
        """Returns the rows whose logits `(batch_size, vocab_size)` are not NaN."""
        is_nan = logits[:, 0].isnan().tolist()
        return self.ranks.share_values([row for row in rows if not is_nan[row]])

    def _next_tokens(self, logits, q, drafted, place: int, rows: list[int], before: list[int]):
        """Returns the tokens of one `place` of some rows, how many are unlikely, and the scores that decided."""
        lengths, decided = self.sequences.lengths, None
        ids = self.sequences.as_in_plain_generation(max(lengths[row] for row in rows))
        scores = process_positions(self.processors, logits, ids, lengths, rows)
        if self.ranks.is_leader:
            here = drafted[rows, place : place + 1]
            q_here = q[rows, place : place + 1] if q is not None and here.shape[1] else None
            both = scores.expand(-1, 1 + here.shape[1], -1)  # accepting looks no further than this position
            accepted, bonus, unlikely = self._verify(both, here, q_here, rows, before, place)
            tokens = torch.cat([bonus[:, None], here], dim=1).gather(1, accepted[:, None])[:, 0]
            decided = torch.stack([tokens, unlikely]).tolist()
        return *self.ranks.share_values(decided), scores

    def decide_by_step(self, logits: torch.Tensor, q: torch.Tensor | None, drafted: torch.LongTensor) -> Outcome:
        """Decides on the positions in order, as long as rows accept their drafted tokens, and keeps the tokens."""
        # A row with NaN logits is fed again token by token, as in plain generation. The same rule accepts its tokens:
        # whether a row needs this depends on what was drafted, and another rule would be a bias. It ends before logits
        # that are NaN without a drafted token, because they follow from its own.
        sequences, before, proposed = self.sequences, self.sequences.lengths, self.sequences.proposed
        gained: list[list[int]] = [[] for _ in proposed]
        going = [row for row, unfinished in enumerate(sequences.unfinished) if unfinished]
        unsound = [row for row in going if logits[row, :, 0].isnan().any()] if drafted.shape[1] else []
        if unsound:
            logits[unsound, :1] = self.verify_alone(unsound, 0)[unsound]
        for place in range(logits.shape[1]):
            # 1. Choose the next token of each row that goes on.
            here = logits[going, place : place + 1]
            tokens, unlikely, scores = self._next_tokens(here, q, drafted, place, going, before)
            self.stats.unlikely_tokens += sum(unlikely)
            if self.do_sample:
                check_drawn(tokens)

            # 2. Add the token to the row, which may end there.
            for row, token in zip(going, tokens):
                gained[row].append(token)
            self._keep(going, [of_row[place:] for of_row in gained], here, scores)

            # 3. Go on with the rows whose token is the drafted token.
            if place == drafted.shape[1]:
                break
            unfinished = sequences.unfinished
            alive = [row for row in going if unfinished[row]]
            going = [row for row in alive if gained[row][place] == proposed[row][place]]
            again = [row for row in going if row in unsound]
            if again and not (self.in_step and going != alive):
                alone = self.verify_alone(unsound, place + 1)
                logits[again, place + 1] = alone[again, 0]
                sound = self._sound(again, alone[:, 0])
                going = [row for row in going if row in sound or row not in unsound]
            if not going or (self.in_step and going != alive):
                break
        return Outcome(gained)
