"""Python programs for tests that start in a tenth of a second: forked from a server that has imported torch already.

While [`Popen`] stands in the place of `subprocess.Popen`, a program of this Python is a fork of the server, with its
own arguments, environment, folder, files and process group. Everything else starts as ever, and so do programs whose
environment differs in what libraries read when they are imported.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
ADDRESS = "PRELOADED_PYTHON"  # the environment variable with the path of the server's socket
READ_AT_IMPORT = ("HF_HOME", "HF_HUB_", "HF_DATASETS_", "TRANSFORMERS_", "TORCHINDUCTOR_", "CXX", "LD_")
READ_LATER = "TORCHINDUCTOR_CACHE_DIR"  # which torch sets when it first compiles, or looks whether it can
PRELOADED = [
    "hf_ssd.distributed.worker", "hf_ssd.distributed.roles", "matplotlib.pyplot", "numpy", "pytest",
    "torch._dynamo", "torch.distributed.run", "transformers.models.auto.tokenization_auto",
]  # fmt: skip
FRESH = subprocess.Popen
AT_START = dict(os.environ)


def program_of(command: list[str]) -> dict | None:
    """Returns how `runpy` would run a command of this Python, or `None` for one that it would not."""
    executable, *words = map(os.fsdecode, command)
    is_unbuffered = words[:1] == ["-u"]
    words = words[is_unbuffered:]
    if executable != sys.executable or not words:
        return None
    if words[0] in ("-m", "-c"):
        how, what, *arguments = words
    elif words[0].endswith(".py"):
        how, (what, *arguments) = "script", words
    else:
        return None
    return {"how": how, "what": what, "arguments": arguments, "is_unbuffered": is_unbuffered}


class Popen(subprocess.Popen):
    """A process that is forked from the server, where that can be."""

    connection: socket.socket | None = None

    def _execute_child(self, *arguments):
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments
        command, environment = given["args"], given["env"]
        environment = dict(os.environ if environment is None else environment)
        program = None if isinstance(command, (str, bytes, os.PathLike)) else program_of(command)
        if (
            program is None
            or given["shell"]
            or given["preexec_fn"] is not None
            or any(
                AT_START.get(name) != environment.get(name)
                for name in AT_START.keys() | environment.keys()
                if name.startswith(READ_AT_IMPORT) and name != READ_LATER
            )
        ):
            return super()._execute_child(*arguments)
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        descriptors = {number: number if own == -1 else own for number, own in enumerate(streams)}
        descriptors |= {number: number for number in given["pass_fds"]}
        program |= {
            "environment": {**environment, ADDRESS: os.environ[ADDRESS]},
            "folder": os.path.abspath(given["cwd"] or os.getcwd()),
            "cores": sorted(os.sched_getaffinity(0)),
            "is_leader": given["start_new_session"],
            "descriptors": list(descriptors),
        }
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(os.environ[ADDRESS])
        socket.send_fds(self.connection, [b"."], list(descriptors.values()))
        self.connection.sendall(json.dumps(program).encode() + b"\n")
        self.pid = int(self.connection.recv(20))
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in (
            "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"
        )))  # fmt: skip

    def _try_wait(self, flags):
        if self.connection is None:
            return super()._try_wait(flags)
        try:
            status = self.connection.recv(20, socket.MSG_DONTWAIT if flags else 0)
        except BlockingIOError:
            return 0, 0
        self.connection.close()
        return self.pid, int(status or signal.SIGKILL)

    def _internal_poll(self, *arguments, **options):
        if self.connection is None:
            return super()._internal_poll(*arguments, **options)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = (0, 0) if self.returncode is not None else self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def can_fork() -> bool:
    """Where there are accelerators programs start as ever: their drivers do not survive a fork."""
    return sys.platform == "linux" and not torch.accelerator.is_available()


@contextlib.contextmanager
def preloaded_python():
    """
    Has programs fork from the server of the process that has started this one, or else from one that is started here,
    unless this process has been forked from it and does so anyway.
    """
    if not can_fork() or FRESH.__module__ != "subprocess":
        yield
        return
    with contextlib.nullcontext() if ADDRESS in os.environ else running_server():
        subprocess.Popen = Popen
        try:
            yield
        finally:
            subprocess.Popen = FRESH


@contextlib.contextmanager
def running_server():
    with tempfile.TemporaryDirectory(prefix="preloaded") as folder:
        address = os.path.join(folder, "socket")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen(64)
        # The server ends when its standard input closes, however this process ends. What its programs download and
        # prepare is kept in a folder that ends with it.
        server = FRESH(
            [sys.executable, __file__, str(listening.fileno())], stdin=subprocess.PIPE, pass_fds=[listening.fileno()],
            env={**os.environ, "HF_HOME": folder}, start_new_session=True,
        )  # fmt: skip
        listening.close()
        os.environ[ADDRESS] = address
        try:
            yield
        finally:
            del os.environ[ADDRESS]
            server.stdin.close()
            try:
                server.wait(1)
            except subprocess.TimeoutExpired:  # it still imports, and has started nothing
                server.kill()
                server.wait()


# ---------------------------------------------------------------- the server


def serve(listening: socket.socket) -> dict:
    """Forks for each that connects. Returns only in forks: what this one is to run."""
    while True:
        ready, _, _ = select.select([listening, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listening.accept()
        if not os.fork():
            listening.close()
            return start(connection)
        connection.close()


def start(connection: socket.socket) -> dict:
    """Forks the program itself, and tells its number and how it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, received, _, _ = socket.recv_fds(connection, 1, 250)
    with connection.makefile() as lines:
        program = json.loads(lines.readline())
    pid = os.fork()
    if pid:
        for descriptor in received:
            os.close(descriptor)
        connection.sendall(b"%d" % pid)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # no one may want to know
            connection.sendall(b"%d" % status)
        os._exit(0)
    connection.close()
    if program["is_leader"]:
        os.setsid()
    above = 1 + max(program["descriptors"])
    received = [(fcntl.fcntl(one, fcntl.F_DUPFD, above), os.close(one))[0] for one in received]
    for number, descriptor in zip(program["descriptors"], received):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return program


