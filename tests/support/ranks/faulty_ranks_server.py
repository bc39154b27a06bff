"""A script that runs the server on a rank. Rank 1's model raises for prompts that begin with :data:`FATAL`."""

import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama

FATAL = 777

plain = llama.Model.__call__


def call(self: Any, inputs: mx.array, *args: Any, **options: Any) -> mx.array:
    result: mx.array = plain(self, inputs, *args, **options)
    if inputs.shape[1] > 1 and inputs.tolist()[0][0] == FATAL:
        raise ValueError("injected: the model")
    return result


def main() -> None:
    if os.environ["MLX_RANK"] == "1":
        llama.Model.__call__ = call
    from mlx_paged.cli import server

    server.main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    main()
