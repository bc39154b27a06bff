"""Launches of a kernel's text alone, on scratch arrays, for tests of texts and for scripts/dump_kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_paged.kernels.bodies import BODIES
from mlx_paged.kernels.build import Constants
from mlx_paged.kernels.quantized import QuantizedRows
from mlx_paged.kernels.shared_runs import HEADER

# On Metal, MLX puts inputs of fewer elements in the address space `constant`, not `device`, which makes another text
# (docs/adr/0018).
MIN_DEVICE_ELEMENTS = 8
Build = Callable[[str, Constants], Callable[..., list[mx.array]]]


def launch_alone(name: str, constants: Constants, build: Build, num_rows: int = MIN_DEVICE_ELEMENTS) -> list[mx.array]:
    """Launch a kernel on scratch arrays of a few KB to about 4 MB, with no tokens to attend to; ``num_rows``: of logits
    to draw from. The results are lazy and meaningless."""
    body = BODIES[name]
    make = _merge if "JOIN" in body.variants else _SCRATCH[body.file]
    given, options = make(_Kernel(name, constants, num_rows))
    kernel, inputs = build(name, constants), [given[name] for name in body.inputs]
    own: Any = getattr(kernel, "prepared", None)  # of a kernel that mlx_paged/cuda/ has compiled
    return kernel(inputs=inputs, **options) if own is None else own(**options)(inputs)


class _Kernel:
    """A kernel's body and constants."""

    def __init__(self, body: str, constants: Constants, num_rows: int) -> None:
        self.constants = dict(constants)
        self.body, self.num_rows = body, num_rows

    def __getitem__(self, name: str) -> Any:
        return self.constants[name]

    def pool(self, heads: int = 1) -> dict[str, mx.array]:
        """Return pools of one block, and a fence."""
        shape = (1, heads, self["BS"])
        if "KBITS" in self.constants:
            rows = (
                QuantizedRows(self[dim], self[n], self["GS"], self["T"]) for dim, n in (("D", "KBITS"), ("DV", "VBITS"))
            )
            keys, values = (mx.zeros((*shape, form.num_words), mx.uint32) for form in rows)
        else:
            keys, values = (mx.zeros((*shape, self[dim]), self["T"]) for dim in ("D", "DV"))
        return {"k_pool": keys, "v_pool": values, "fence": mx.zeros((1,), mx.uint32)}

    def sinks(self, heads: int) -> mx.array:
        return mx.zeros((heads if self["SINKS"] else 4,))


Scratch = tuple[dict[str, mx.array], dict[str, Any]]  # inputs by name, and keyword arguments of the launch


def _options(grid: tuple[int, int, int], threads: int, *outputs: tuple[tuple[int, ...], mx.Dtype]) -> dict[str, Any]:
    return {
        "grid": grid,
        "threadgroup": (threads, 1, 1),
        "output_shapes": [shape for shape, _ in outputs],
        "output_dtypes": [dtype for _, dtype in outputs],
    }


_FENCE = ((1,), mx.uint32)


