"""Commands and scripts as separate processes that need not import anything: a warm interpreter forks for them."""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any, Protocol

import mlx.core as mx

ROOT = Path(__file__).parents[3]
OFFLINE = {"HF_HUB_OFFLINE": "1"}
# A process that has used a GPU or macOS's frameworks must not fork.
FORKS = sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu)


class Process(Protocol):
    """The part of :class:`subprocess.Popen` that tests use."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class WarmProcess:
    """A command that a warm interpreter runs in a fork of itself."""

    def __init__(self, pid: int, status: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                self.returncode = int(self._status.readline())
                self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while (code := self.poll()) is None:
            with contextlib.suppress(ValueError):  # another thread has read its exit status
                if not select.select([self._status], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _interpreter() -> socket.socket:
    """Return the socket of this process's warm interpreter, which ends with it."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # messages arrive whole
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.processes.warm_interpreter", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, **OFFLINE},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait(30)

    atexit.register(end)
    return ours


def start(
    program: str | Path,
    *args: object,
    stdin: IO[Any] | None = None,
    stdout: IO[Any],
    stderr: IO[Any],
    cwd: Path | None = None,
    cold: bool = False,
    **env: str,
) -> Process:
    """Start ``python -m program args``, or ``python program args`` for a script, with files as standard streams.

    Args:
        env: variables in addition to this process's.
        cold: start a new interpreter, as users do. Otherwise most modules are imported already.
    """
    arguments, where = [str(arg) for arg in args], str(cwd or Path.cwd())
    variables = {**os.environ, **OFFLINE, **env}
    with open(os.devnull) as nothing:
        if cold or not FORKS:
            named = [str(program)] if isinstance(program, Path) else ["-m", program]
            command = [sys.executable, *named, *arguments]
            return subprocess.Popen(
                command, stdin=stdin or nothing, stdout=stdout, stderr=stderr, cwd=where, env=variables
            )
        task = json.dumps({"program": str(program), "args": arguments, "env": variables, "cwd": where}).encode()
        read, write = os.pipe()
        fds = [(stdin or nothing).fileno(), stdout.fileno(), stderr.fileno(), write]
        socket.send_fds(_interpreter(), [task], fds)
    os.close(write)
    status = os.fdopen(read, "rb", buffering=0)
    pid = status.readline()
    assert pid, "the warm interpreter has ended"
    return WarmProcess(int(pid), status)


def run(
    program: str | Path,
    *args: object,
    input: str = "",
    cwd: Path | None = None,
    timeout: float = 300,
    cold: bool = False,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its exit status and output."""
    with contextlib.ExitStack() as files:
        stdin, out, err = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        stdin.write(input)
        stdin.seek(0)
        process = start(program, *args, stdin=stdin, stdout=out, stderr=err, cwd=cwd, cold=cold, **env)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([str(program), *map(str, args)], code, out.read(), err.read())
