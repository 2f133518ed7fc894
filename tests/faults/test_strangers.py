"""Another user of the machine, who sees open ports and connects to them, is sent no prompt and gives no token."""

import contextlib
import functools
import hmac
import json
import os
import socket
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

import hf_ssd
from hf_ssd.distributed import meeting, worker_process
from hf_ssd.distributed.draft_server import DraftServer
from hf_ssd.distributed.transport import Channel, PeerLost
from hf_ssd.distributed.wire import Kind, Message, ProtocolError

from ..helpers.calls import call
from ..helpers.channels import both, channel_ends
from ..helpers.tiny import padded_batch, tiny_draft

DRAFT = {"vocab_size": 97, "mask_token": None, "positions": None}
INFO = {"draft": DRAFT, "device": "cpu", "identity": None, "pid": 1, "uncompiled_because": None}


def prove(channel):
    meeting.prove(channel, channel.secret)


@pytest.fixture
def ends():
    made = []

    def make(target_secret, draft_secret):
        pair = channel_ends()
        pair[0].secret, pair[1].secret = target_secret, draft_secret
        made.extend(pair)
        return pair

    yield make
    both(*(end.close for end in made))  # at once: each may wait for what the other has under way


@pytest.mark.parametrize("wrong", [b"t" * 32, b""])
@pytest.mark.parametrize("stranger", ["target", "draft"])
def test_who_does_not_know_the_secret_is_refused_by_both(ends, monkeypatch, wrong, stranger):
    secrets = (wrong, b"s" * 32) if stranger == "target" else (b"s" * 32, wrong)
    target, draft = ends(*secrets)
    for error in both(lambda: prove(target), lambda: prove(draft)):
        assert isinstance(error, ProtocolError) and "does not know the secret" in str(error)
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: True)  # the mutant
    target, draft = ends(*secrets)
    assert both(lambda: prove(target), lambda: prove(draft)) == [None, None]
    target.send(Message(Kind.START, payload=list(range(500))))  # as two do that share a secret
    assert len(draft.receive(10).payload) == 500


def test_a_stranger_that_sends_back_what_it_is_sent_is_refused(ends, monkeypatch):
    """Otherwise no secret would be needed: the mutant proves the same in both directions."""

    def reflect(channel):
        for _ in range(2):
            channel.send(channel.receive(10))

    def prove_to_a_mirror():
        target, mirror = ends(b"s" * 32, b"")
        return both(lambda: prove(target), lambda: reflect(mirror))[0]

    assert isinstance(prove_to_a_mirror(), ProtocolError)

    def without_roles(secret, sender, own, theirs):
        return hmac.digest(secret, bytes(a ^ b for a, b in zip(own, theirs)), "sha256")

    monkeypatch.setattr(meeting, "_digest", without_roles)
    assert prove_to_a_mirror() is None


NO_PROOFS = {
    "other kind": Message(Kind.END, payload="00" * 32),
    "short": Message(Kind.PROOF, payload="00" * 31),
    "no bytes": Message(Kind.PROOF, payload="no bytes"),
    "no text": Message(Kind.PROOF, payload=[0] * 32),
    "large": Message(Kind.PROOF, payload="00" * 10**5),
    "announcing": Message(Kind.PROOF, payload="00" * 32, announces=Message(Kind.FEATURES, payload=torch.ones(3))),
    "silent": None,
}


@pytest.mark.parametrize("name", NO_PROOFS)
def test_what_is_no_proof_is_refused_in_time(ends, monkeypatch, name):
    monkeypatch.setattr(meeting, "PROOF_TIMEOUT", 1.0)
    target, draft = ends(b"s" * 32, b"")
    if name != "silent":
        draft.send(NO_PROOFS[name])
    with pytest.raises(ProtocolError):
        prove(target)