def _decode(kernel: _Kernel) -> Scratch:
    """Return one sequence of 8 queries that see nothing."""
    q_len = MIN_DEVICE_ELEMENTS
    kv_heads = -(-MIN_DEVICE_ELEMENTS // kernel["G"]) if kernel["SINKS"] else 1
    heads, dtype, threads = kv_heads * kernel["G"], kernel["T"], kernel["SG"] * 32
    ends, lines = mx.zeros((1, q_len), mx.int32), heads * q_len
    q = mx.zeros((1, heads, q_len, kernel["D"]), dtype)
    given = {
        **kernel.pool(kv_heads),
        **{"q": q, "k_new": q, "v_new": q, "ends": ends, "starts": ends, "params": mx.zeros((5,))},
        "tables": mx.zeros((1, MIN_DEVICE_ELEMENTS), mx.int32),
        "sinks": kernel.sinks(heads),
    }
    out = (1, heads, q_len, kernel["DV"])
    given["items"] = mx.zeros((MIN_DEVICE_ELEMENTS, HEADER + kernel.constants.get("ROWS", 1)), mx.int32)
    if "OWN" in BODIES[kernel.body].variants:
        given["arrivals"] = mx.zeros((max(MIN_DEVICE_ELEMENTS, kv_heads * q_len),), mx.uint32)
        return given, _options((kv_heads * threads, q_len, 1), threads, (out, dtype), ((1,), mx.float32), _FENCE)
    parts = 1 if kernel.constants.get("SINGLE") else 2
    first = ((1, heads, q_len, parts * kernel["DV"]), kernel.constants.get("O", mx.float32))
    grid = (kv_heads * threads, q_len, parts)
    return given, _options(grid, threads, first, ((lines, parts, 2), mx.float32), _FENCE)


def _prefill(kernel: _Kernel) -> Scratch:
    """Return a tile of no tokens."""
    heads, dtype, threads = kernel["G"], kernel["T"], kernel["SG"] * 32
    given = {
        **kernel.pool(),
        **{"q": mx.zeros((1, heads, 1, kernel["D"]), dtype), "tables": mx.zeros((1, MIN_DEVICE_ELEMENTS), mx.int32)},
        **{"tiles": mx.zeros((2, 4), mx.int32), "params": mx.ones((4,))},
        "sinks": kernel.sinks(max(MIN_DEVICE_ELEMENTS, heads)),
    }
    return given, _options((threads, 1, 1), threads, ((1, heads, 1, kernel["DV"]), dtype), _FENCE)


def _merge(kernel: _Kernel) -> Scratch:
    heads = q_len = MIN_DEVICE_ELEMENTS
    lines, dim, threads = heads * q_len, kernel["DV"], kernel["SG"] * 32
    ends = mx.zeros((1, q_len), mx.int32)
    given = {
        **{"partial": mx.zeros((1, heads, q_len, 2 * dim)), "stats": mx.zeros((lines, 2, 2))},
        **{"ends": ends, "starts": ends, "sinks": kernel.sinks(heads)},
    }
    return given, _options((lines * threads, 1, 1), threads, ((1, heads, q_len, dim), kernel["T"]))


def _write(kernel: _Kernel) -> Scratch:
    """Return rows with negative slots, which are not written."""
    rows = MIN_DEVICE_ELEMENTS
    given = {name: mx.zeros((1, 1, rows, kernel[dim]), kernel["T"]) for name, dim in (("k", "D"), ("v", "DV"))}
    given |= {**kernel.pool(), "slots": mx.full((rows,), -1, mx.int32)}
    parts = 1 if kernel.body == "write_slots" else 2  # keys and values separately
    return given, _options((rows * parts * 32, 1, 1), 32, _FENCE)


def _gather(kernel: _Kernel) -> Scratch:
    """Return a gather of one token of the only block."""
    blocks = mx.zeros((MIN_DEVICE_ELEMENTS,), mx.int32)
    given = {**kernel.pool(), "blocks": blocks, "span": mx.array([0, 1], mx.int32)}
    outputs = [((1, 1, 1, kernel[dim]), kernel["T"]) for dim in ("D", "DV")]
    return given, _options((256, 1, 1), 256, *outputs, _FENCE)


def _product(kernel: _Kernel) -> Scratch:
    """Return two rows and matrices of eight rows, with eight values each, or the 32 of a group."""
    rows, size, dtype, threads = 2, 8, kernel["T"], kernel["SG"] * 32
    bits = kernel.constants.get("BITS")
    depth = 32 if bits else size
    x = mx.zeros((rows, depth), dtype)
    w, given = mx.zeros((size, depth), dtype), {"x": x, "bias": mx.zeros((size,), dtype)}
    for number in ("", "1", "2"):
        given[f"w{number}"] = mx.zeros((size, bits), mx.uint32) if bits else w
        given |= {f"{name}{number}": mx.zeros((size, 1), dtype) for name in ("scales", "biases")}
    outputs = [((rows, size), dtype)] * len(BODIES[kernel.body].outputs)
    return given, _options((len(outputs) * threads, 1, 1), threads, *outputs)


def _draw(kernel: _Kernel) -> Scratch:
    """Return rows with eight equal logits."""
    rows, threads = kernel.num_rows, kernel["SG"] * 32
    given = {"x": mx.zeros((rows, 8), kernel["T"]), "params": mx.zeros((rows, 8))}
    given |= {"keys": mx.zeros((rows, 8), mx.uint32), "positions": mx.zeros((rows,), mx.uint32)}
    return given, _options((rows * threads, 1, 1), threads, ((rows,), kernel["O"]))


_SCRATCH: dict[str, Callable[[_Kernel], Scratch]] = {
    **dict.fromkeys(("decode.metal", "matrix_decode.metal", "tensor_decode.cuh", "latent_decode.cuh"), _decode),
    "tensor_prefill.cuh": _prefill,
    "merge_partitions.metal": _merge,
    "write.metal": _write,
    "gather.metal": _gather,
    "products.cuh": _product,
    "draw_rows.metal": _draw,
}
