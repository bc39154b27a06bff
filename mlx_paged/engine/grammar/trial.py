"""Trials: tries grammars in processes apart, which may crash, hang or take too much memory."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import GrammarAbandoned, GrammarError
from . import check

NUM_PROCESSES = 2
AFRESH_BYTES = 8 << 20
POLL_SECONDS = 0.1
START_SECONDS = 120.0  # to start and to read the tokenizer, on a busy machine
WALL_FACTOR = 20  # of the CPU time, in seconds of the clock, for a process that was stopped
SCRIPT = Path(check.__file__).resolve()

IsCancelled = Callable[[], bool]


class Verdict(NamedTuple):
    """What a trial has found.

    Attributes:
        fault: what is wrong with the grammar, or "".
        num_bytes: memory that it takes once it is compiled.
    """

    fault: str
    num_bytes: int = 0


class Trials:
    """Tries grammars in up to two processes, which are started when needed, and again after one was ended. By any
    thread.

    Args:
        describe: returns the tokenizer, as JSON that the library tokenizers writes; asked whenever a process starts.
        eos_tokens: tokens that end an answer.
        library: the folder that the module llguidance is in.
    """

    def __init__(self, describe: Callable[[], str], eos_tokens: Sequence[int], library: str) -> None:
        self._idle = [TrialProcess(describe, eos_tokens, library) for _ in range(NUM_PROCESSES)]
        self._changed = threading.Condition()

    def try_out(self, kind: str, text: str, is_cancelled: IsCancelled) -> Verdict:
        """Return whether a grammar can be used.

        Args:
            kind, text: of the source.
            is_cancelled: asked again and again; once it says yes, the trial is ended.

        Raises:
            GrammarAbandoned: it was cancelled.
            GrammarError: the process was ended from outside.
        """
        with self._process(is_cancelled) as process:
            return process.try_out(kind, text, is_cancelled)

    @contextmanager
    def _process(self, is_cancelled: IsCancelled) -> Iterator[TrialProcess]:
        with self._changed:
            while not self._idle:
                self._changed.wait(POLL_SECONDS)
                if is_cancelled():
                    raise GrammarAbandoned("the grammar was cancelled before it was tried")
            process = self._idle.pop()  # the one that was used last has most likely been started
        try:
            yield process
        finally:
            with self._changed:
                self._idle.append(process)
                self._changed.notify()


class TrialProcess:
    """One process. For one thread at a time. It ends with this object.

    Attributes:
        num_started: how often one was started.
    """

    def __init__(self, describe: Callable[[], str], eos_tokens: Sequence[int], library: str) -> None:
        self._describe, self._eos_tokens, self._library = describe, list(eos_tokens), library
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self.num_started = 0

    def try_out(self, kind: str, text: str, is_cancelled: IsCancelled) -> Verdict:
        """See :meth:`Trials.try_out`."""
        if self._process is None or self._process.poll() is not None:
            self._start(is_cancelled)
        answer = self._ask([kind, text], check.TRIAL_SECONDS * WALL_FACTOR, is_cancelled)
        if answer is not None:
            verdict = Verdict(*answer)
            if verdict.num_bytes > AFRESH_BYTES:
                self._end()  # memory that it has freed and keeps would not be counted for the next one
            return verdict
        assert self._process is not None
        status = self._process.wait()
        self._end()
        logging.warning("a %s grammar of %d characters ended the process that tried it: %d", kind, len(text), status)
        if status == -signal.SIGPROF:
            return Verdict(f"it takes more than {check.TRIAL_SECONDS:g} s to compile")
        if status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGTRAP):
            return Verdict("it takes more memory or depth to compile than is allowed")
        raise GrammarError("the process that tries grammars was ended; try again")

    def _start(self, is_cancelled: IsCancelled) -> None:
        self._end()
        # Isolated: no code of the current folder, and no variables of the environment, reach it.
        limits = [str(check.TRIAL_SECONDS), str(check.TRIAL_BYTES)]
        command = [sys.executable, "-I", str(SCRIPT), self._library, *limits]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process, self._end = process, weakref.finalize(self, _end, process)
        self.num_started += 1
        if self._ask([self._describe(), self._eos_tokens], START_SECONDS, is_cancelled) is None:
            self._end()
            raise GrammarError("the process that tries grammars does not start")

    def _ask(self, message: object, seconds: float, is_cancelled: IsCancelled) -> Any:
        """Return its answer; None if it ends, or is ended because it takes too long."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        descriptor, answer = process.stdout.fileno(), bytearray()
        waits = select.poll()
        waits.register(descriptor, select.POLLIN)
        until = time.monotonic() + seconds
        while not answer.endswith(b"\n"):
            if waits.poll(1000 * POLL_SECONDS):
                if not (piece := os.read(descriptor, 1 << 16)):
                    return None
                answer += piece
            elif is_cancelled():
                self._end()
                raise GrammarAbandoned("the grammar was cancelled while it was tried")
            elif time.monotonic() > until:
                process.kill()
        return json.loads(answer)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not sent
                pipe.close()
