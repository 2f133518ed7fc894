"""The settings of speculative speculative decoding, as a dataclass."""

import dataclasses
import difflib
import functools
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

CONFIG_NAME = "ssd_config.json"
LONGEST_LOOKAHEAD = 64  # tokens
MOST_NODES = 256  # of a row's token tree


def _names_settings(cls: type) -> type:
    """Makes the class raise `ValueError` for an unknown keyword and suggest the setting with the closest name."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self, *args, **settings):
        known = [field.name for field in dataclasses.fields(cls)]
        for name in sorted(settings.keys() - set(known)):
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]!r}? The" if nearest else "the"
            raise ValueError(f"SSDConfig has no setting {name!r}; {hint} settings are {', '.join(known)}.")
        init(self, *args, **settings)

    cls.__init__ = checked
    return cls


@_names_settings
@dataclass
class SSDConfig:
    """
    Configuration of speculative speculative decoding (SSD), passed to `generate(..., ssd_config=SSDConfig())`.

    The settings change the speed of generation, and never the distribution of the generated tokens.

    Args:
        lookahead (`int` or `str`, *optional*, defaults to `"auto"`):
            Number of drafted tokens in a speculation, K in the paper. At most 64; 0 never drafts. `"auto"` chooses it
            during generation from measured times, acceptance and hits, down to 0 where the draft does not pay. Only a
            call that samples with a fixed lookahead waits for a worker that is starting, so that a seed repeats its
            tokens.
        budget (`int` or `str`, *optional*, defaults to `"auto"`):
            Number of verification outcomes prepared for each row in each round, B in the paper. At least 1. `"auto"`
            chooses it in the same way as the lookahead.
        tree_nodes (`int` or `str`, *optional*, defaults to `"auto"`):
            How many drafted tokens are verified for each row in a pass: the `lookahead` tokens of the speculation, and
            beside them, as further leaves of a token tree, those that the draft ranks next where it is least certain.
            At most 256; `"auto"` verifies no others. Takes effect where a mask can hide columns and tokens are decided
            by comparison: in greedy decoding and with `verification="coupled"`.
        fan_out (`str` or `list[int]`, *optional*, defaults to `"confidence"`):
            How the budget is shared between the accepted counts 0 to K, F_k in the paper: `"confidence"` (the most
            likely outcomes of this round), `"geometric"` (Theorem 12), `"uniform"`, or a list of lookahead + 1
            integers, which then also set `lookahead` and `budget`.
        saguaro_c (`float`, *optional*, defaults to 1.0):
            C in [0, 1] of Saguaro sampling (Definition 14): smaller values trade acceptance for hits, 1 is ordinary
            sampling. Makes no difference to greedy decoding.
        verification (`str`, *optional*, defaults to `"rejection"`):
            The rule by which sampled tokens are accepted: `"rejection"` (speculative sampling), or `"coupled"`: draft
            and target draw with the same noise, and a drafted token is accepted where the target draws it too. The text
            is then a function of target, prompt, row and seed, up to rounding: any draft and settings give the same.
        fallback (`str` or object, *optional*, defaults to `"auto"`):
            The source of a row's speculation if its outcome was not prepared: `"primary"` (the draft model, just in
            time), `"ngram"` (the tokens that followed the last tokens at an earlier occurrence), `"random"` (any tokens
            of the text), `"mtp"` (see `drafter`), or `"auto"`: the primary, and with `lookahead="auto"` and a single
            draft n-grams compete with it in every round, where the planner finds that the texts repeat themselves. Or,
            called in the target's process, a transformers `CandidateGenerator`, or an object whose `propose(input_ids,
            lookahead)` takes ids of shape `(1, length)` and returns tokens and their probabilities `(1, n,
            vocab_size)`, or `None` for certain tokens.
        drafter (`str`, *optional*, defaults to `"auto"`):
            How the draft model proposes tokens: `"autoregressive"` (a forward pass for each token), `"parallel"` (a
            single pass for all tokens, which PARD models are trained for), `"eagle3"` (a head that reads the target's
            hidden states), `"dflash"` (a draft that reads them and fills a block of mask tokens in a single pass), or
            `"auto"`, which is the kind that the model was made for. Two kinds take no draft model and work in the
            target's process: `"ngram"` proposes what followed the last tokens of a row where they have occurred before
            in it (prompt lookup), and `"mtp"` drafts with the target's own layer for multi-token prediction, loaded
            from the target's checkpoint.
        acceptance_rate (`float`, *optional*, defaults to 0.8):
            Prior for the chance that a drafted token is accepted, a in Theorem 12. Between 0 and 1, both excluded.
        power_law_exponent (`float`, *optional*, defaults to 0.5):
            Prior for the exponent of the miss rate, r in Theorem 12: a fan-out of F misses the bonus token with
            probability F^-r. Positive.
        timeout (`float`, *optional*, defaults to 30.0):
            Seconds to wait for an answer of the draft worker before the worker counts as failed. A call waits as long
            for each of the calls that the worker serves at the time.
        on_draft_failure (`str`, *optional*, defaults to `"continue"`):
            What happens when the draft dies, hangs, raises or does not start: `"continue"` warns once and finishes by
            plain decoding, `"raise"` raises [`~hf_ssd.DraftError`].
        asynchronous (`bool`, *optional*, defaults to `True`):
            `True` drafts in the worker while the target verifies. `False` drafts in turn with the target, in this
            process or, if the draft was launched, in its worker. This is ordinary speculative decoding, for baselines
            and debugging. A fixed lookahead with the primary fallback gives the same tokens both ways, also when
            sampling.
        cuda_graphs (`bool` or `str`, *optional*, defaults to `"auto"`):
            Whether forward passes over a few tokens are captured as CUDA graphs and replayed, so that the host launches
            a whole pass and not each kernel. `"auto"` does so for a model that is on a single CUDA device, if it can be
            captured; `True` also warns once if a model is not on CUDA. Graphs and the storage that they read stay in
            the device's memory until the model is deleted.
        pack_weights (`bool` or `str`, *optional*, defaults to `"auto"`):
            Whether passes on a CPU use copies of the weights of `nn.Linear` layers and of experts, in the order in
            which the processor reads them, which makes passes over a few tokens several times faster in float32.
            Results differ by rounding. `"auto"` packs layers for which a trial shows a gain, if the free memory holds
            the copies twice; `True` packs all layers that can be packed; `False` none. The trial goes by the clock, so
            set `True` or `False` where a seed is to repeat a text exactly in another process. A copy is as large as the
            weight and is kept until the model is deleted. Compiled models and GPUs do without.
    """

    lookahead: int | str = "auto"
    budget: int | str = "auto"
    tree_nodes: int | str = "auto"
    fan_out: str | list[int] = "confidence"
    saguaro_c: float = 1.0
    verification: str = "rejection"
    fallback: object = "auto"
    drafter: str = "auto"
    acceptance_rate: float = 0.8
    power_law_exponent: float = 0.5
    timeout: float = 30.0
    on_draft_failure: str = "continue"
    asynchronous: bool = True
    cuda_graphs: bool | str = "auto"
    pack_weights: bool | str = "auto"

    def __post_init__(self):
        if not isinstance(self.fan_out, str):
            counts = self.fan_out if isinstance(self.fan_out, (list, tuple)) else ()
            are_counts = len(counts) > 1 and all(_is_integer(f, 0) for f in counts) and sum(counts) > 0
            length = "at least 2" if self.lookahead == "auto" else f"here {self.lookahead} + 1"
            fits = are_counts and self.lookahead in ("auto", len(counts) - 1)
            _require("fan_out", self.fan_out, fits, f"{_FAN_OUT} ({length}, not all zero)")
            self.fan_out, self.lookahead, self.budget = list(counts), len(counts) - 1, sum(counts)
        a, r, c, timeout = map(_number, (self.acceptance_rate, self.power_law_exponent, self.saguaro_c, self.timeout))
        longest, most, has_named_fallback = LONGEST_LOOKAHEAD, MOST_NODES, isinstance(self.fallback, str)
        can_propose = any(callable(getattr(self.fallback, name, None)) for name in ("propose", "get_candidates"))
        rules = {
            "fan_out": (isinstance(self.fan_out, list) or self.fan_out in FAN_OUTS, _FAN_OUT),
            "lookahead": (
                self.lookahead in LOOKAHEADS or _is_integer(self.lookahead, 0, longest),
                f'"auto" or an integer between 0 and {longest}',
            ),
            "budget": (_is_count(self.budget, 1), '"auto" or an integer of at least 1'),
            "tree_nodes": (_is_count(self.tree_nodes, 1, most), f'"auto" or an integer between 1 and {most}'),
            "saguaro_c": (0 <= c <= 1, "a number between 0 and 1"),
            "verification": (self.verification in VERIFICATIONS, ", ".join(f'"{name}"' for name in VERIFICATIONS)),
            "fallback": (self.fallback in FALLBACKS if has_named_fallback else can_propose, _FALLBACK),
            "drafter": (self.drafter in DRAFTERS, ", ".join(f'"{name}"' for name in DRAFTERS)),
            "acceptance_rate": (0 < a < 1, "a number between 0 and 1, both excluded"),
            "power_law_exponent": (0 < r < math.inf, "a positive number"),
            "timeout": (0 < timeout < math.inf, "a positive number of seconds"),
            "on_draft_failure": (self.on_draft_failure in ("continue", "raise"), '"continue" or "raise"'),
            "asynchronous": (isinstance(self.asynchronous, bool), "True or False"),
        }
        for name in ("cuda_graphs", "pack_weights"):
            value = getattr(self, name)
            rules[name] = isinstance(value, bool) or value == "auto", '"auto", True or False'
        for name, (is_allowed, allowed) in rules.items():
            _require(name, getattr(self, name), is_allowed, allowed)
        if self.verification == COUPLED:
            _require("saguaro_c", c, c == 1, '1 with verification="coupled", which needs no probabilities of the draft')
        if self.drafter in WITHOUT_DRAFT:  # in turn with the target, and a row without a match has no speculation
            allowed = f'"auto" with drafter="{self.drafter}", which prepares nothing ahead'
            _require("budget", self.budget, self.budget == "auto", allowed)
            has_misses = not has_named_fallback or self.fallback not in ("auto", "ngram")
            allowed = f'"auto" with drafter="{self.drafter}", which has no misses'
            _require("fallback", self.fallback, not has_misses, allowed)

    def uses_q(self, do_sample: bool) -> bool:
        """Whether verification uses the distributions that tokens were drawn from."""
        return do_sample and self.verification == REJECTION

    def to_dict(self) -> dict:
        """Returns the settings as plain objects for JSON. A `fallback` that is an object raises `ValueError`."""
        if not isinstance(self.fallback, str):
            raise ValueError("A `fallback` of your own cannot be saved; give it to SSDConfig again after loading.")
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, settings: dict) -> "SSDConfig":
        """
        Returns the configuration that [`~SSDConfig.to_dict`] gave as `settings`. Missing keys take their default; an
        unknown key or a value that is not allowed raises `ValueError`.
        """
        if not isinstance(settings, dict):
            raise ValueError(f"The settings of SSDConfig are a {type(settings).__name__}, but must be a dict.")
        return cls(**{str(name): value for name, value in settings.items()})

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes `ssd_config.json` into `save_directory`, which is created if needed."""
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

        Raises:
            `ValueError`, `TypeError`: there is no such folder, or the file is missing or not JSON, or has an unknown
                setting or a value that is not allowed.
        """
        from transformers.utils import cached_file

        settings = {field.name: kwargs.pop(field.name) for field in dataclasses.fields(cls) if field.name in kwargs}
        name = pretrained_model_name_or_path
        if not isinstance(name, (str, os.PathLike)):
            raise TypeError(f"SSDConfig.from_pretrained takes a folder or hub id, not a {type(name).__name__}.")
        name = os.fspath(name)
        if not os.path.exists(name) and not could_be_hub_id(name):
            raise ValueError(f"There is no folder {name!r}; SSDConfig.save_pretrained() writes one with {CONFIG_NAME}.")
        folder = Path(name, kwargs.get("subfolder") or "")
        if os.path.isdir(name) and not (folder / CONFIG_NAME).is_file():
            raise ValueError(f"{str(folder)!r} has no {CONFIG_NAME}; SSDConfig.save_pretrained() writes it.")
        path = cached_file(name, CONFIG_NAME, **kwargs)
        try:
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}); write it with SSDConfig.save_pretrained().") from error
        if not isinstance(saved, dict):
            raise ValueError(f"{path} has no settings; write it with SSDConfig.save_pretrained().")
        return cls.from_dict({**saved, **settings})


FAN_OUTS = ("confidence", "geometric", "uniform")
LOOKAHEADS = ("auto",)
VERIFICATIONS = REJECTION, COUPLED = ("rejection", "coupled")
FALLBACKS = ("auto", "primary", "mtp", "ngram", "random")
DRAFTERS = ("auto", "autoregressive", "parallel", "eagle3", "dflash", "mtp", "ngram")
WITHOUT_DRAFT = ("mtp", "ngram")  # drafters that take no draft model, and draft in the target's process
_FAN_OUT = ", ".join(f'"{name}"' for name in FAN_OUTS) + " or lookahead + 1 integers of at least 0"
_FALLBACK = ", ".join(f'"{name}"' for name in FALLBACKS) + (
    ", an object with propose(input_ids, lookahead), or a CandidateGenerator that needs no outputs of the target"
)


def could_be_hub_id(name: str) -> bool:
    """Whether a repository on the hub could have this name. The caller has checked that it is not a local path."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is not None


def _require(name: str, value, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"SSDConfig: `{name}` is {value!r}, but must be {allowed}.")


def _is_count(value, low: int, high: float = math.inf) -> bool:
    return value == "auto" or _is_integer(value, low, high)


def _is_integer(value, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of more than 300 digits
        return math.inf
