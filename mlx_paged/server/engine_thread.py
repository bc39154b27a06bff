"""EngineThread: the one thread that computes, and what becomes of it when it fails or hangs."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx

from .answer_stream import AnswerStream
from .engine_loop import CLOSING, EngineLoop, Work
from .errors import RequestRefused, unavailable
from .memory import MemoryWatch, Pressure
from .request import ModelKey

if TYPE_CHECKING:
    from .backend import Models, ModelTexts
    from .report import ServerStats

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h: a service manager starts the server again
LAST_SECONDS = 1.5  # for answers to clients when the process has to end
FRESH_SECONDS = 60.0  # after a restart, for which the server is degraded
MAX_WAITING = 1024  # requests
# Seconds without progress that are a hang. A step may compile kernels, and on a CPU its two thousand tokens of a prompt
# take minutes.
GPU_TIMEOUT, CPU_TIMEOUT = 300.0, 3600.0


class EngineThread:
    """Runs an :class:`EngineLoop`. If it fails where no request is at fault, another one follows it once, in the same
    thread, since streams of MLX belong to threads; its pool and prefixes are kept if they are in order. A second
    failure ends the process with :data:`EXIT_STATUS`, and so does a hang: nothing can end a thread.

    Args:
        models: the model and its caches.
        stats: of the server.
        memory_watch: says when memory is short.
        timeout: seconds without progress that are a hang; 0: none are; None: by the device.
        make_loop: makes the loop, from this; None: an EngineLoop.
        on_start_error: told why the server's own model cannot be served.
    """

    def __init__(
        self,
        models: Models,
        stats: ServerStats,
        memory_watch: MemoryWatch,
        timeout: float | None,
        *,
        make_loop: Callable[[EngineThread], EngineLoop] | None = None,
        on_start_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.models, self.stats, self.memory_watch = models, stats, memory_watch
        self.requests: SimpleQueue[Work] = SimpleQueue()
        self.start_error: Exception | None = None
        self.has_started = self.is_stopping = self.is_dead = False
        self.num_restarts, self.last_restart, self._restarted_at = 0, "", 0.0
        self._open: weakref.WeakSet[Work] = weakref.WeakSet()
        self._make_loop, self._on_start_error = make_loop or new_loop, on_start_error
        self.loop = self._make_loop(self)
        if timeout is None:
            timeout = GPU_TIMEOUT if mx.default_device() == mx.Device(mx.gpu) else CPU_TIMEOUT
        self._timeout = timeout
        self.thread = threading.Thread(target=self._run, daemon=True, name="engine")

    def start(self, *, is_watched: bool = True) -> None:
        self.thread.start()
        if is_watched and self._timeout:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    # The event loop's side ------------------------------------------------------------------------------------

    def submit(self, work: Work) -> Work:
        """Queue a request whose prompts are made, or that wants the model alone.

        Raises:
            RequestRefused: 503, nothing computes any more; 429, too many wait.
        """
        self.check()
        if self.loop.num_waiting >= MAX_WAITING:
            raise RequestRefused(429, f"{MAX_WAITING} requests are waiting", kind="overloaded", retry_after=5)
        self._open.add(work)
        self.requests.put(work)
        return work

    def check(self) -> None:
        """Raise RequestRefused (503) if nothing computes any more."""
        if self.start_error is not None:
            raise RequestRefused(503, "the model could not be loaded: see the server's log")
        if self.is_dead or self.is_stopping:
            raise unavailable(CLOSING if self.is_stopping else "the engine's thread has died: see the server's log")

    async def texts_for(self, key: ModelKey | None) -> ModelTexts:
        """Return a model's tokenizer and what goes with it; the model is loaded if it is another one.

        Raises:
            RequestRefused: it cannot be had.
        """
        if (texts := self.models.texts_of(key)) is not None:
            return texts
        stream = AnswerStream()
        self.submit(Work(stream, None, key))
        try:
            (found,) = await stream.receive()
        finally:
            stream.close()
        return found  # type: ignore[no-any-return]

    @property
    def state(self) -> str:
        """``loading``, ``ok``, ``degraded`` or ``failed``."""
        if self.is_dead or self.start_error is not None:
            return "failed"
        if not self.has_started:
            return "loading"
        is_short = self.memory_watch.pressure >= Pressure.HOLDING
        is_fresh = self.num_restarts > 0 and time.monotonic() - self._restarted_at < FRESH_SECONDS
        return "degraded" if is_short or is_fresh else "ok"

    def health(self) -> dict[str, Any]:
        """Return what ``/health`` says. Waits for nobody."""
        since = round(time.monotonic() - self._restarted_at, 1) if self.num_restarts else None
        return {
            "status": self.state,
            "restarts": self.num_restarts,
            "last_restart": self.last_restart or None,
            "seconds_since_restart": since,
            "memory": self.memory_watch.as_dict(),
        }

    def sequences(self) -> list[dict[str, Any]]:
        """Return how far each answer of the batch is, and each request that is in no batch, in the order they came."""
        outside = [work for work in list(self._open) if work.request is not None and work.state != "batched"]
        found = [*self.loop.sequences(), *(_figures(work) for work in outside if work.is_wanted)]
        return sorted(found, key=lambda each: each["order"])

    def fail_all(self, message: str) -> None:
        """Tell every client that waits. By any thread."""
        for work in list(self._open):
            if work.stream is not None and work.stream.is_wanted and not work.stream.loop.is_closed():
                work.stream.loop.call_soon_threadsafe(work.stream.fail, unavailable(message))

    def stop(self, seconds: float | None) -> bool:
        """End in order, and wait for that. Return whether it has ended."""
        self.is_stopping = True
        if self.thread.ident is not None:
            self.thread.join(seconds)
        return not self.thread.is_alive()

    # The thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        mx.default_stream(mx.default_device())
        try:
            self._load_default()
            while self.start_error is None and not self._live():
                pass
        except BaseException as error:
            self._die(f"the engine's thread cannot be started again: {type(error).__name__}: {error}")
        finally:
            self.is_dead = not self.is_stopping
            mx.clear_streams()  # a thread that ends with a stream of the CPU may end the process

    def _load_default(self) -> None:
        """Load the model that the command line names. If it cannot be served, the process is to end."""
        try:
            self.models.load_default()
            self.has_started = True
        except Exception as error:
            if self.is_stopping:
                return
            logging.error("the model cannot be served: %s", error)
            self.start_error = error
            self._on_start_error(error)

    def _live(self) -> bool:
        """Run one loop. Return whether the server has ended in order."""
        loop = self.loop
        try:
            loop.run()
        except BaseException as error:
            logging.critical("the engine's thread has failed", exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        else:
            loop.refuse_all()
            loop.outbox.flush()
            self.models.close()  # in this thread: arrays go where they were made
            return True
        loop.abandon()
        if self.num_restarts:
            self._die(f"the engine's thread has failed again: {reason}")
        self.fail_all("the engine's thread has failed, and is started again: see the server's log")
        self.models.mend()
        self.loop = self._make_loop(self)
        self.num_restarts, self.last_restart, self._restarted_at = 1, reason, time.monotonic()
        return False

    # The end of the process -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at the thread several times in each timeout, and end the process if it makes no progress."""
        seen, since = None, time.monotonic()
        while self.thread.is_alive():
            time.sleep(min(1.0, self._timeout / 8))
            if (progress := self._progress()) is None or progress != seen:
                seen, since = progress, time.monotonic()
            elif time.monotonic() - since >= self._timeout:
                frame = sys._current_frames().get(self.thread.ident or 0)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                why = f"no progress for {self._timeout:g} s"
                logging.critical("the engine's thread has made %s; it was at:\n%s", why, stack)
                self._die(why)

    def _progress(self) -> object:
        """Return a value that changes with all work; None: the thread is at something without bounds, such as loading
        a model."""
        loop = self.loop
        if self.is_stopping or not self.has_started or loop.is_loading:
            return None
        return loop, loop.progress()

    def _die(self, why: str) -> NoReturn:
        """End the process, for whoever started it to start it again."""
        self.is_dead = True
        self.fail_all(f"the server ends: {why}")
        time.sleep(LAST_SECONDS)  # for the last words to clients
        print(f"mlx_paged.server: {why}; the process ends", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(EXIT_STATUS)


def new_loop(thread: EngineThread) -> EngineLoop:
    return EngineLoop(thread.models, thread.requests, thread.stats, thread.memory_watch, lambda: thread.is_stopping)


def _figures(work: Work) -> dict[str, Any]:
    """Return what is known of a request that is in no batch."""
    request = work.request
    assert request is not None
    return {
        "number": str(request.number),
        "order": (request.number, 0),
        "uid": None,
        "state": work.state,
        "waiting": work.state == "queued",
        "age_seconds": round(time.monotonic() - request.asked_at, 1),
        "prompt_tokens": sum(len(prompt.tokens) for prompt in request.prompts),
        "cached_tokens": 0,
        "tokens": 0,
        "computing_tokens": 0,
        "generated_tokens": sum(row.num_tokens for row in work.rows),
        "blocks": [],
    }
