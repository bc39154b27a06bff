"""Listener: the socket that clients connect to, with a thread for each connection, and a bound of these."""

from __future__ import annotations

import json
import logging
import threading
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import Any

from ..refusal import RequestRefused

MAX_CONNECTIONS = 4096
SPARE_FILES = 256  # for everything else that the process opens


class Listener(ThreadingHTTPServer):
    """Many clients may come at once: a burst is not to be refused by the system. A connection that waits for its next
    request costs its thread, some 30 KB; those beyond the bound are told so and closed."""

    request_queue_size = 1024
    daemon_threads = True

    def server_activate(self) -> None:
        self._num_connections, self._lock = 0, threading.Lock()
        self.max_connections = min(MAX_CONNECTIONS, max(1, raised_file_limit() - SPARE_FILES))
        super().server_activate()
        host, port = str(self.server_address[0]), int(self.server_address[1])
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logging.info("API at %s/v1, the cache's page at %s/cache", url, url)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_one_too_many = self._num_connections >= self.max_connections
            self._num_connections += not is_one_too_many
        if is_one_too_many:
            with suppress(OSError):
                request.settimeout(1)
                request.sendall(_refusal(self.max_connections))
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            with self._lock:
                self._num_connections -= 1
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._num_connections -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.debug("connection of %s ended", client_address, exc_info=True)


def _refusal(most: int) -> bytes:
    refusal = RequestRefused(503, f"{most} connections are open", kind="overloaded", retry_after=5)
    body = json.dumps(refusal.body()).encode()
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\nConnection: close"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def raised_file_limit() -> int:
    """Let the process open as many files as it may. Returns how many these are."""
    try:
        import resource
    except ImportError:
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MAX_CONNECTIONS + SPARE_FILES if soft == resource.RLIM_INFINITY else int(soft)
