"""Several ranks on this machine, over MLX's ring, with the variables that ``mlx.launch`` gives them."""

import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.processes import commands

WORKER = commands.ROOT / "tests" / "support" / "ranks" / "worker.py"
MOST_SECONDS = 200.0  # per launch; reached only if something hangs


class Ended(NamedTuple):
    """A rank's process that has ended."""

    status: int
    stdout: str
    stderr: str


class Launch:
    """Ranks that have been started.

    Args:
        size: number of ranks.
        program: a script, or a module's name.
        args: of each rank's command.
        folder: for the files that they write, and their output.
        places: working folder of each rank; None means this process's.
        cold: as in ``commands.start``.
        env: variables of all ranks.
    """

    def __init__(
        self,
        size: int,
        program: str | Path,
        args: Sequence[object],
        folder: Path,
        places: Sequence[Path] | None = None,
        cold: bool = False,
        **env: str,
    ) -> None:
        self.folder = folder
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(size)]))
        self.processes: list[commands.Process] = []
        for rank in range(size):
            with (folder / f"{rank}.out").open("w") as out, (folder / f"{rank}.err").open("w") as err:
                known = {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank), **env}
                place = None if places is None else places[rank]
                self.processes.append(
                    commands.start(program, *args, stdout=out, stderr=err, cwd=place, cold=cold, **known)
                )

    def ended(self, seconds: float = MOST_SECONDS) -> list[Ended]:
        """Wait until all have ended; return their statuses and output. Kills those that do not end."""
        until = time.monotonic() + seconds
        try:
            codes = [process.wait(max(0.1, until - time.monotonic())) for process in self.processes]
        finally:
            self.kill()
        said = [[(self.folder / f"{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(len(codes))]
        return [Ended(code, *texts) for code, texts in zip(codes, said, strict=True)]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def worker(size: int, folder: Path, *names: str, **env: str) -> Launch:
    """Start ranks that play scenarios."""
    return Launch(size, WORKER, [folder, *names], folder, **env)
