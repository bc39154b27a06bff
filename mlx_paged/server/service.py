"""Service: a running server: its engine, listener, signals and shutdown."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn

from ..errors import ConfigError
from ..ranks.ranks import Ranks
from .app import make_app
from .clients import Clients
from .engine_loop import CLOSING
from .engine_thread import LAST_SECONDS, EngineThread, new_loop
from .errors import RequestRefused, start_status, unavailable
from .http import (
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    SOCKET_SECONDS,
    SPARE_FILES,
    BodyBudget,
    Protocol,
    raise_file_limit,
)
from .memory import MemoryWatch
from .model_names import ModelNames
from .options import ServerConfig
from .prompting import PromptMaker
from .ranked_loop import RankedLoop, check_for_ranks, ranked_memory_watch
from .report import ServerStats, server_report
from .request import ModelKey, ServerRequest
from .requests.responses import MAX_KEPT_BYTES, KeptResponses

if TYPE_CHECKING:
    from .backend import Models

BACKLOG = 1024  # so that the system refuses no burst of connections
END_SECONDS = 10.0  # for the engine to finish its step and save prefixes


def fail_start(message: object) -> None:
    print(f"mlx_paged.server: the server cannot start: {message}", file=sys.stderr)


class Service:
    """One server.

    Args:
        models: the models that it serves.
        cli_args: parsed arguments of the command line.
        config: the server's options.
        default: the model of the command line.
        fingerprint: ``system_fingerprint`` of answers.
        ranks: processes that compute the model together; None: only this one. Rank 0 has the clients.
    """

    def __init__(
        self,
        models: Models,
        cli_args: Any,
        config: ServerConfig,
        default: ModelKey,
        fingerprint: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        self.cli_args, self.config, self.fingerprint, self.ranks = cli_args, config, fingerprint, ranks
        self.stats = ServerStats()
        self.names = ModelNames(default, config, cli_args.models)
        self.clients = Clients(config.api_keys)
        self.prompts = PromptMaker(default_tokens=cli_args.max_tokens)
        self.bodies = BodyBudget()
        self.responses = KeptResponses(MAX_KEPT_BYTES if config.response_store else 0)
        self.num_answering = 0
        self.is_draining = False
        watch = MemoryWatch(config.memory_watermark)
        if ranks is not None:
            watch = ranked_memory_watch(config.memory_watermark, ranks)
        self.engine = EngineThread(
            models,
            self.stats,
            watch,
            config.watchdog_timeout,
            make_loop=new_loop if ranks is None else functools.partial(RankedLoop, ranks),
            on_start_error=self._on_start_error,
        )
        self._server: _Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ending = False
        self._status = 0

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling parameters of requests that give none."""
        args = self.cli_args
        return {"temperature": args.temp, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}

    def check_open(self) -> None:
        """Raise RequestRefused (503) if no new requests are served."""
        if self.is_draining:
            raise unavailable(CLOSING)
        self.engine.check()

    def check_for_ranks(self, request: ServerRequest) -> None:
        """Raise RequestRefused (501) for what several ranks do not support."""
        if self.ranks is None:
            return
        if request.model != self.names.resolve(None):
            what = "several ranks serve only the model of --model, without other adapters or draft models"
            raise RequestRefused(501, what, param="model")
        check_for_ranks(request)

    # Health and figures ---------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        health = self.engine.health()
        if self.is_draining and health["status"] != "failed":
            health["status"] = "draining"
        return health

    def report(self, *, with_blocks: bool = False) -> dict[str, Any]:
        """Return what ``/v1/cache/stats`` says. Never blocks on the engine's thread; figures are a snapshot."""
        models = self.engine.models
        texts, cache = models.texts, models.prompt_cache
        return server_report(
            self.stats,
            models.pool,
            self.engine.sequences(),
            self.engine.loop.num_waiting + self.prompts.num_waiting,
            cache.figures() if hasattr(cache, "figures") else None,
            model=None if texts is None or texts.key.model is None else os.path.basename(texts.key.model.rstrip("/")),
            health=self.health(),
            clients=self.clients.figures(),
            with_blocks=with_blocks,
        )

    # Running --------------------------------------------------------------------------------------------------

    def run(self) -> NoReturn:
        """Serve until a signal or an error ends it, and end the process."""
        try:
            listener = listening(self.cli_args.host, self.cli_args.port)
        except OSError as error:
            fail_start(error)
            self._exit(1)
        asyncio.run(self._serve(listener))
        self._exit(self._status)

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        Protocol.max_connections = min(MAX_CONNECTIONS, max(1, raise_file_limit() - SPARE_FILES))
        config = uvicorn.Config(
            make_app(self),
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=SOCKET_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=1,
            backlog=BACKLOG,
        )
        self._server = _Server(config, self._on_signal)
        for name in ("uvicorn", "uvicorn.error"):
            logging.getLogger(name).setLevel(logging.WARNING)
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self._server.handle_exit)
        self.engine.start(is_watched=self.ranks is None)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logging.info("API at %s/v1, cache page at %s/cache", url, url)
        await self._server.serve([listener])
        for number in (signal.SIGINT, signal.SIGTERM):  # a second signal: leave at once
            signal.signal(number, lambda *_: self._exit(self._status))
        begin = time.monotonic()
        if not self.engine.stop(None if self.ranks is not None else END_SECONDS):
            logging.critical("the engine did not stop within %g s: not all prefixes are saved", END_SECONDS)
        logging.info("stopped after %.1f s", time.monotonic() - begin)

    def run_rank(self) -> NoReturn:
        """Compute on a rank without clients until rank 0 ends."""
        self.engine.start(is_watched=False)
        self.engine.thread.join()
        self._exit(0)

    # Ending ---------------------------------------------------------------------------------------------------

    def _on_start_error(self, error: Exception) -> None:
        """End the server because its model cannot be served. Called in the engine's thread."""
        logging.error("the model cannot be served: %s", error)
        if self.ranks is not None:
            self.ranks.fail(error)
        fail_start(error)
        self._status = start_status(error)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    def _on_signal(self, number: int) -> None:
        """Handle a signal, in the event loop."""
        name, seconds = signal.Signals(number).name, self.config.drain_timeout
        runs = self.engine.state in ("ok", "degraded") and seconds > 0
        if number == signal.SIGINT or self.is_draining or not runs:
            logging.info("%s: shutting down", name)
            self._end()
            return
        self.is_draining = True
        logging.info("%s: waiting up to %g s for %d requests", name, seconds, self.num_answering)
        self._task = asyncio.ensure_future(self._drain(seconds))

    async def _drain(self, seconds: float) -> None:
        await self._until_answered(seconds)
        self._end()

    async def _until_answered(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.num_answering and time.monotonic() < until:
            await asyncio.sleep(0.02)

    def _end(self) -> None:
        if not self._is_ending:
            self._is_ending = self.is_draining = True
            self._last_task = asyncio.ensure_future(self._fail_all_and_end())

    async def _fail_all_and_end(self) -> None:
        self.engine.is_stopping = self.ranks is None
        self.engine.fail_all(CLOSING)
        await self._until_answered(LAST_SECONDS)
        if self._server is not None:
            self._server.should_exit = True

    def on_rank_fault(self, why: str) -> None:
        """Fail all requests because of another rank, and wait until clients know. Any thread may call it."""
        self.engine.is_dead = True
        self.engine.fail_all(f"the server is exiting: {why}")
        until = time.monotonic() + LAST_SECONDS
        while self.num_answering and time.monotonic() < until:
            time.sleep(0.02)

    def _exit(self, status: int) -> NoReturn:
        """End the process with ``os._exit``, after all has been saved: a normal exit is aborted by MLX's CPU streams of
        threads that have ended."""
        if self.ranks is not None:
            self.ranks.close()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to the service."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal, self._loop = on_signal, asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._on_signal, sig)


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError if the port is taken, ConfigError if there is no such host."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host: cannot resolve {host!r}: {error}") from None
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"{host} port {port}: {error.strerror}; choose another port with --port") from None
    return listener
