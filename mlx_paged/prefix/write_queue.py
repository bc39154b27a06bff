"""WriteQueue: jobs that write to a disk, done in order on a thread of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

LINGER_SECONDS = 0.1  # starting a thread for each block of a prefix would cost more than copying the block


class WriteQueue:
    """Runs jobs in the order they were put. The thread ends soon after the last job, and Python waits for it at its own
    end.

    Args:
        most_bytes: most bytes of waiting jobs; a single job may have more.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0  # of jobs that are not done
        self._changed = threading.Condition()
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._num_open = 0
        self._is_running = False

    def room(self, nbytes: int) -> int:
        """Return how many jobs of ``nbytes`` bytes fit now."""
        return max(int(not self.nbytes), (self.most_bytes - self.nbytes) // max(1, nbytes))

    def put(self, nbytes: int, job: Callable[[], None], *, wait: bool) -> bool:
        """Put a job, which must not raise.

        Args:
            nbytes: memory it holds.
            job: called on the queue's thread.
            wait: wait until there is room. Otherwise a full queue returns False.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self.room(nbytes))
            elif not self.room(nbytes):
                return False
            self._jobs.append((nbytes, job))
            self.nbytes += nbytes
            self._num_open += 1
            self._changed.notify_all()
            if self._is_running:
                return True
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="mlx_paged prefix writer").start()
        except RuntimeError:  # no more threads, or the interpreter ends
            self._run()
        return True

    def wait(self) -> None:
        """Wait until every job is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_open)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._jobs, LINGER_SECONDS):
                    self._is_running = False
                    return
                nbytes, job = self._jobs.popleft()
            try:
                job()
            finally:
                del job
                with self._changed:
                    self.nbytes -= nbytes
                    self._num_open -= 1
                    self._changed.notify_all()
