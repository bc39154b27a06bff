"""Service: a running server: its engine, listener, signals and shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import uvicorn

from ..errors import ConfigError
from .app import Parts, make_app
from .engine_thread import CLOSING, LAST_SECONDS
from .errors import start_status
from .http import MAX_CONNECTIONS, MAX_HEADER_BYTES, SOCKET_SECONDS, raise_file_limit
from .loaded_models import LoadedModels

BACKLOG = 1024  # so that the system refuses no burst of connections
LOG_SECONDS = 10.0
COUNTED = ("generated_tokens", "computed_prompt_tokens", "prompt_tokens", "cached_tokens")
END_SECONDS = 10.0  # for the engine to finish its step and save prefixes


def fail_start(message: object) -> None:
    print(f"mlx_paged server: the server cannot start: {message}", file=sys.stderr)


class Service(Parts):
    """One server, running. Has the arguments of :class:`.app.Parts`."""

    def __init__(self, models: LoadedModels) -> None:
        super().__init__(models)
        self.engine.on_start_error = self.on_start_error
        self._server: _Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: list[asyncio.Task[None]] = []
        self._status = 0

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
        raise_file_limit()
        config = uvicorn.Config(
            make_app(self),
            http="h11",
            limit_concurrency=MAX_CONNECTIONS,
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
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self._server.handle_exit)
        self.engine.start(is_watched=self.ranks is None)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logging.info("API at %s/v1, cache page at %s/cache", url, url)
        body = '{"messages": [{"role": "user", "content": "Hello"}]}'
        logging.info("try: curl %s/v1/chat/completions -H 'Content-Type: application/json' -d '%s'", url, body)
        progress = asyncio.ensure_future(self._log_progress())
        await self._server.serve([listener])
        progress.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):  # a second signal: leave at once
            signal.signal(number, lambda *_: self._exit(self._status))
        begin = time.monotonic()
        if not self.engine.stop(None if self.ranks is not None else END_SECONDS):
            logging.critical("the engine did not stop within %g s: not all prefixes are saved", END_SECONDS)
        logging.info("stopped after %.1f s", time.monotonic() - begin)

    async def _log_progress(self) -> None:
        """Log a line every :data:`LOG_SECONDS` in which the engine has computed."""
        before = self.stats.as_dict()
        while True:
            await asyncio.sleep(LOG_SECONDS)
            now = self.stats.as_dict()
            new = {name: now[name] - before[name] for name in COUNTED}
            before = now
            if not any(new.values()):
                continue
            sequences = self.engine.sequences()
            running = sum(not each["waiting"] for each in sequences)
            cached = 100 * new["cached_tokens"] / max(1, new["prompt_tokens"])
            logging.info(
                "%d running, %d waiting, %.1f tokens/s, %.0f %% of prompt tokens cached",
                *(running, len(sequences) - running, new["generated_tokens"] / LOG_SECONDS, cached),
            )

    def run_rank(self) -> NoReturn:
        """Compute on a rank without clients until rank 0 ends."""
        self.engine.start(is_watched=False)
        self.engine.thread.join()
        self._exit(0)

    # Ending ---------------------------------------------------------------------------------------------------

    def on_start_error(self, error: Exception) -> None:
        """End the server because its model cannot be served. Called in the engine's thread."""
        if self.ranks is not None:
            self.ranks.fail(error)
        fail_start(error)
        self._status = start_status(error)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    def _on_signal(self, number: int) -> None:
        """Handle a signal, in the event loop."""
        name, seconds = signal.Signals(number).name, self.config.drain_timeout
        if self.is_draining or not seconds or self.engine.state not in ("ok", "degraded"):
            logging.info("%s: shutting down", name)
            seconds = 0
        else:
            open_answers = f"{self.num_answering} open answer{'' if self.num_answering == 1 else 's'}"
            logging.info("%s: waiting up to %g s for %s; the next signal ends the server", name, seconds, open_answers)
        self._end(seconds)

    def _end(self, seconds: float = 0) -> None:
        """Take no new requests, and end the server in up to ``seconds``; it may be called again with fewer."""
        self.is_draining = True
        self._ending.append(asyncio.ensure_future(self._end_after(seconds)))  # a task that nobody holds may be dropped

    async def _end_after(self, seconds: float) -> None:
        await self._until_answered(seconds)
        self.engine.is_stopping = self.ranks is None
        self.engine.fail_all(CLOSING)
        await self._until_answered(LAST_SECONDS)
        if self._server is not None:
            self._server.should_exit = True

    async def _until_answered(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.num_answering and time.monotonic() < until:
            await asyncio.sleep(0.02)

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
    try:
        # "::" takes clients of IPv4, too, where the system can.
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise OSError(f"{host} port {port}: {why}; choose another port with --port") from None
