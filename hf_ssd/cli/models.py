"""The two models of a command: their names, places and files, and how they are loaded."""

import argparse
import contextlib
import functools
import os
import sys
from dataclasses import dataclass, field

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoProcessor, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as MULTIMODAL

import hf_ssd

from .. import devices
from ..cache import packed
from ..config import WITHOUT_DRAFT, could_be_hub_id
from ..distributed.assistant import DraftAssistant
from ..distributed.cores import CoreShare, available_cores, pin
from ..drafting.heads.loading import OF_TARGET, head_for
from ..gguf_files import config_of, gguf_place
from . import pair
from .options import settings

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")  # in one file or in several


@dataclass(frozen=True)
class Model:
    name: str  # hub id, folder or GGUF file
    device: torch.device = torch.device("cpu")
    dtype: str = "float32"  # of its weights, or "auto"
    files: dict = field(default_factory=dict)  # `revision`, `gguf_file` and `trust_remote_code` of `from_pretrained`
    tokenizer_name: str | None = None  # hub id or folder of its tokenizer, if it has none of its own
    attn_implementation: str | None = None

    @functools.cached_property
    def place(self) -> tuple[str, dict]:
        """The folder or hub id of the model, and the options of `from_pretrained` that say which file is read there."""
        return gguf_place(self.name, {"trust_remote_code": False, **self.files})

    def _read(self, read, **options):
        """Returns the result of a `from_pretrained` for the model's files, or raises `ValueError`."""
        folder, files = self.place
        if not os.path.exists(self.name) and not could_be_hub_id(self.name):
            raise ValueError(f"There is no folder {self.name!r}; give a folder with a model, or a hub id.")
        try:
            return read(folder, **{**files, **options})
        except (OSError, ValueError, ImportError) as error:
            sentence = str(error).strip().split("\n")[0] or type(error).__name__
            if "trust_remote_code" in str(error):
                sentence = "it brings code of its own, which runs with --trust-remote-code alone."
            raise ValueError(f"Cannot load a model from {self.name}: {sentence}") from error

    @property
    def _config(self):
        return self._read(lambda folder, **options: config_of(folder, options))

    def structure(self) -> PreTrainedModel:
        """Builds the model on the meta device, or raises `ValueError` if it does not generate text by itself."""
        config, trusts = self._config, self.place[1]["trust_remote_code"]
        if not config.is_encoder_decoder:
            try:
                with torch.device("meta"):
                    return AutoModelForCausalLM.from_config(config, trust_remote_code=trusts)
            except ValueError as error:  # its message lists all models that transformers knows
                if "Unrecognized configuration class" not in str(error):
                    raise
        kind = f"{self.name} is a {config.model_type} model"
        raise ValueError(f"{kind}; only decoder-only models that generate text can be used.")

    @functools.cached_property
    def tokenizer(self):
        """A tokenizer that pads on the left, or `None` for a model without a tokenizer, such as a random model."""
        name, options = self.place
        if self.tokenizer_name:
            name, options = self.tokenizer_name, {"trust_remote_code": options["trust_remote_code"]}
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **options)
        except (OSError, ValueError) as error:
            if self.tokenizer_name:
                raise ValueError(f"Cannot load a tokenizer from {name}; give a hub id or a folder with one.") from error
            return None
        # transformers makes a tokenizer from the config alone where the folder has none: it knows no text.
        if not tokenizer.vocab_size or not tokenizer("a", add_special_tokens=False).input_ids:
            return None
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer

    def load(self, kind=AutoModelForCausalLM) -> PreTrainedModel:
        options = {"dtype": self.dtype, "device_map": {"": self.device}}
        if self.attn_implementation is not None:
            options["attn_implementation"] = self.attn_implementation
        if "gguf_file" in self.place[1]:
            options["config"] = self._config  # transformers would read the file's header once more
        return self._read(kind.from_pretrained, **options).eval()

    def fetch(self) -> None:
        """Downloads weights with bars on a terminal, for a worker, which shows none, and says why a download fails."""
        if sys.stderr.isatty() and not os.path.exists(self.name) and "gguf_file" not in self.files:
            with contextlib.suppress(OSError, ValueError):
                snapshot_download(self.name, revision=self.files.get("revision"), allow_patterns=WEIGHTS)

    def load_for_requests(self) -> tuple:
        """Loads a model with all that it can read, such as images, and returns it with its processor or tokenizer."""
        if self.tokenizer_name or "gguf_file" in self.place[1]:
            return self.load(), self.tokenizer
        processor, is_multimodal = self._read(AutoProcessor.from_pretrained), self._config.model_type in MULTIMODAL
        with contextlib.suppress(AttributeError, ValueError):  # only in newer versions, and for few models
            return self.load(transformers.AutoModelForDecision), processor
        return self.load(AutoModelForMultimodalLM if is_multimodal else AutoModelForCausalLM), processor


