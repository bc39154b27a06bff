"""Ctrl-C while a command of ours still imports: it ends at once with status 130, without a traceback.

Imported first. It changes nothing in programs that are not our commands.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

COMMANDS = ("mlx_paged", "mlx_paged.generate", "mlx_paged.server")
INTERRUPTED = 130


def _is_own_command() -> bool:
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name == "-m":  # python -m MODULE, while MODULE's package is imported
        after = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
        name = after[0] if after else ""
    return name.removesuffix(".exe") in COMMANDS


def _end(number: int, frame: Any) -> None:
    os._exit(INTERRUPTED)


def end_at_interrupt() -> None:
    """End the process at SIGINT, if it is one of our commands and nobody else handles the signal."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _is_own_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_at_interrupt() -> None:
    """Have SIGINT raise KeyboardInterrupt again: the imports are done."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


end_at_interrupt()
