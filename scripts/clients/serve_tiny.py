"""Serve a tiny random model that knows tools: prints its address, and serves until stdin ends.

python scripts/clients/serve_tiny.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.demo_model import ensure_demo_model
from tests.support.models.tiny_model import make_tools_model
from tests.support.processes.server_process import ServerProcess


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = make_tools_model(Path(folder) / "tools", ensure_demo_model())
        flags = ("--max-tokens", "16", "--chat-template-args", '{"enable_thinking": false}')
        server = ServerProcess(model, Path(folder), *flags, *sys.argv[1:], cold=True)
        print(server.url, flush=True)
        sys.stdin.read()
        status = server.stop()
        print(server.log[-5000:] if "Traceback" in server.log else f"ended with {status}", file=sys.stderr)


if __name__ == "__main__":
    main()
