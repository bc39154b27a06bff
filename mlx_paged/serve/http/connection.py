"""Connection: whether the client of one request is still there."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# Says that the client has sent its last, whatever of it is still unread; not every system has it.
SENT_LAST = getattr(select, "POLLRDHUP", 0)
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
STREAM_PROBE = "are you there?"  # a comment, which readers of event streams skip
# Seconds between the questions of the system to a client that may be gone, and how many of them.
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Connection:
    """Notices when the client goes.

    A client that has sent all it has to say and reads on (``shutdown(SHUT_WR)``) looks like one that has closed the
    connection, until it is written to: the system of one that has closed it answers with a reset. So at the end of
    what a client sends, it gets something that means nothing: an interim response ``100 Continue``, which clients of
    HTTP/1.1 skip, or a comment if it reads a stream. A client of HTTP/1.0 may not be sent either before its answer:
    there the system is left to find out, which can take a minute.

    Args:
        handler: of the client: its connection, the version of its request, and what of an answer was sent.

    Attributes:
        beat: called at each look, by the thread that writes the answer.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._has_probed = False
        self.beat: Callable[[], None] | None = None

    def client_is_gone(self) -> bool:
        """Whether the client has closed the connection; what it may have sent meanwhile stays to be read. To be asked
        by the handler's thread, which writes the answer."""
        connection: socket.socket = self._handler.connection
        try:
            if self.beat is not None:
                self.beat()
            poll = select.poll()
            poll.register(connection, select.POLLIN | SENT_LAST)
            if not (found := poll.poll(0)):
                return False
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return True
            has_ended = found[0][1] & (SENT_LAST | select.POLLHUP) or not connection.recv(1, socket.MSG_PEEK)
            if has_ended and not self._has_probed:
                self._has_probed = True
                self._probe(connection)
        except (OSError, ValueError):
            return True
        return False

    def _probe(self, connection: socket.socket) -> None:
        handler = self._handler
        if handler.has_answered:
            if handler.events is not None:
                handler.events.comment(STREAM_PROBE)
        elif handler.request_version != "HTTP/1.0":
            handler.wfile.write(PROBE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            with suppress(AttributeError, OSError):  # not every system lets itself be told
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