@dataclass(frozen=True)
class Models:
    target: Model
    draft: Model | None
    config: hf_ssd.SSDConfig = field(default_factory=hf_ssd.SSDConfig)
    draft_threads: int | None = None  # CPU cores of the draft's worker

    @property
    def shares_memory(self) -> bool:
        one, other = ((model.device.type, model.device.index or 0) for model in (self.target, self.draft))
        return one == other

    @functools.cached_property
    def tokenizers(self) -> dict:
        """The arguments `tokenizer` and `assistant_tokenizer` of generate() if they differ; otherwise no arguments."""
        ours, theirs = self.target.tokenizer, self.draft and self.draft.tokenizer
        if ours is None or theirs is None:
            return {}
        tokens = {i: token for token, i in ours.get_vocab().items()}
        if all(tokens.get(i, token) == token for token, i in theirs.get_vocab().items()):
            return {}
        return {"tokenizer": ours, "assistant_tokenizer": theirs}

    def load(self) -> tuple[PreTrainedModel, PreTrainedModel | None]:
        """Loads the models, enables the target, and returns target and draft."""
        target = hf_ssd.enable(self.target.load())
        if self.draft is None:
            return target, None
        dtype = None if self.draft.dtype == "auto" else getattr(torch, self.draft.dtype)
        return target, head_for(self.draft.name, target, dtype) or self.draft.load()

    def launch_draft(
        self, target: PreTrainedModel, owns_target: bool = True, cores: CoreShare | None = None
    ) -> contextlib.AbstractContextManager[DraftAssistant | None]:
        """Starts the worker, which alone loads the draft. An owned target gives up the weights that it packs."""
        assistant = contextlib.nullcontext()
        if self.draft is not None:
            options = {"device": self.draft.device, "dtype": self.draft.dtype, "cores": cores}
            options["num_threads"] = self.draft_threads if cores is None else None
            self.draft.fetch()
            assistant = hf_ssd.launch_draft(self.draft.name, target=target, **options, **self.draft.files)
        if owns_target and self.config.drafter not in OF_TARGET and getattr(assistant, "weights", None) is None:
            packed.own(target)
        return assistant


def chosen(args: argparse.Namespace, needs_draft: bool = True) -> Models:
    """Returns the models that the arguments ask for, and restricts this process to `--threads` cores."""
    if args.draft and args.draft_named:
        raise ValueError("There are two drafts; name one, after TARGET or with --draft.")
    target, draft = args.target or pair.folder("target"), args.draft or args.draft_named
    if draft is None and args.target is None and args.drafter not in WITHOUT_DRAFT:
        draft = pair.folder("draft")
    if draft is None and needs_draft and args.drafter not in WITHOUT_DRAFT:
        raise ValueError(f"DRAFT is missing: hf-ssd {args.command} {args.target} DRAFT")
    if args.threads is not None:
        pin(available_cores()[: args.threads])
        torch.set_num_threads(len(available_cores()))
    found = devices.accelerators() or [torch.device("cpu")]
    sides = []
    for name, side, place in ((target, "", found[0]), (draft, "draft_", found[-1])):
        of_side = {option: getattr(args, side + option) for option in ("device", "dtype", "revision", "gguf_file")}
        device = place if of_side["device"] is None else devices.existing(of_side["device"])
        dtype = of_side["dtype"] or args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
        files = {option: of_side[option] for option in ("revision", "gguf_file") if of_side[option] is not None}
        if args.trust_remote_code:
            files["trust_remote_code"] = True
        attention = None if side else args.attn_implementation
        sides.append(name and Model(name, device, dtype, files, getattr(args, f"{side}tokenizer"), attention))
    return Models(*sides, settings(args), args.draft_threads)
