"""GrammarSource and GrammarCompiler: compile schemas, regular expressions and grammars for one tokenizer.

Each new grammar is first compiled in a separate process (Trials), which may crash, hang or take too much memory.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import GrammarAbandoned, GrammarError
from . import check
from .check import COMPILE_STACK, JSON_OPTIONS, Checker, fault_of_size, on_stack
from .grammar import CompiledGrammar

# Trials -------------------------------------------------------------------------------------------------------------

NUM_PROCESSES = 2
RESTART_BYTES = 8 << 20
POLL_SECONDS = 0.1
START_SECONDS = 120.0  # to start and to read the tokenizer, on a busy machine
WALL_FACTOR = 20  # limit of wall-clock time, in units of the CPU time, for a process that was stopped
SCRIPT = Path(check.__file__).resolve()

IsCancelled = Callable[[], bool]


class Verdict(NamedTuple):
    """Outcome of a trial.

    Attributes:
        fault: what is wrong with the grammar, or "".
        num_bytes: size of the compiled grammar.
    """

    fault: str
    num_bytes: int = 0


class Trials:
    """Up to two processes that try grammars, started on demand and restarted after one ended. Thread-safe.

    Args:
        describe: returns the tokenizer as JSON of the library tokenizers; called whenever a process starts.
        eos_tokens: tokens that end an answer.
        library: folder that llguidance is imported from.
    """

    def __init__(self, describe: Callable[[], str], eos_tokens: Sequence[int], library: str) -> None:
        self._idle = [TrialProcess(describe, eos_tokens, library) for _ in range(NUM_PROCESSES)]
        self._changed = threading.Condition()

    def try_out(self, kind: str, text: str, is_cancelled: IsCancelled) -> Verdict:
        """Compile a grammar in one of the processes.

        Args:
            kind, text: see :class:`GrammarSource`.
            is_cancelled: polled while waiting; once it returns True, the trial is ended.

        Raises:
            GrammarAbandoned: it was cancelled.
            GrammarError: the process did not start, or was ended from outside.
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
            process = self._idle.pop()  # the one used last is most likely running
        try:
            yield process
        finally:
            with self._changed:
                self._idle.append(process)
                self._changed.notify()


class TrialProcess:
    """One process that tries grammars, for one thread at a time. It is killed when this object goes.

    Attributes:
        num_started: how often a process was started.
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
            if verdict.num_bytes > RESTART_BYTES:
                self._end()  # memory that it freed but keeps would not be counted in the next trial
            return verdict
        assert self._process is not None
        status = self._process.wait()
        self._end()
        logging.warning("a %s grammar of %d characters ended its trial process: status %d", kind, len(text), status)
        if status == -signal.SIGPROF:
            return Verdict(f"it takes more than {check.TRIAL_SECONDS:g} s to compile")
        if status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGTRAP):
            most = check.TRIAL_BYTES / (1 << 30)
            return Verdict(f"it needs more than {most:g} GB of memory, or too much stack, to compile")
        raise GrammarError(f"the grammar trial process ended with status {status}; try again")

    def _start(self, is_cancelled: IsCancelled) -> None:
        self._end()
        # Isolated mode: neither code in the current folder nor PYTHON* variables affect it.
        limits = [str(check.TRIAL_SECONDS), str(check.TRIAL_BYTES)]
        command = [sys.executable, "-I", str(SCRIPT), self._library, *limits]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process, self._end = process, weakref.finalize(self, _end, process)
        self.num_started += 1
        if self._ask([self._describe(), self._eos_tokens], START_SECONDS, is_cancelled) is None:
            self._end()
            raise GrammarError(f"the grammar trial process did not start within {START_SECONDS:g} s, or ended")

    def _ask(self, message: object, seconds: float, is_cancelled: IsCancelled) -> Any:
        """Return the process's answer; None if it ends, or is killed because it takes longer than ``seconds``."""
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
            with suppress(OSError):  # unsent data
                pipe.close()


# Compiling ----------------------------------------------------------------------------------------------------------

ANY_OBJECT = {"type": "object"}
MAX_KEPT = 64
MAX_KEPT_BYTES = 128 << 20
MAX_VERDICTS = 4096
INSTALL = "constrained answers need the package llguidance: pip install llguidance"


def json_in_lark(schema: Any) -> str:
    """Return a term of a Lark grammar for JSON that matches a schema."""
    return "%json " + _escaped(json.dumps({**schema, "x-guidance": JSON_OPTIONS}))