class Stranger:
    """
    Looks for listening ports of this program and its workers, and connects to each of them: as gloo does, with
    nonsense, and as a draft that asks the store where to go.
    """

    def __init__(self, sends):
        self.sends, self.ports, self.held, self.received = sends, set(), [], []
        self.channel, self.ended = None, False
        self.threads = [threading.Thread(target=self.look, daemon=True)]

    def __enter__(self):
        # Ports of other tests in this process are no concern of this one.
        self.ports = self.listening()
        self.threads[0].start()
        return self

    def __exit__(self, *exception):
        self.ended = True
        for thread in self.threads:
            thread.join(20)
        for held in self.held:
            held.settimeout(0.1)
            with contextlib.suppress(OSError):
                self.received.append(held.recv(2**20))
            held.close()

    @staticmethod
    def listening():
        found = set()
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                found |= {one.laddr.port for one in process.net_connections() if one.status == "LISTEN"}
        return found

    def look(self):
        while not self.ended:
            for port in self.listening() - self.ports:
                self.ports.add(port)
                if self.sends == "the draft's words":
                    self.threads.append(threading.Thread(target=self.play, args=[port], daemon=True))
                    self.threads[-1].start()
                    continue
                for number in (0, 1):
                    with contextlib.suppress(OSError):
                        held = socket.create_connection(("127.0.0.1", port), timeout=1)
                        self.held.append(held)
                        held.sendall(number.to_bytes(8, "little") if self.sends == "gloo's words" else os.urandom(500))
            time.sleep(0.001)

    def play(self, port):
        with contextlib.suppress(Exception):
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
            store = dist.PrefixStore("", store)
            store.set(worker_process.DRAFT_IS_HERE, json.dumps(INFO))
            self.channel = Channel(store, is_target=False)
            with contextlib.suppress(AttributeError, ProtocolError):
                meeting.prove(self.channel, b"")
            while not self.ended:
                with contextlib.suppress(TimeoutError):
                    message = self.channel.receive(1.0)
                    self.received.append(str(message.payload).encode())


# ---------------------------------------------------------------- real workers


@pytest.mark.slow
@pytest.mark.parametrize("sends", ["gloo's words", "nonsense", "the draft's words"])
def test_a_stranger_at_the_ports_gets_nothing(target, monkeypatch, sends):
    monkeypatch.setattr(meeting, "PROOF_TIMEOUT", 3.0)
    monkeypatch.setattr("hf_ssd.distributed.transport.CONNECT_TIMEOUT", timedelta(seconds=10))
    assistant = None
    with Stranger(sends) as stranger:
        try:
            assistant = hf_ssd.launch_draft(tiny_draft(), num_threads=1)
        except hf_ssd.DraftError:
            pass  # the stranger was quicker than the worker, and stands in its way
        if assistant is not None:
            call(target, assistant, settings={"timeout": 10.0})
            info = assistant.workers[0].worker_info
            assert not info or info["pid"] != INFO["pid"]
            assistant.close()
    assert stranger.ports
    secret = str(padded_batch(2)["input_ids"][0].tolist()).encode()  # as JSON has it
    assert not any(secret in received for received in stranger.received)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "the mutant"])
def test_a_stranger_in_the_place_of_a_worker_gets_no_prompt(target, draft, monkeypatch, checked):
    """Whatever it did to get there. It answers as the draft does, but does not know the secret."""
    prompts_seen = []

    class Spy(DraftServer):
        def _start(self, message):
            prompts_seen.append(message)
            super()._start(message)

    def serve(store):
        channel = Channel(store, is_target=False)
        with contextlib.suppress(ProtocolError):
            meeting.prove(channel, b"guess")
        with contextlib.suppress(PeerLost, RuntimeError):
            Spy(channel, draft).serve()

    def join(place, timeout):
        store = dist.HashStore()
        store.set(worker_process.DRAFT_IS_HERE, json.dumps(INFO))
        threading.Thread(target=serve, args=[store], daemon=True).start()
        return store

    monkeypatch.setattr(worker_process, "join", join)
    if not checked:
        monkeypatch.setattr(hmac, "compare_digest", lambda a, b: True)
        with hf_ssd.launch_draft(tiny_draft(), num_threads=1) as assistant:
            call(target, assistant)
        assert prompts_seen
        return
    worker = worker_process.WorkerProcess(lambda: worker_process.Child({"timeout": 60.0, "cores": None}), 60.0)
    worker.begin()
    worker.thread.join(60)
    assert "does not know the secret" in str(worker.take_error())
    assert not prompts_seen and not worker.process.is_running and worker.channel is None


def test_the_meeting_is_open_to_the_two_alone():
    place, descriptors = meeting.private_meeting()
    again, _ = meeting.private_meeting()
    assert len(bytes.fromhex(place["secret"])) == 32
    assert place["secret"] != again["secret"] and place["prefix"] != again["prefix"]
    store = meeting.join(place, 5.0)
    store.set("here", "yes")
    assert meeting.join(place, 5.0).get("here") == b"yes" and not meeting.join(again, 5.0).check(["here"])
    if descriptors:
        assert not os.get_inheritable(descriptors[0]) and os.fstat(descriptors[0]).st_nlink == 0
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(seconds=0.2))
    assert time.monotonic() - start < 5


def test_where_files_have_names_no_other_user_can_enter(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(meeting, "_private_file", functools.cache(meeting._private_file.__wrapped__))
    place, descriptors = meeting.private_meeting()
    meeting.join(place, 5.0).set("here", "yes")
    assert not descriptors and os.stat(os.path.dirname(place["path"])).st_mode & 0o077 == 0
