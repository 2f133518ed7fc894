"""What a draft is, for its target and the settings of a call. All code outside of this package asks here."""

import json
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file, is_peft_available

from ..cache.hidden_states import check_layers
from ..cache.support import attention_layout, without_wrapper
from ..config import SSDConfig, could_be_hub_id
from ..gguf_files import config_of, gguf_place
from .draft_info import DraftInfo
from .drafters import drafter_kind
from .heads.base import Head
from .heads.loading import OF_TARGET, head_for, kind_of, refusal

_of_paths: "weakref.WeakKeyDictionary[PreTrainedModel, dict]" = weakref.WeakKeyDictionary()  # of each target


@dataclass(frozen=True)
class ResolvedDraft:
    """A draft, as everybody works with it: a model, a path, a worker, or none."""

    model: PreTrainedModel | None = None  # in this process, in the form in which it drafts for the target
    path: str | None = None  # the folder or hub id of a draft that only a worker loads
    assistant: object | None = None  # the `DraftAssistant` that was passed
    info: DraftInfo | None = None
    one_pass: bool = False  # whether a pass gives all tokens of a speculation, as the planner must know
    fallback: PreTrainedModel | None = None  # a head of the target that drafts after a miss
    reader: DraftInfo | None = None  # the facts of the fallback, if there is one, or of the draft

    @property
    def name(self) -> str:
        """The folder or hub id that it was loaded from, empty if it was made in this program."""
        return self.path or (self.assistant.path if self.model is None else self.model.config._name_or_path) or ""

    @property
    def takes_worker(self) -> bool:
        """Whether it may draft in another process."""
        return self.info is not None and not (isinstance(self.model, Head) and self.model.drafts_in_turn)

    @property
    def reads(self) -> tuple | None:
        """The layers of the target whose hidden states are read, and those whose keys and values are, if any are."""
        has_layers = self.reader is not None and self.reader.target_layers
        return (self.reader.target_layers, self.reader.target_keys) if has_layers else None

    @property
    def width(self) -> int:
        """How many numbers of each token of the target are read."""
        return 0 if self.reader is None else self.reader.target_width


def resolve(draft, target: PreTrainedModel, config: SSDConfig) -> ResolvedDraft:
    """Says what `assistant_model` is, or raises `TypeError` or `ValueError`. Reads a folder once for each target."""
    draft = OF_TARGET[config.drafter](target) if config.drafter in OF_TARGET else without_wrapper(draft)
    path = info = model = fallback = None
    if isinstance(draft, (str, os.PathLike)):
        path, known = os.fspath(draft), _of_paths.setdefault(target, {})
        if path not in known:
            known[path] = head_for(path, target) or DraftInfo.of(config_at(path))
        draft, info = (None, known[path]) if isinstance(known[path], DraftInfo) else (known[path], None)
    if isinstance(draft, PreTrainedModel):
        path, model, draft = None, head_for(draft, target) or draft, None
        attention_layout(model)
        info = DraftInfo.of(model.config)
    elif draft is not None:
        if not hasattr(draft, "info"):
            raise TypeError(
                "`assistant_model` must be a transformers model, a folder or hub id, or what hf_ssd.launch_draft() "
                f"gives, but is a {type(draft).__name__}."
            )
        given = None if draft.weights is None else draft.weights.model()  # which may have changed since the launch
        info = draft.info if given is None else DraftInfo.of(given.config)
    one_pass = info is not None and drafter_kind(config, info).one_pass
    reads_target = info is not None and bool(info.target_layers)
    if reads_target:
        width = len(info.target_layers) * target.config.get_text_config(decoder=True).hidden_size
        check_layers(target, info.target_layers)
        if info.target_width != width and not info.target_keys:  # a head that reads keys was made for this target
            raise ValueError(
                f"The draft reads {info.target_width} numbers of the target's hidden states, and these layers of "
                f"{type(target).__name__} have {width}; the draft was made for another target."
            )
    if isinstance(config.fallback, str) and config.fallback in OF_TARGET:
        if reads_target:
            raise ValueError(
                f'SSDConfig(fallback="{config.fallback}") reads hidden states of the target, and this draft reads '
                "hidden states of its own; leave it out."
            )
        fallback = OF_TARGET[config.fallback](target)
    reader = info if fallback is None else DraftInfo.of(fallback.config)
    return ResolvedDraft(model, path, draft, info, one_pass, fallback, reader)


def forget(path: str) -> list[PreTrainedModel]:
    """Forgets what is known of a folder or hub id, and returns its heads."""
    known = [of_target.pop(path) for of_target in _of_paths.values() if path in of_target]
    return [one for one in known if isinstance(one, Head)]


def for_worker(
    draft: PreTrainedModel | str | os.PathLike, target: PreTrainedModel | None = None, dtype=None, **options
) -> PreTrainedModel | str | os.PathLike:
    """Returns the draft as a worker gets it, a head as a model for the target, or raises `ValueError`."""
    kind, values = kind_of(draft)
    if kind is None:
        if not isinstance(draft, PreTrainedModel):
            config_at(draft, **options)
        return draft
    if kind.drafts_in_turn or (target is None and not isinstance(draft, Head)):
        raise refusal(draft, kind, values)
    return head_for(draft, without_wrapper(target), dtype)


def config_at(path: str | os.PathLike, **load_options) -> PreTrainedConfig:
    """Reads the config of a draft that only a worker loads, or raises `ValueError` if there is no model."""
    path = os.fspath(path)
    place, options = gguf_place(path, load_options)
    try:
        return config_of(place, {"trust_remote_code": False, **options})
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        if "gguf_file" in options:
            raise ValueError(f"The draft {path!r} is a GGUF file that transformers cannot load: {reason}") from error
        if not os.path.exists(path) and not could_be_hub_id(path):
            raise ValueError(f"There is no folder {path!r}; give the draft's folder or hub id.") from error
        adapter = find_adapter_config_file(path) if is_peft_available() else None
        if adapter is not None:  # read the config of the adapter's base model
            return config_at(json.loads(Path(adapter).read_text())["base_model_name_or_path"])
        is_what = "is a folder without a model" if os.path.isdir(path) else "is no folder, and no model of the hub"
        raise ValueError(f"The draft {path!r} {is_what} that transformers can load: {reason}") from error
