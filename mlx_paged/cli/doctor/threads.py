"""A program: how many threads Metal allows in a group of each decode kernel, which hints at the registers it takes.

    python -m mlx_paged.cli.doctor.threads BLOCK_SIZE

An Apple GPU shares its registers among the threads of a group: a kernel that needs more of them is allowed fewer than
1,024 threads. MLX does not give this number away, except in the error for a group that is too large ("Thread group size
(2048) is greater than the maximum allowed threads per threadgroup (896)."), so each kernel is launched with 2,048
threads on purpose, and never runs. Prints one line of JSON for each shape of popular models. Metal only.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import mlx.core as mx

from ...kernels import ops as kernels
from ...kernels.build import KernelUnavailable, backend, prepared
from .jobs import Shape, popular_shapes

TOO_MANY = 2048  # no Metal GPU allows more than 1,024
HOW = (
    "each decode kernel was launched with 2,048 threads in a group, which is an error; MLX's text names how many "
    "Metal allows. 1,024: registers are no limit; less: the kernel needs more of them"
)
_KV_HEADS = 2
_ROWS, _WIDTH = 9, 16


def allowed_threads(message: str) -> int | None:
    """Return the limit that MLX's error for a thread group that is too large names, or None in another text."""
    found = re.search(r"maximum allowed threads per threadgroup \((\d+)\)", message)
    return int(found[1]) if found else None


def probe(shape: Shape) -> dict[str, Any]:
    """Launch the decode kernel of a shape with too many threads.

    Returns:
        ``shape``, ``needed`` (threads of the group that is used otherwise) and ``allowed`` as named in the error; None
        where it names none, and then ``message`` has its text.
    """
    pools = [mx.zeros((_WIDTH + 1, _KV_HEADS, shape.block_size, shape.head_dim), shape.dtype) for _ in "kv"]
    heads = _KV_HEADS * shape.gqa
    visible = (
        mx.zeros((_ROWS, _WIDTH), mx.int32),
        mx.ones((_ROWS, 1), mx.int32),
        mx.zeros((_ROWS, 1), mx.int32),
    )
    try:
        launch = kernels.prepare_decode(
            pools[0],
            pools[1],
            visible,
            n_q_heads=heads,
            scale=1.0,
            softcap=10.0 if shape.softcap else None,
            sinks=shape.sinks,
        )
    except KernelUnavailable as error:
        return {"shape": str(shape), "needed": None, "allowed": None, "message": str(error)[:500]}
    needed = launch.options["threadgroup"][0]
    decode = prepared(launch.kernel, {**launch.options, "threadgroup": (TOO_MANY, 1, 1)})
    q = mx.zeros((_ROWS, heads, 1, shape.head_dim), shape.dtype)
    message = "no error: it ran"
    try:
        mx.eval(
            launch._replace(decode=decode, merge=None)(
                q, pools[0], pools[1], kernels.new_fence(), mx.zeros((heads,)) if shape.sinks else None
            )
        )
    except (RuntimeError, ValueError) as error:
        message = str(error)
    allowed = allowed_threads(message)
    found: dict[str, Any] = {"shape": str(shape), "needed": needed, "allowed": allowed}
    return found if allowed is not None else {**found, "message": message[:500]}


def main(block_size: int) -> None:
    """Print a line for each popular shape."""
    for shape in popular_shapes(block_size):
        print(json.dumps(probe(shape)), flush=True)


if __name__ == "__main__":
    if backend() != "metal":
        sys.exit("MLX sees no Metal GPU")
    main(int(sys.argv[1]))
