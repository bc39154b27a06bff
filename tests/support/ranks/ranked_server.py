"""A server on several ranks, for tests."""

import re
import signal
import socket
from pathlib import Path
from typing import Any

from tests.support.processes.server_process import START_SECONDS, ServerProcess
from tests.support.ranks.launch import Launch

MOST_SECONDS = 60.0


class RankedServer(ServerProcess):
    """The server on ranks as ``mlx.launch`` starts them.

    Args:
        size: number of ranks.
        timeout: seconds without a sign of another rank.
    """

    def __init__(self, model: Path, folder: Path, *flags: str, size: int = 2, timeout: float = 30) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = ["--model", model, "--port", self.port, "--rank-timeout", timeout, *flags]
        self.launch = Launch(size, "mlx_paged.server", arguments, folder)
        self.process = self.launch.processes[0]
        self.log_file = folder / "0.err"
        try:
            self.wait_until(lambda: self.is_up, START_SECONDS)
        except BaseException:
            self.launch.kill()
            raise

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.launch.processes[rank].send_signal(number)

    def ended(self, seconds: float = MOST_SECONDS) -> list[Any]:
        return self.launch.ended(seconds)

    def last_words(self) -> list[str]:
        """Return what each rank logs of its pool at its end."""
        logs = [(self.launch.folder / f"{rank}.err").read_text() for rank in range(len(self.launch.processes))]
        found = [re.findall(r"rank \d+ at its end: (.*)", log) for log in logs]
        return [words for each in found for words in each]
