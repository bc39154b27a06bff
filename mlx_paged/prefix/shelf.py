"""Shelf: files of prefixes by their keys, readable by their owner only, each verified by itself."""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import check_device

MAGIC = b"mlx_paged prefix 3\n"
DIGEST_BYTES = 32
STALE_SECONDS = 3600
NAME = re.compile(r"[0-9a-f]{32}\.(kv[0-9]+|states)")
TEMPORARY = re.compile(r"\.[0-9]+-[0-9]+\.tmp")


class ShelfWarning(UserWarning):
    """A prefix could not be written to disk, or a file there was not used; results are the same."""


class Shelf:
    """A folder of prefixes. A file is named by a key and by what it holds of it: ``kv<group>`` or ``states``.

    A thread writes the files, each under a temporary name that is then replaced. A hash in it covers its name and
    contents, so a file that is truncated, altered or renamed is not used but deleted, with one warning. Nothing is
    synced to disk: a file torn by a power cut is not served.

    Folder and files are private (0700, 0600) from their creation; an existing folder stays as it is. Files of other
    users, links and everything else are ignored.

    Args:
        path: the folder, created if missing.
        max_bytes: most bytes of all files; beyond it the least recently used files are deleted.
        queued_bytes: most host memory of what waits to be written; what is saved beyond it is dropped.

    Attributes:
        nbytes: bytes of all files.
        dropped: number of blocks and checkpoints that were not written because too many were waiting.

    Raises:
        OSError: the folder cannot be created or read.
    """

    def __init__(self, path: Path | str, *, max_bytes: int = 1 << 63, queued_bytes: int = 256 << 20) -> None:
        self.path = Path(path)
        self.max_bytes = max_bytes
        self.nbytes = self.dropped = 0
        self.queued_bytes = queued_bytes
        self._writer = ThreadPoolExecutor(1, "mlx_paged prefix writer")
        self._last: Future[None] | None = None  # the latest job, done after all others
        self._serial = count()
        self._warned = False
        self._problem: Exception | None = None  # of the writing thread, to be warned of by the next call
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # of files by name, least recently used first
        self._waiting: dict[str, memoryview] = {}  # to be written
        self._waiting_bytes = 0
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._list()
        self._enforce_limit()

    def _list(self) -> None:
        """Index the files in the folder. Temporary ones that are an hour old, which no process is writing any more, are
        deleted."""
        found: list[tuple[int, str, int]] = []
        with os.scandir(self.path) as listed:
            for entry in listed:
                is_named = NAME.fullmatch(entry.name)
                if not (is_named or TEMPORARY.fullmatch(entry.name)):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                        self.warn(f"{entry.path} was ignored: not a file of this user")
                    elif is_named:
                        found.append((status.st_mtime_ns, entry.name, status.st_size))
                    elif time.time() - status.st_mtime > STALE_SECONDS:
                        os.unlink(entry.path)
                except FileNotFoundError:
                    continue  # another process has just deleted or renamed it
                except OSError as error:
                    self.warn(f"{entry.path} was ignored: {error}")
        found.sort()
        self._sizes.update((name, size) for _, name, size in found)
        self.nbytes = sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def has(self, name: str) -> bool:
        """Return whether a file is on disk, or waits to be written."""
        return name in self._sizes or name in self._waiting

    # Saving ---------------------------------------------------------------------------------------------------

    def save(
        self, name: str, nbytes: int, arrays: Callable[[], tuple[dict[str, mx.array], str]], *, wait: bool
    ) -> None:
        """Queue a file for writing, unless it is there. Warns once if files cannot be written.

        Args:
            name: the file's name, a key of a prefix and what is saved of it.
            nbytes: about as many bytes as the arrays have.
            arrays: returns arrays by name, and a text; called only if they will be written.
            wait: wait until the queue has room; otherwise what it has no room for is dropped.
        """
        self._warn_of_problem()
        if self.has(name):
            return
        if self._waiting and self._waiting_bytes + nbytes > self.queued_bytes:
            if not wait:
                self.dropped += 1
                return
            self._wait()
        data = _packed(name, *arrays())
        with self._lock:
            self._waiting[name] = data
            self._waiting_bytes += len(data)
        try:
            self._last = self._writer.submit(self._write, name, data)
        except RuntimeError:  # no more threads, or the interpreter ends
            self._write(name, data)

    def _write(self, name: str, data: memoryview) -> None:
        """Write a file; in the writing thread, which uses no MLX."""
        is_written = True
        try:
            self._write_file(name, data)
        except Exception as error:
            self._problem, is_written = error, False
        with self._lock:
            del self._waiting[name]
            self._waiting_bytes -= len(data)
            if is_written:
                self.nbytes += len(data) - self._sizes.pop(name, 0)
                self._sizes[name] = len(data)
        self._enforce_limit()

    def _write_file(self, name: str, data: memoryview) -> None:
        temporary = self.path / f".{os.getpid()}-{next(self._serial)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            temporary.unlink(missing_ok=True)  # left by an earlier process with this id
            descriptor = os.open(temporary, flags, 0o600)
            with open(descriptor, "wb") as file:
                file.write(data)
            temporary.replace(self.path / name)
        finally:
            temporary.unlink(missing_ok=True)

    def flush(self) -> None:
        """Wait until all that was saved is written."""
        self._wait()
        self._warn_of_problem()

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def _enforce_limit(self) -> None:
        while self.nbytes > self.max_bytes:
            with self._lock:
                name = next(iter(self._sizes), None)
            if name is None:
                return
            self._delete(name)

    # Loading --------------------------------------------------------------------------------------------------

    def load(self, name: str) -> tuple[dict[str, Any], str] | None:
        """Return a file's arrays and text. If it is gone, or is not what was written, return None; it is not there any
        more then."""
        waiting = self._waiting.get(name)
        try:
            found = _unpacked(name, self._read(name) if waiting is None else waiting)
        except FileNotFoundError:  # deleted by another process
            self._forget(name)
            return None
        except Exception as error:
            check_device(error)
            self._delete(name)
            self.warn(f"deleted the unusable file {self.path / name}: {type(error).__name__}: {error}")
            return None
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        with suppress(OSError):  # the order of use, also after a restart
            os.utime(self.path / name)
        return found

    def _read(self, name: str) -> bytes:
        with open(self._open(name), "rb") as file:
            return file.read(self._sizes.get(name, 0) + 1)

    def _open(self, name: str) -> int:
        """Return a descriptor of a file of this user. Follows no link, and does not wait for the writer of a pipe."""
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise OSError("not a file of this user")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _forget(self, name: str) -> None:
        with self._lock:
            self.nbytes -= self._sizes.pop(name, 0)

    def _delete(self, name: str) -> None:
        self._forget(name)
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            self._problem = error

    def _warn_of_problem(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            check_device(problem)
            self.warn(f"a prefix was not written to {self.path}: {problem}")

    def warn(self, text: str) -> None:
        """Warn, at most once."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"mlx_paged: {text}", ShelfWarning, stacklevel=4)


def _packed(name: str, arrays: dict[str, mx.array], text: str) -> memoryview:
    """Return the bytes of a file: a copy of the arrays in host memory."""
    file = io.BytesIO()
    mx.save_safetensors(file, arrays, {"text": text})
    payload = file.getbuffer()
    return memoryview(b"".join([MAGIC, _digest(name, payload), payload]))


def _unpacked(name: str, data: bytes | memoryview) -> tuple[dict[str, Any], str]:
    """Return a file's arrays and text. Raises any type of error if it is not what :func:`_packed` returned."""
    payload = memoryview(data)[len(MAGIC) + DIGEST_BYTES :]
    if data[: len(data) - len(payload)] != MAGIC + _digest(name, payload):
        raise ValueError("its contents do not match their digest")
    loaded: Any = mx.load(io.BytesIO(payload), format="safetensors", return_metadata=True)
    arrays, metadata = loaded
    mx.eval(list(arrays.values()))
    return arrays, metadata["text"]


def _digest(name: str, payload: memoryview) -> bytes:
    return hashlib.sha256(name.encode() + payload).digest()
