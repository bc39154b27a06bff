"""A command whose stderr is a terminal."""

from __future__ import annotations

import os
import pty
import subprocess


def on_a_terminal(command: list[str]) -> bytes:
    """What a command writes to stderr, which is a terminal."""
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=secondary, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    os.close(secondary)
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