def become(program: dict, path: list[str]) -> None:
    """Gives this process what a fresh one would have."""
    import numpy

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.sched_setaffinity(0, program["cores"])
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"], HF_HOME=AT_START["HF_HOME"])
    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(program["cores"]))))
    how, what = program["how"], program["what"]
    own = os.path.dirname(os.path.abspath(what)) if how == "script" else ""
    first = [] if "PYTHONSAFEPATH" in os.environ else [own]
    sys.path[:] = [*first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv = [what if how == "script" else how, *program["arguments"]]
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # the one before takes it for what it was before
    if program["is_unbuffered"]:
        sys.stdout.reconfigure(write_through=True)


def run(program: dict) -> int:
    """Returns the exit status."""
    try:
        if program["how"] == "script":
            runpy.run_path(program["what"], run_name="__main__")
        elif program["how"] == "-m":
            sys.modules.pop(program["what"], None)
            runpy.run_module(program["what"], run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(program["what"], "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(status: int) -> None:
    """Ends as an interpreter does, but does not free what was imported, which takes seconds in a fork."""
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def preload() -> None:
    """Imports what programs need, also what generate() imports when it is first called."""
    subprocess.Popen = Popen  # programs start their workers likewise
    sys.path.insert(0, str(ROOT))
    for name in PRELOADED:
        importlib.import_module(name)
    from tests.helpers.short_waits import sleep_soon
    from tests.helpers.tiny import padded_batch, tiny_draft, tiny_model

    sleep_soon()
    with torch.random.fork_rng():
        tiny_draft()
        tiny_model().generate(**padded_batch(2), do_sample=True, max_new_tokens=2)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one asks how a fork has ended
    path = [entry for entry in sys.path[1:] if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    preload()
    gc.collect()
    gc.freeze()  # forks need not look through it again
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    become(program, path)
    leave(run(program))
