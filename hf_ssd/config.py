"""Every knob of speculative speculative decoding, in one dataclass."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

CONFIG_NAME = "ssd_config.json"


@dataclass
class SSDConfig:
    """
    Configuration of speculative speculative decoding (SSD), passed to `generate(..., ssd_config=SSDConfig())`.

    None of these settings changes the distribution of the generated tokens: they change how fast they come.

    Args:
        lookahead (`int`, *optional*, defaults to 7):
            Number of tokens in one speculation, K in the paper. At least 1.
        budget (`int`, *optional*, defaults to 24):
            Number of verification outcomes prepared for each row in each round, B in the paper. At least 1.
        fan_out (`str` or `list[int]`, *optional*, defaults to `"geometric"`):
            How the budget is shared between the accepted counts 0 to K, F_k in the paper: `"geometric"` (Theorem 12),
            `"uniform"`, or `lookahead + 1` integers, whose sum then takes the place of `budget`.
        acceptance_rate (`float`, *optional*, defaults to 0.8):
            Prior for the chance that one drafted token is accepted, a in Theorem 12. Between 0 and 1, both excluded.
        power_law_exponent (`float`, *optional*, defaults to 0.5):
            Prior for the exponent of the miss rate, r in Theorem 12: a fan-out of F misses the bonus token with
            probability F^-r. Positive.
        timeout (`float`, *optional*, defaults to 30.0):
            Seconds to wait for one answer of the draft worker before it counts as failed.
        on_draft_failure (`str`, *optional*, defaults to `"continue"`):
            What happens when the draft worker dies, hangs or raises: `"continue"` warns once and finishes by plain
            decoding, `"raise"` raises [`~hf_ssd.DraftError`].
        asynchronous (`bool`, *optional*, defaults to `True`):
            `True` drafts in the worker while the target verifies. `False` drafts in this process and in turn with the
            target, which is ordinary speculative decoding: the baseline, and a way to debug. A fixed lookahead gives
            the same tokens both ways, sampled ones included.
    """

    lookahead: int = 7
    budget: int = 24
    fan_out: str | list[int] = "geometric"
    acceptance_rate: float = 0.8
    power_law_exponent: float = 0.5
    timeout: float = 30.0
    on_draft_failure: str = "continue"
    asynchronous: bool = True

    def __post_init__(self):
        _require_integer("lookahead", self.lookahead, at_least=1)
        _require_integer("budget", self.budget, at_least=1)
        if isinstance(self.fan_out, str):
            _require("fan_out", self.fan_out, self.fan_out in ("geometric", "uniform"), _FAN_OUT)
        else:
            whole = isinstance(self.fan_out, (list, tuple)) and all(
                isinstance(f, int) and not isinstance(f, bool) and f >= 0 for f in self.fan_out
            )
            allowed = whole and len(self.fan_out) == self.lookahead + 1 and sum(self.fan_out) > 0
            _require("fan_out", self.fan_out, allowed, f"{_FAN_OUT} (here {self.lookahead + 1}, not all zero)")
            self.fan_out = list(self.fan_out)
            self.budget = sum(self.fan_out)
        a, r, timeout = (_number(x) for x in (self.acceptance_rate, self.power_law_exponent, self.timeout))
        _require("acceptance_rate", self.acceptance_rate, 0 < a < 1, "a number between 0 and 1, both excluded")
        _require("power_law_exponent", self.power_law_exponent, 0 < r < math.inf, "a positive number")
        _require("timeout", self.timeout, 0 < timeout < math.inf, "a positive number of seconds")
        allowed = self.on_draft_failure in ("continue", "raise")
        _require("on_draft_failure", self.on_draft_failure, allowed, '"continue" or "raise"')
        _require("asynchronous", self.asynchronous, isinstance(self.asynchronous, bool), "True or False")

    def to_dict(self) -> dict:
        """Returns the settings as plain Python objects that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, settings: dict) -> "SSDConfig":
        """
        Args:
            settings (`dict`): What [`~SSDConfig.to_dict`] gave. Missing keys take their default.

        Raises:
            `ValueError`: a key is not a setting, or a value is not allowed.
        """
        unknown = sorted(set(settings) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            known = ", ".join(field.name for field in dataclasses.fields(cls))
            raise ValueError(f"SSDConfig has no setting {', '.join(map(repr, unknown))}; the settings are {known}.")
        return cls(**settings)

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes `ssd_config.json` into `save_directory`, which is made if needed."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> "SSDConfig":
        """
        Reads `ssd_config.json` from a folder or from a repository on the hub.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): A folder or a hub id.
            kwargs: Settings that replace those in the file, and options of `transformers.utils.cached_file` such as
                `revision`, `token` or `cache_dir`.
        """
        from transformers.utils import cached_file

        settings = {field.name: kwargs.pop(field.name) for field in dataclasses.fields(cls) if field.name in kwargs}
        path = cached_file(pretrained_model_name_or_path, CONFIG_NAME, **kwargs)
        return cls.from_dict({**json.loads(Path(path).read_text(encoding="utf-8")), **settings})


_FAN_OUT = '"geometric", "uniform" or lookahead + 1 integers of at least 0'


def _require(name: str, value, allowed: bool, what_is_allowed: str) -> None:
    if not allowed:
        raise ValueError(f"SSDConfig: `{name}` is {value!r}, but must be {what_is_allowed}.")


def _require_integer(name: str, value, at_least: int) -> None:
    allowed = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    _require(name, value, allowed, f"an integer of at least {at_least}")


def _number(value) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
