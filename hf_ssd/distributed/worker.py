"""The draft worker: a process that loads the draft model, meets the target, and serves it."""

import json
import os
import select
import signal
import sys
import threading
import traceback
from datetime import timedelta

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from .. import devices
from ..cache.compiled import is_compiled
from ..cache.support import MASKED_ATTENTION, check_supported
from ..drafting.compiling import compile_draft
from . import payloads
from .channel import Channel, PeerLost
from .connection import DRAFT_IS_HERE, TARGET_IS_HERE
from .cores import pin
from .draft_server import DraftServer
from .meeting import join
from .messages import Kind, Message, ProtocolError
from .weights import model_from_shared_weights

FLUSH_TIMEOUT = 10.0  # seconds for a last message to leave
AS_LONG_AS_THE_PARENT_LIVES = timedelta(days=365)


def load_model(settings: dict) -> PreTrainedModel:
    """Loads the draft from shared memory, a folder or the hub, onto its device."""
    if settings["weights"] is not None:
        model = model_from_shared_weights(settings["weights"])
    else:
        options = {"dtype": settings["dtype"]} if settings["dtype"] else {}
        model = AutoModelForCausalLM.from_pretrained(settings["path"], **options, **settings["load_options"]).eval()
    model = model.to(settings["device"])
    if model.config.get_text_config(decoder=True)._attn_implementation not in MASKED_ATTENTION:
        model.set_attn_implementation("sdpa")  # branches need 4D masks
    check_supported(model)
    return model


def use_device(device: torch.device) -> None:
    """Makes an accelerator the one that is meant where no other is named: memory on others would be wasted."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device)


def main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the target, which tells the worker what follows
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if settings["cores"]:
        pin(settings["cores"])
        torch.set_num_threads(len(settings["cores"]))
    logging.disable_progress_bar()
    try:
        use_device(torch.device(settings["device"]))
        model, failure = load_model(settings), None
        uncompiled_because = compile_draft(model) if settings["compile"] else None
    except Exception:
        failure = traceback.format_exc()
    meeting = settings["meeting"]
    store = join(meeting, settings["timeout"])
    store.set(DRAFT_IS_HERE, "yes")
    store.wait([TARGET_IS_HERE], AS_LONG_AS_THE_PARENT_LIVES)
    channel = Channel(store, False, meeting["hostname"], bytes.fromhex(meeting["secret"]))
    try:
        channel.prove()
    except ProtocolError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    if failure is not None:
        channel.send(Message(Kind.ERROR, payload=payloads.text_to_payload(failure)))
        channel.flush(FLUSH_TIMEOUT)
        os._exit(1)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    place = {"device": str(model.device), "identity": devices.identity(model.device)}
    facts = {"vocab_size": vocab_size, **place, "pid": os.getpid(), "is_compiled": is_compiled(model)}
    facts["uncompiled_because"] = uncompiled_because
    channel.send(Message(Kind.READY, payload=payloads.json_to_payload(facts)))
    try:
        DraftServer(channel, model).serve()
    except PeerLost:
        pass
    os._exit(0)  # nothing is left to do, and gloo's threads would make an orderly exit wait


def _end_with_parent() -> None:
    """
    The parent holds the other end of our standard input, so that closes however the parent ends. Children that the
    parent forked may hold it open, so look at who our parent is as well.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 1):
            break
    os._exit(0)


if __name__ == "__main__":
    main()
