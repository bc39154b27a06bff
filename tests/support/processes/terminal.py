"""A command whose stderr is a terminal."""

import os
import pty
import termios
from pathlib import Path

from tests.support.processes import commands


def on_a_terminal(program: str | Path, *args: object) -> bytes:
    """Run a command with a terminal as stderr, and return what it writes to it."""
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (24, 80))
    with open(os.devnull, "w") as nothing, os.fdopen(secondary, "w") as stderr:
        process = commands.start(program, *args, stdout=nothing, stderr=stderr)
    shown = b""
    while True:
        try:
            chunk = os.read(primary, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(primary)
    assert process.wait(timeout=300) == 0, shown
    return shown
