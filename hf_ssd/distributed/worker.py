"""The draft worker: a process that loads the draft model, meets the target, and serves it."""

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import threading
import traceback

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers import AutoQuantizationConfig
from transformers.utils import logging

from .. import devices
from ..cache import packed
from ..cache.support import MASKED_ATTENTION, last_position_limit
from ..cache.trial import check_supported
from ..drafting.compiling import compile_draft
from ..drafting.draft_info import DraftInfo
from ..gguf_files import gguf_place
from .cores import DraftCores
from .draft_server import DraftServer
from .meeting import join, prove
from .transport import TRANSFER_TIMEOUT, Channel, PeerLost
from .weights import model_from_shared_weights
from .worker_process import DRAFT_IS_HERE, TARGET_IS_HERE, shorten_stderr


def main() -> None:
    try:
        run()
    except BaseException:
        traceback.print_exc()
    finally:  # nothing is left to do, and gloo's threads would make an orderly exit wait
        sys.stderr.flush()
        os._exit(1)


def run() -> None:
    """Ends the process when the target has ended, and returns if there is no model to serve."""
    settings = json.loads(sys.stdin.buffer.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the target, which tells the worker how to go on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    cores = DraftCores(**(settings["cores"] or {}))
    logging.disable_progress_bar()
    # 1. Load the model.
    try:
        use_device(torch.device(settings["device"]))
        model = load_model(settings)
        uncompiled_because = compile_draft(model) if settings["compile"] else None
        info = {
            "draft": dataclasses.asdict(DraftInfo.of(model.config, last_position_limit(model))),
            "device": str(model.device),
            "identity": devices.identity(model.device),
            "pid": os.getpid(),
            "takes_cores": cores.share is not None,  # of the target, while that waits
            "uncompiled_because": uncompiled_because,
        }
    except Exception as error:
        info = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
    # 2. Meet the target.
    meeting = settings["meeting"]
    store = join(meeting, settings["timeout"])
    store.set(DRAFT_IS_HERE, json.dumps(info))
    store.wait([TARGET_IS_HERE], TRANSFER_TIMEOUT)  # or until the parent ends
    if "error" in info:
        return
    channel = Channel(store, is_target=False, hostname=meeting["hostname"])
    prove(channel, bytes.fromhex(meeting["secret"]))
    # 3. Serve the target.
    with contextlib.suppress(PeerLost):
        DraftServer(channel, model, settings["weights"], cores=cores).serve()
    os._exit(0)  # before the channel is freed, which would wait for the target to receive the last probabilities


def load_model(settings: dict) -> PreTrainedModel:
    if settings["weights"] is not None:
        model = model_from_shared_weights(settings["weights"])
    else:
        options = {**({"dtype": settings["dtype"]} if settings["dtype"] else {}), **settings["load_options"]}
        if "quantization_config" in options:
            options["quantization_config"] = AutoQuantizationConfig.from_dict(options["quantization_config"])
            options.setdefault("device_map", {"": settings["device"]})  # a quantized model may refuse to be moved
        place, options = gguf_place(settings["path"], {"trust_remote_code": False, **options})
        model = AutoModelForCausalLM.from_pretrained(place, **options).eval()
    if model.device != torch.device(settings["device"]):
        model = model.to(settings["device"])
    if model.config.get_text_config(decoder=True)._attn_implementation not in MASKED_ATTENTION:
        model.set_attn_implementation("sdpa")  # branches need 4D masks
    check_supported(model, drafts=True)
    if settings["weights"] is None:
        packed.own(model)
    return model


def use_device(device: torch.device) -> None:
    """Makes `device` the default accelerator, so that no memory is wasted on other accelerators."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device)


def _end_with_parent() -> None:
    """Ends this process with its parent, which holds the other end of the standard input."""
    parent = os.getppid()
    while os.getppid() == parent:  # its forked children may hold the input open too
        shorten_stderr()
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 1):
            break
    os._exit(0)


if __name__ == "__main__":
    main()
