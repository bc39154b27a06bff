"""An HTTP server over a model: OpenAI's and Anthropic's APIs, on starlette and uvicorn."""

from __future__ import annotations

import importlib
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command ``mlx_paged.server``; ``argv`` defaults to the process's arguments."""
    importlib.import_module("mlx_paged.cli.server").main(argv)  # imported late: cli is a layer above
