"""Connection: the response generator as one client's handler sees it."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from .refusal import RequestRefused

PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
STREAM_PROBE = b": are you there?\n\n"  # a comment, which readers of event streams skip
# Seconds between the questions of the system to a client that may be gone, and how many of them.
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Aborted(BaseException):
    """Ends a request from within mlx-lm's handler, which catches every Exception and answers 404."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason


class Connection:
    """Notices when the client goes.

    A client that has sent all it has to say and reads on (``shutdown(SHUT_WR)``) looks like one that has closed the
    connection, until it is written to: the system of one that has closed it answers with a reset. So at the end of
    what a client sends, it gets something that means nothing: an interim response ``100 Continue``, which clients of
    HTTP/1.1 skip, or a comment if it reads a stream. A client of HTTP/1.0 may not be sent either before its answer:
    there the system is left to find out, which can take a minute.

    Args:
        generator: of the server's answers; asked for everything else.
        handler: of the client: its connection, the version of its request, and what of an answer was sent.
    """

    def __init__(self, generator: Any, handler: Any) -> None:
        self._generator = generator
        self._handler = handler
        self._has_probed = False
        self.ctx: Any = None  # of the latest request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(self, request: Any, args: Any, progress_callback: Any = None) -> tuple[Any, Iterator[Any]]:
        try:
            ctx, answers = self._generator.generate(
                request,
                args,
                progress_callback,
                self.client_is_gone,
                extras=self._handler.extras,
            )
        except (RequestRefused, OSError) as error:
            raise Aborted(error) from None
        self.ctx = ctx
        return ctx, self._pass_on(answers)

    def _pass_on(self, answers: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from answers
        except (RequestRefused, OSError) as error:
            raise Aborted(error) from None

    def client_is_gone(self) -> bool:
        """Whether the client has closed the connection; what it may have sent meanwhile stays to be read. To be asked
        by the handler's thread, which writes the answer."""
        connection: socket.socket = self._handler.connection
        try:
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            if not poll.poll(0):
                return False
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return True
            if not connection.recv(1, socket.MSG_PEEK) and not self._has_probed:
                self._has_probed = True
                self._probe(connection)
        except (OSError, ValueError):
            return True
        return False

    def _probe(self, connection: socket.socket) -> None:
        handler = self._handler
        if handler.has_answered:
            if handler.stream:
                handler.wfile.write(STREAM_PROBE)
        elif handler.request_version != "HTTP/1.0":
            handler.wfile.write(PROBE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            with suppress(AttributeError, OSError):  # not every system lets itself be told
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