def text_in_lark(text: str) -> str:
    """Return a term of a Lark grammar for a literal text."""
    return _escaped(json.dumps(text, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Escape DEL, which may stand unescaped in JSON but not in Lark."""
    return text.replace("\x7f", "\\u007f")


class GrammarSource(NamedTuple):
    """The text of a grammar, for any model.

    Attributes:
        kind: ``json`` (a JSON schema), ``regex``, ``lark``, or ``tools`` (Lark made from the schemas of tools).
        text: the schema, regular expression or grammar.
    """

    kind: str
    text: str

    @classmethod
    def json(cls, schema: Any) -> GrammarSource:
        """Return the source of an answer that is JSON matching a schema, given parsed."""
        return cls("json", json.dumps(schema))

    @classmethod
    def regex(cls, expression: str) -> GrammarSource:
        """Return the source of an answer that matches a regular expression as a whole."""
        return cls("regex", expression)

    @classmethod
    def lark(cls, grammar: str) -> GrammarSource:
        """Return the source of a context-free grammar in Lark, whose start rule is ``start``."""
        return cls("lark", grammar)

    @classmethod
    def choice(cls, answers: Sequence[str]) -> GrammarSource:
        """Return the source of an answer that is one of these texts."""
        # One terminal: as rules, each answer would take an item of the parser, whose number is limited.
        return cls("lark", "start: ANSWER\nANSWER: " + " | ".join(map(text_in_lark, answers)))


class GrammarCompiler:
    """Compiles grammars, and caches the latest ones. Thread-safe.

    Each new grammar is first compiled in a separate process (:class:`Trials`), which rejects grammars that crash
    llguidance or take too much time or memory. Accepted ones are compiled here, in a thread with a larger stack.

    Args:
        tokenizer: a fast tokenizer of transformers.
        eos_tokens: tokens that end an answer.

    Raises:
        GrammarError: llguidance is not installed, or does not support the tokenizer.
    """

    def __init__(self, tokenizer: Any, eos_tokens: Iterable[int]) -> None:
        try:
            library: Any = importlib.import_module("llguidance")
            convert = importlib.import_module("llguidance.hf").from_tokenizer
        except ImportError:
            raise GrammarError(INSTALL) from None
        self._eos_tokens = sorted(eos_tokens)
        try:
            self._tokenizer = convert(tokenizer, eos_token=self._eos_tokens)
        except Exception as error:
            raise GrammarError(f"llguidance does not support this model's tokenizer: {error}") from error
        self._checker = Checker(library, self._tokenizer)
        folder = str(Path(library.__file__).resolve().parents[1])
        self.trials = Trials(lambda: _described(tokenizer), self._eos_tokens, folder)
        self._kept: OrderedDict[GrammarSource, tuple[CompiledGrammar, int]] = OrderedDict()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # by the digest of a source
        self._busy: set[GrammarSource] = set()  # sources that a thread tries or compiles
        self._changed = threading.Condition()

    def compile(
        self,
        source: GrammarSource,
        *,
        trigger: tuple[int, ...] = (),
        is_cancelled: IsCancelled = lambda: False,
        is_checked: bool = False,
    ) -> CompiledGrammar:
        """Return the compiled grammar. Blocks, so call it from a thread that may wait.

        Args:
            source: the grammar's text.
            trigger: see :class:`CompiledGrammar`.
            is_cancelled: polled while waiting; once it returns True, the trial is ended.
            is_checked: skip the trial: it was passed with this tokenizer elsewhere, e.g. on another rank.

        Raises:
            GrammarError: the grammar cannot be used; the message says why and, for a schema, where.
            GrammarAbandoned: it was cancelled.
        """
        compiled = self._find(source)
        if compiled is None:
            with self._alone(source, is_cancelled):
                compiled = self._find(source)
                if compiled is None:
                    num_bytes = 0 if is_checked else self._tried(source, is_cancelled)
                    compiled = self._compile(source)
                    self._keep(source, compiled, num_bytes + len(source.text))
        return replace(compiled, trigger=trigger) if trigger else compiled

    def check(self, source: GrammarSource, *, is_cancelled: IsCancelled = lambda: False) -> None:
        """Try a grammar, and cache the verdict.

        Raises:
            GrammarError, GrammarAbandoned: as :meth:`compile`.
        """
        with self._alone(source, is_cancelled):
            self._tried(source, is_cancelled)

    @contextmanager
    def _alone(self, source: GrammarSource, is_cancelled: IsCancelled) -> Iterator[None]:
        """Lock a source for one thread; the next one finds the result cached."""
        with self._changed:
            while source in self._busy:
                self._changed.wait(POLL_SECONDS)
                if is_cancelled():
                    raise GrammarAbandoned("the grammar was cancelled while another thread tried it")
            self._busy.add(source)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(source)
                self._changed.notify_all()

    def _tried(self, source: GrammarSource, is_cancelled: IsCancelled) -> int:
        """Return the compiled size of a grammar in bytes, from its trial. Raises GrammarError."""
        if fault := fault_of_size(*source):
            raise GrammarError(fault)
        digest = hashlib.sha256(f"{source.kind} {source.text}".encode("utf-8", "surrogatepass")).digest()
        with self._changed:
            known = self._verdicts.get(digest)
        verdict = self.trials.try_out(*source, is_cancelled) if known is None else known
        with self._changed:
            self._verdicts[digest] = verdict
            self._verdicts.move_to_end(digest)
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict.fault:
            raise GrammarError(verdict.fault)
        return verdict.num_bytes

    def _compile(self, source: GrammarSource) -> CompiledGrammar:
        found: list[Any] = []
        on_stack(2 * COMPILE_STACK, lambda: found.extend(self._checker.matcher(*source)))
        fault, matcher = found
        if fault:
            raise GrammarError(fault)
        return CompiledGrammar(matcher, self._tokenizer.vocab_size, tuple(self._eos_tokens))

    def _find(self, source: GrammarSource) -> CompiledGrammar | None:
        with self._changed:
            if source not in self._kept:
                return None
            compiled, _ = self._kept[source]
            self._kept.move_to_end(source)
        matcher = compiled.matcher.deep_copy()
        matcher.compute_bitmask()
        # All answers share the lexer's states, whose number is limited: they may be used up.
        return None if matcher.is_error() else compiled

    def _keep(self, source: GrammarSource, compiled: CompiledGrammar, num_bytes: int) -> None:
        with self._changed:
            self._kept[source] = compiled, num_bytes
            self._kept.move_to_end(source)
            while len(self._kept) > 1 and (
                len(self._kept) > MAX_KEPT or sum(size for _, size in self._kept.values()) > MAX_KEPT_BYTES
            ):
                self._kept.popitem(last=False)


def _described(tokenizer: Any) -> str:
    """Return a fast tokenizer as JSON, as llguidance reads it."""
    backend = copy.copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())
