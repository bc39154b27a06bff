"""An interpreter that has imported what commands import, and forks for each of them.

``python -m tests.support.processes.warm_interpreter FD``; :mod:`tests.support.processes.commands` talks to it through
the socket FD.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

# The modules that take most of a command's start. None that is run as a module, and none that starts MLX's threads.
PRELOADED = (
    "mlx_lm",
    "mlx_lm.generate",
    "mlx_lm.server",
    "mlx_lm.models.gemma3_text",
    "mlx_lm.models.llama",
    "mlx_lm.models.mamba",
    "mlx_lm.models.qwen3",
    "mlx_paged.cli.doctor",
    "mlx_paged.cli.generate",
    "mlx_paged.cli.server",
    "mlx_paged.patches",
    "mlx_paged.patches.generate.batch_generator",
    "mlx_paged.server.loaded_models",
    "mlx_paged.server.service",
    "transformers.dynamic_module_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
)


def next_task(requests: socket.socket) -> dict[str, Any] | None:
    """Wait for tasks; return each in a fork of its own with its standard streams, and None here once the socket is
    closed."""
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            return None
        if os.fork() == 0:
            status = fds[3]
            pid = os.fork()
            if pid == 0:
                for target, fd in enumerate(fds[:3]):
                    os.dup2(fd, target)
                os.closerange(3, max(*fds, requests.fileno()) + 1)
                requests.detach()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if nohup started the tests
                return json.loads(message)
            os.write(status, f"{pid}\n".encode())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(status, f"{code}\n".encode())
            os._exit(0)
        for fd in fds:
            os.close(fd)
        while any(_ended()):  # forks that waited for a finished command
            pass


def _ended() -> tuple[int, int]:
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests handle interrupts
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # for good: a collection would touch all imported objects and so copy their memory
    task = next_task(requests)
    if task is None:
        return
    os.environ.clear()
    os.environ.update(task["env"])
    os.chdir(task["cwd"])
    program = task["program"]
    sys.argv = [program, *task["args"]]
    if program.endswith(".py"):
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path[0] = task["cwd"]
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
