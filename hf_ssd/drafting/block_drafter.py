"""Drafting with a head that fills a block of mask tokens in one pass, in turn with its target."""

import torch

from ..devices import from_host
from .head_drafter import HeadPrefix
from .parallel_drafter import ParallelDrafter
from .verified_prefix import VerifiedPrefix


class BlockPrefix(HeadPrefix):
    """The verified tokens as such a head reads them: column `c` has token `c` and its state, zeros until it comes."""

    block = 1  # columns, from that of the last verified token on, which see each other

    def _texts(self, prompts):
        return VerifiedPrefix._texts(self, prompts)

    def _column(self, row, token):
        return token

    def _decoder(self, model, continues, **options):
        return super()._decoder(model, continues, **{**options, "column_limit": None})  # blocks go beyond the text

    def _next(self, count, at_least):
        inputs, starts, width = super()._next(count, at_least)
        behind = from_host([n + self.block - 2 - start for n, start in zip(self.columns, starts)], self.device)
        inputs[:, :, -1] = (behind[:, None] - torch.arange(width, device=self.device)).clamp(min=0)
        return inputs, starts, width


class BlockDrafter(ParallelDrafter):
    """A head that is fed the last verified token and mask tokens, in blocks of at least the size of its training."""

    reads_target = True
    prefix_class = BlockPrefix

    def _guess(self, width):
        self.prefix.block = max(self.prefix.decoder.view.config.block_size, width + 1)
        return super()._guess(self.prefix.block - 1)[:, 1 : width + 1]
