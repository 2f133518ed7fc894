"""The rows of a generate() call, or of a request of a running batch: how they are decided, kept and streamed."""

from collections.abc import Callable

import torch
from transformers.generation.streamers import BaseStreamer

from ..advice import adjustable
from ..config import COUPLED
from ..distributed.target_ranks import TargetRanks
from ..noise import Noise
from ..stats import SSDStats
from .deciding import Decider
from .sequences import Sequences
from .settings import Settings
from .streaming import Stream


class CallRows(Decider):
    """
    Rows with the same settings, which a [`Decider`] decides. `seed` and `vocab_size` are those of the noise, `padding`
    the columns before each row's first token. For `verify_alone` see [`~hf_ssd.generation.target.Target`].
    """

    join = pause = has_read = False  # only the rows of a running batch do

    def __init__(
        self,
        settings: Settings,
        sequences: Sequences,
        seed: int,
        vocab_size: int,
        padding: list[int],
        verify_alone: Callable,
        ranks: TargetRanks | None = None,
        streamer: BaseStreamer | None = None,
    ):
        coupled = settings.config.verification == COUPLED
        noise = Noise(seed, vocab_size, coupled) if settings.do_sample else None
        on_logits = getattr(streamer, "on_logits", None)
        super().__init__(settings, sequences, noise, padding, ranks or TargetRanks(), verify_alone, on_logits)
        self.settings, self.uses_q, self.propose = settings, settings.uses_q, sequences.propose
        self.stream = None if streamer is None else Stream(streamer, sequences)
        self.streams = streamer is not None
        wanted = self.wants_scores or self.logits is not None or on_logits is not None
        self.is_simple = not (self.by_step or self.processors or settings.do_sample or wanted)
        self.stats = SSDStats(sequences.batch_size, adjustable=adjustable(settings.config, self.uses_q))

    def begin(self) -> torch.LongTensor:
        """Returns what was proposed before the first round: no tokens. See [`Sequences.propose`]."""
        return self.sequences.ids.new_full((self.sequences.batch_size, 1), -1)

    def report(self, stats: SSDStats) -> None:
        """Streams the new tokens, once all bookkeeping of a round is done."""
        if self.stream is not None:
            self.stream.update(stats)

    def finish(self) -> torch.LongTensor:
        """Returns the output, and completes the statistics."""
        sequences = self.sequences
        if self.stream is not None:
            self.stream.end()
        kept = sum(map(sequences.kept, range(sequences.batch_size)))
        self.stats.generated_tokens = kept - sequences.batch_size * sequences.prompt_length
        self.stats.unlikely_tokens = self.unlikely_tokens
        return sequences.finish()
