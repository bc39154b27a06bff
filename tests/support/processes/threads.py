"""Threads whose failures fail the test."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

TIMEOUT = 120  # seconds; reached only in a deadlock


def start(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run ``work`` in a thread. Return a function that waits for its end and returns its result or raises its error."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error.with_traceback(None))
        finally:
            mx.clear_streams()  # a thread that ends with a stream of the CPU may end the process (MLX 0.32)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "a thread waits for ever"
        if errors:
            raise errors[0]
        return results[0]

    return result


def in_thread(work: Callable[[], Any]) -> Any:
    """Run ``work`` to its end in a thread of its own; return its result."""
    return start(work)()


def together(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run functions at the same time; return their results."""
    return [result() for result in [start(work) for work in works]]
