"""One draft worker process: started, connected, and never left behind."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from datetime import timedelta

import torch.distributed as dist

from . import messages
from .channel import Channel, PeerLost
from .messages import Kind
from .session import DraftError

STOP_TIMEOUT = 2.0  # seconds to end by itself before it is killed


class WorkerProcess:
    """
    A worker that has loaded its model and is connected.

    The worker is a fresh interpreter, not a fork and not a `multiprocessing` child, so the user's script needs no
    `__main__` guard. It takes its settings from its standard input, and ends when that closes: however this process
    ends, the worker follows. Both listen on loopback, on ports that the system picks.

    Args:
        settings (`dict`): What [`~hf_ssd.distributed.worker`] reads. `timeout` bounds the start, in seconds.
        descriptor (`int`, *optional*): File descriptor of shared weights that the worker inherits.

    Attributes:
        channel ([`Channel`]): To the worker.
        facts (`dict`): What the worker says of its model: `vocab_size` and `device`.

    Raises:
        [`DraftError`]: it could not start; the worker's own words are in the message.
    """

    def __init__(self, settings: dict, descriptor: int | None = None):
        self.timeout = settings["timeout"]
        self.channel: Channel | None = None
        self.errors = tempfile.TemporaryFile()
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        if settings["cores"]:
            environment["OMP_NUM_THREADS"] = str(len(settings["cores"]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hf_ssd.distributed.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            pass_fds=[] if descriptor is None else [descriptor],
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal is for the target
        )
        self._end = weakref.finalize(self, _end_process, self.process)  # also when the program ends
        try:
            self._write_settings({**settings, "port": port})
            self._connect(listener, port)
        except BaseException:
            self.kill()
            raise

    def _write_settings(self, settings: dict) -> None:
        try:
            self.process.stdin.write(json.dumps(settings).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already; `_check` tells why

    def _connect(self, listener: socket.socket, port: int) -> None:
        deadline = time.monotonic() + self.timeout
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=timedelta(seconds=self.timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        # Building the channel blocks until the worker does the same, so first see the worker at the store.
        while not store.check(["draft"]):
            self._check(deadline)
            time.sleep(0.01)
        try:
            self.channel = Channel(store, is_target=True)
        except RuntimeError as error:
            raise DraftError(f"The draft worker did not connect: {error}\n{self.last_words()}") from error
        while True:
            try:
                message = self.channel.receive(timeout=0.2)
                break
            except TimeoutError:
                self._check(deadline)
            except PeerLost:
                self.process.wait(STOP_TIMEOUT)
                self._check(deadline)
        if message.kind == Kind.ERROR:
            raise DraftError(f"The draft worker could not load its model.\n{messages.payload_to_text(message.payload)}")
        messages.expect(message, Kind.READY, 0, 0)
        self.facts = messages.payload_to_json(message.payload)

    def _check(self, deadline: float) -> None:
        if self.process.poll() is not None:
            raise DraftError(f"The draft worker ended while it started.\n{self.last_words()}")
        if time.monotonic() > deadline:
            raise DraftError(f"The draft worker was not ready after {self.timeout:g} s.")

    @property
    def is_alive(self) -> bool:
        return self.channel is not None and self.process.poll() is None

    def last_words(self) -> str:
        """Returns the end of what the worker wrote to its standard error."""
        self.errors.seek(0)
        return self.errors.read()[-8000:].decode("utf-8", errors="replace").strip()

    def stop(self) -> None:
        """Lets the worker end by itself, or kills it if it does not."""
        if self.is_alive:
            self.channel.send(messages.Message(Kind.STOP))
            try:
                self.process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        """Ends the process at once and waits until it is gone. May be called more than once."""
        self._end()
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def _end_process(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.kill()
    process.wait()
