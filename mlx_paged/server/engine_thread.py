"""EngineThread: the one thread that computes; watched for hangs. If it fails, the process ends."""

from __future__ import annotations

import asyncio
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

from ..errors import check_device
from .engine_loop import CLOSING, EngineLoop
from .errors import RequestRefused, unavailable
from .memory import MemoryWatch, Pressure
from .request import ModelKey
from .work import Work

if TYPE_CHECKING:
    from .loaded_models import LoadedModels
    from .report import ServerStats
    from .texts import LoadedTexts

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h: a service manager starts the server again
LAST_SECONDS = 1.5  # for errors to reach clients before the process exits
MAX_WAITING = 1024  # requests
# Seconds without progress that count as a hang. A step may compile kernels, and on a CPU its two thousand prompt tokens
# take minutes.
GPU_TIMEOUT, CPU_TIMEOUT = 300.0, 3600.0


class EngineThread:
    """The thread that runs an :class:`EngineLoop`. If the loop fails through no request's fault, as after an error of
    the device, or hangs, the process ends with :data:`EXIT_STATUS`, and a service manager starts it again.

    Args:
        models: the model and its caches.
        stats: the server's figures.
        memory_watch: watches the memory in use.
        timeout: seconds without progress that count as a hang; 0: no watchdog; None: the device's default.
        make_loop: makes the loop; None: an EngineLoop.
        on_start_error: called with the error if the server's own model cannot be served.
    """

    def __init__(
        self,
        models: LoadedModels,
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
        self._open: weakref.WeakSet[Work] = weakref.WeakSet()
        self._open_lock = threading.Lock()  # a WeakSet cannot be read while another thread adds to it
        self._on_start_error = on_start_error
        self.loop = (make_loop or new_loop)(self)
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
        """Queue a request whose prompts are made, or that only wants the model's texts.

        Raises:
            RequestRefused: 503, the engine has stopped or failed; 429, too many requests wait.
        """
        with self._open_lock:  # first: whatever happens from here on fails it
            self._open.add(work)
        self.check()
        if self.loop.num_waiting >= MAX_WAITING:
            raise RequestRefused(
                429, f"too many waiting requests (limit {MAX_WAITING})", kind="overloaded", retry_after=5
            )
        self.requests.put(work)
        return work

    def check(self) -> None:
        """Raise RequestRefused (503) if the engine has stopped or failed."""
        if self.start_error is not None:
            raise RequestRefused(503, "the model could not be loaded: see the server's log")
        if self.is_dead or self.is_stopping:
            raise unavailable(CLOSING if self.is_stopping else "the engine has stopped: see the server's log")

    async def texts_for(self, key: ModelKey | None) -> LoadedTexts:
        """Return a model's tokenizer and parsers; the model is loaded if they are not known yet.

        Raises:
            RequestRefused: the model cannot be loaded.
        """
        if (texts := self.models.texts_of(key)) is not None:
            return texts
        work = self.submit(Work(None, key, asyncio.get_running_loop()))
        try:
            (found,) = await work.receive()
        finally:
            work.close()
        return found  # type: ignore[no-any-return]

    @property
    def state(self) -> str:
        """``loading``, ``ok``, ``degraded`` or ``failed``."""
        if self.is_dead or self.start_error is not None:
            return "failed"
        if not self.has_started:
            return "loading"
        return "degraded" if self.memory_watch.pressure == Pressure.PREEMPTING else "ok"

    def health(self) -> dict[str, Any]:
        """Return the body of ``/health``. Never blocks on the engine thread."""
        return {"status": self.state, "memory": self.memory_watch.as_dict()}

    def sequences(self) -> list[dict[str, Any]]:
        """Return the progress of each answer in the batch and of each request outside it, in order of arrival."""
        outside = [work for work in self._open_work() if work.request is not None and work.state != "batched"]
        found = [*self.loop.sequences(), *(_figures(work) for work in outside if work.is_wanted)]
        return sorted(found, key=lambda each: each["order"])

    def _open_work(self) -> list[Work]:
        with self._open_lock:
            return list(self._open)

    def fail_all(self, message: str) -> None:
        """Fail all open requests with a 503. For any thread."""
        for work in self._open_work():
            if work.loop is not None and work.is_open and not work.loop.is_closed():
                work.loop.call_soon_threadsafe(work.fail, unavailable(message))

    def stop(self, seconds: float | None) -> bool:
        """Stop the thread in order, waiting up to ``seconds``. Return whether it has ended."""
        self.is_stopping = True
        if self.thread.ident is not None:
            self.thread.join(seconds)
        return not self.thread.is_alive()

    # The thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        mx.default_stream(mx.default_device())
        try:
            self._load_default()
            if self.start_error is None:
                self.loop.run()
                self.loop.refuse_all()
                self.loop.outbox.flush()
                self.models.close()  # in this thread: arrays must be freed where they were made
        except BaseException as error:
            logging.critical("the engine failed", exc_info=error)
            self._die(f"the engine failed: {type(error).__name__}: {error}")
        finally:
            self.is_dead = not self.is_stopping
            mx.clear_streams()  # a thread that ends with a CPU stream may abort the process

    def _load_default(self) -> None:
        """Load the model of the command line. If it cannot be served, report it, so that the process ends."""
        try:
            self.models.load_default()
            self.has_started = True
        except Exception as error:
            if self.is_stopping:
                return
            check_device(error)
            self.start_error = error
            self._on_start_error(error)

    # The end of the process -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Check the thread several times per timeout, and end the process if it makes no progress."""
        seen, since = None, time.monotonic()
        while self.thread.is_alive():
            time.sleep(min(1.0, self._timeout / 8))
            if (progress := self._progress()) is None or progress != seen:
                seen, since = progress, time.monotonic()
            elif time.monotonic() - since >= self._timeout:
                frame = sys._current_frames().get(self.thread.ident or 0)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                why = f"no progress for {self._timeout:g} s"
                logging.critical("the engine made %s; its stack:\n%s", why, stack)
                self._die(why)

    def _progress(self) -> object:
        """Return a value that changes with all progress; None: the thread does something without a time limit, such as
        loading a model."""
        loop = self.loop
        if self.is_stopping or not self.has_started or loop.is_loading:
            return None
        return loop, loop.progress()

    def _die(self, why: str) -> NoReturn:
        """End the process, so that a service manager restarts it."""
        self.is_dead = True
        self.fail_all(f"the server is exiting: {why}")
        time.sleep(LAST_SECONDS)  # for errors to reach clients
        print(f"mlx_paged: {why}; exiting with status {EXIT_STATUS}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(EXIT_STATUS)


def new_loop(thread: EngineThread) -> EngineLoop:
    return EngineLoop(thread.models, thread.requests, thread.stats, thread.memory_watch, lambda: thread.is_stopping)


def _figures(work: Work) -> dict[str, Any]:
    """Return the progress of a request outside the batch."""
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
        "generated_tokens": work.num_tokens,
        "blocks": [],
    }
