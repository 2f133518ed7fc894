"""With `HF_SSD_PACK_WEIGHTS=1` in the environment, whole suites run with all weights packed, programs of tests too."""

import os

from hf_ssd import SSDConfig

PACKS = os.environ.get("HF_SSD_PACK_WEIGHTS") == "1"


def packing(self, check=SSDConfig.__post_init__):
    self.pack_weights = True if self.pack_weights == "auto" else self.pack_weights
    check(self)


if PACKS:
    SSDConfig.__post_init__ = packing
