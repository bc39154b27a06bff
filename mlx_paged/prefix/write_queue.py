"""WriteQueue: jobs that write to a disk, done in order on a thread of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class WriteQueue:
    """Runs jobs in the order they were put. The thread lives only while there are jobs, and Python waits for it at its
    own end.

    Args:
        most_bytes: most bytes of waiting jobs; a single job may have more.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0  # of jobs that are not done
        self._changed = threading.Condition()
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
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
            self._changed.wait_for(lambda: not self._is_running)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                nbytes, job = self._jobs.popleft()
            try:
                job()
            finally:
                del job
                with self._changed:
                    self.nbytes -= nbytes
                    self._changed.notify_all()
