"""The real launch code of mlx_paged.kernels.ops, run on the emulator."""

from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.bodies import BODIES, kernel_text, parts_of, resolved, text_of
from mlx_paged.kernels.launch_shape import (
    FUSED_BODIES,
    LATENT_BODIES,
    MATRIX_BODIES,
    MOST_GROUPS,
    SHARED_BODIES,
    shape_for,
)
from scripts.support.paged_decode import decode_variants, paged_decode
from tests.support.kernels.quantized_pages import dequantized, page_shape, quantized, unset_pages
from tests.support.msl import emulator

# Outputs that a kernel may leave partly unwritten, and inputs it stores to.
SPARSE = {
    **dict.fromkeys(("paged_decode", "quantized_decode", *MATRIX_BODIES, *LATENT_BODIES), ("out",)),
    **dict.fromkeys(FUSED_BODIES, ("partial",)),
    **dict.fromkeys(SHARED_BODIES, ("partial", "stats")),
}
WRITES = dict.fromkeys(
    (
        "paged_decode",
        "quantized_decode",
        *MATRIX_BODIES,
        *LATENT_BODIES,
        *SHARED_BODIES,
        "write_slots",
        "quantized_write",
        "write_rows",
    ),
    ("k_pool", "v_pool"),
) | dict.fromkeys(FUSED_BODIES, ("k_pool", "v_pool", "arrivals"))


TENSOR_BODIES = {*FUSED_BODIES, *SHARED_BODIES, "join_partitions", LATENT_BODIES[1]}


class Emulated:
    """A fake build.build_kernel. `edit` plants mutations: it changes a body's text. `in_place`: as on a GPU, kernels
    store to MLX's own arrays and return such, fast functions accept NaN, and unwritten output is 0, which often does no
    harm."""

    def __init__(self, checked=True, orders=(0, 1, 2), edit=None, in_place=False):
        self.checked, self.orders, self.edit, self.in_place = checked, orders, edit or {}, in_place
        self.calls, self.written, self.stats = [], {}, {}

    def __call__(self, body, constants):
        if body in TENSOR_BODIES:
            kernel, _ = tensor_kernel(body, constants, self.edit.get(body, ()))
        else:
            kernel = self._portable(body, constants)

        def launch(**call):
            self.calls.append((body, call))
            sparse = SPARSE.get(body, ()) if ("SINGLE", True) not in constants else ()
            if body in TENSOR_BODIES:
                given = dict(constants).get("SHARED", 0)  # given at the launch, in addition to what the text declares
                call["tg_limit"] = given if body in LATENT_BODIES else CUDA_MEMORY + given
            writes = WRITES.get(body, ())
            if self.in_place:
                call, sparse = {"init_value": 0.0, "strict": False, **call}, ()
            out = kernel(**call, checked=self.checked, orders=self.orders, writes=writes, sparse=sparse)
            self.written, self.stats = kernel.written or self.written, kernel.stats
            if self.in_place:
                names = BODIES[body].inputs
                for name, given in zip(names, call["inputs"], strict=True):
                    if name in writes:
                        given[:] = to_mlx(kernel.written[name])
                return [to_mlx(x) for x in out]
            return out

        return launch

    def _portable(self, body, constants):
        header, source = kernel_build.kernel_source(body, "metal", constants)
        for old, new in self.edit.get(body, ()):
            _check_mutation(old, header + source)
            header, source = header.replace(old, new), source.replace(old, new)
        inputs, outputs = list(BODIES[body].inputs), list(BODIES[body].outputs)
        is_contiguous = "_strides[" not in source
        return emulator.metal_kernel(body, inputs, outputs, source, header, ensure_row_contiguous=is_contiguous)


@contextmanager
def emulated(backend="metal", **options):
    """Run kernels.* on the emulator as if on `backend`, without trials; yield the Emulated."""
    fake = Emulated(**options)
    real = kernel_build.build_kernel, kernels.backend, kernel_build.backend
    kernels.variants_of.cache_clear()
    kernel_build.build_kernel, kernels.backend, kernel_build.backend = fake, lambda: backend, lambda: backend
    try:
        yield fake
    finally:
        kernel_build.build_kernel, kernels.backend, kernel_build.backend = real
        kernels.variants_of.cache_clear()


# CUDA's words in the bodies for tensor cores, and the emulator's for them.
CUDA_WORDS = {
    "__shared__ __align__(16)": "threadgroup",
    "__shared__": "threadgroup",
    "__syncthreads()": "threadgroup_barrier(mem_flags::mem_threadgroup)",
    "__syncwarp()": "simdgroup_barrier(mem_flags::mem_device)",
    "blockIdx": "threadgroup_position_in_grid",
    "gridDim": "threadgroups_per_grid",
    "threadIdx": "thread_position_in_threadgroup",
}
CUDA_MEMORY = 48 * 1024  # bytes of shared memory that a text may declare


def _check_mutation(old, text):
    """Raise LookupError if there is nothing to mutate: an AssertionError would count as the mutation being detected."""
    if old not in text:
        raise LookupError(f"nothing to mutate: {old}")


def tensor_kernel(body, constants, edits, planted=None):
    """Return a body for tensor cores on the emulator, mutated by edits (old, new) of it or its helpers, and its
    outputs' names. With a set ``planted``, edits of other bodies are skipped, and the set gets those that were made."""
    _, source = kernel_build.kernel_source(body, "metal", constants)
    header = tensor_helpers(body)
    for old, new in edits:
        if planted is not None and old not in header + source:
            continue
        _check_mutation(old, header + source)
        if planted is not None:
            planted.add((old, new))
        source, header = source.replace(old, new), header.replace(old, new)
    for word, own in CUDA_WORDS.items():
        source = source.replace(word, own)
    inputs, outputs = list(BODIES[body].inputs), list(BODIES[body].outputs)
    return emulator.metal_kernel(body, inputs, outputs, source, header), outputs


def tensor_helpers(body):
    """Return the functions of a body for tensor cores: the emulator's own prelude, and those of the body's file."""
    here, prelude = Path(__file__).parent, kernel_text("draw_rows", "metal")[0]
    own = prelude.join((here / name).read_text() for name in ("tensor_cpu.hpp", "decode_cpu.hpp"))
    return own + resolved(text_of("prelude.metal"), BODIES[body].variants) + parts_of(body)[0]


def to_float(x):
    """Return the float32 NumPy values of an MLX array or an emulator output."""
    if isinstance(x, emulator.BF16):
        return emulator.from_bf16(x)
    if isinstance(x, mx.array):
        return np.array(x.astype(mx.float32))
    return np.asarray(x, np.float32)


def to_mlx(x):
    """Return the MLX array of an emulator output."""
    x_mlx = mx.array(np.asarray(x))
    return x_mlx.view(mx.bfloat16) if isinstance(x, emulator.BF16) else x_mlx


def attention64(q, keys, values, seen, scale, softcap=None, sink=-np.inf):
    """Return float64 attention of queries ``[n, dim]`` over keys and values ``[context, dim]``.

    Each query sees those in ``seen`` ``[n, context]``; its result is 0 if it sees none.
    """
    q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
    s = q @ keys.T * scale
    s = np.where(seen, softcap * np.tanh(s / softcap) if softcap else s, -np.inf)
    top = np.maximum(s.max(1, keepdims=True, initial=-np.inf), sink)
    top[np.isinf(top)] = 0.0
    p = np.exp(s - top)
    total = p.sum(1, keepdims=True) + np.exp(sink - top)
    return p @ values / np.where(total, total, 1.0)


class Case:
    """A pool with stale NaN in every unused slot, permuted blocks, and tables that are poisoned outside the window."""

    def __init__(
        self,
        contexts,
        *,
        starts=None,
        heads=(4, 2),
        head_dim=64,
        value_dim=None,
        block_size=16,
        q_len=1,
        dtype=mx.float32,
        seed=0,
        scale=None,
        softcap=None,
        sinks=False,
        max_blocks=None,
        pages=None,
    ):
        rng = np.random.default_rng(seed)
        value_dim = value_dim or head_dim
        self.n_q, self.n_kv = heads
        self.dtype, self.block_size, self.softcap = dtype, block_size, softcap
        self.pages = pages
        self.scale = scale or head_dim**-0.5
        batch = len(contexts)
        # Query j of a sequence sees one token more than query j - 1.
        self.ends = np.array([[max(c - q_len + 1 + j, 0) for j in range(q_len)] for c in contexts], np.int32)
        self.starts = np.array([[s] * q_len for s in (starts or [0] * batch)], np.int32)
        used = [-(-c // block_size) for c in contexts]
        self.max_blocks = max_blocks or max(1, *used)
        n_blocks = sum(used) + 4
        order = list(rng.permutation(np.arange(1, n_blocks)))
        self.tables = np.full((batch, self.max_blocks), 10**6, np.int32)  # following one is an out-of-bounds load
        k = np.full((n_blocks, self.n_kv, block_size, head_dim), np.nan, np.float32)
        v = np.full((n_blocks, self.n_kv, block_size, value_dim), np.nan, np.float32)
        self.q = mx.array(rng.standard_normal((batch, self.n_q, q_len, head_dim)).astype(np.float32)).astype(dtype)
        self.sinks = mx.array(rng.standard_normal(self.n_q).astype(np.float32)) if sinks else None
        rows, given = [], []
        for b, c in enumerate(contexts):
            kc, vc = (
                to_float(mx.array(rng.standard_normal((self.n_kv, c, d)).astype(np.float32)).astype(dtype))
                for d in (head_dim, value_dim)
            )
            given.append((kc, vc))
            rows.append(self._kept(kc, vc))
            for t in range(int(self.starts[b, 0]), c):
                if t == self.starts[b, 0] or t % block_size == 0:
                    self.tables[b, t // block_size] = order.pop()
                k[self.tables[b, t // block_size], :, t % block_size] = kc[:, t]
                v[self.tables[b, t // block_size], :, t % block_size] = vc[:, t]
        self._dense, self._given, self.rows = (k, v), given, rows
        self._fill()

    def _kept(self, *values):
        """Return keys and values as the pages hold them."""
        if self.pages is None:
            return values
        return tuple(dequantized(quantized(x, form), form) for x, form in zip(values, self.pages, strict=True))

    def _fill(self):
        """Make the pools from the dense ones."""
        if self.pages is None:
            self.k_pool, self.v_pool = (mx.array(x).astype(self.dtype) for x in self._dense)
            return
        self.k_pool, self.v_pool = map(unset_pages, self._dense, self.pages)

    def take_out_newest(self):
        """Return the keys and values of each sequence's newest token, for the call's `append`, and make its slot NaN
        again."""
        self._full = {"k_pool": to_float(self.k_pool), "v_pool": to_float(self.v_pool)}
        new = []
        for which, pool in enumerate(self._dense):
            new.append(mx.array(np.stack([row[which][:, -1:] for row in self._given])).astype(self.dtype))
            for b, end in enumerate(self.ends[:, 0]):
                pool[self.tables[b, (end - 1) // self.block_size], :, (end - 1) % self.block_size] = np.nan
        self._fill()
        return tuple(new)

    def is_full_again(self, written):
        """Return whether a launch has stored the tokens that were taken out, and nothing else."""
        return all(np.array_equal(to_float(written[name]), x, equal_nan=True) for name, x in self._full.items())

    def keys_and_values(self, b, head):
        """Return what a query head of a sequence attends to, ``[context, dim]`` each."""
        return (x[head // (self.n_q // self.n_kv)] for x in self.rows[b])

    def reference(self):
        """Return float64 attention over the dense rows."""
        q, heads = to_float(self.q), []
        for b, head in np.ndindex(*q.shape[:2]):
            keys, values = self.keys_and_values(b, head)
            position = np.arange(len(keys))
            seen = (position >= self.starts[b][:, None]) & (position < self.ends[b][:, None])
            sink = float(self.sinks[head]) if self.sinks is not None else -np.inf
            heads.append(attention64(q[b, head], keys, values, seen, self.scale, self.softcap, sink))
        return np.stack(heads).reshape(*q.shape[:3], -1)

    def variant(self, body=-1):
        """Return the variant of the portable body, or with 0 the fastest, with the partitions of 8 KV heads or more."""
        extras = {"softcap": self.softcap is not None, "sinks": self.sinks is not None}
        variants = decode_variants(self.k_pool, self.v_pool, self.n_q, pages=self.pages, **extras)
        return variants[body]._replace(groups=MOST_GROUPS)

    def run(self, fence=None, **options):
        """Return (out as float32 NumPy, fence) of paged_decode, with the portable body unless a variant is given."""
        options.setdefault("variant", self.variant())
        out, fence = paged_decode(
            self.q,
            self.k_pool,
            self.v_pool,
            fence if fence is not None else mx.array([7], mx.uint32),
            mx.array(self.tables),
            mx.array(self.ends),
            mx.array(self.starts),
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            pages=self.pages,
            **options,
        )
        return to_float(out), fence


MAX_THREADGROUP_BYTES = 32 * 1024  # Apple GPUs abort the process above this


def threadgroup_bytes(shape, gqa, value_dim):
    """Return the threadgroup memory of a group of a body by lanes, in bytes."""
    known = dict(shape.constants)
    return 4 * shape.simdgroups * (2 * -(-gqa // known.get("HS", 1)) + known["HR"] * value_dim)


DECODE_BODIES = {  # over dense and over quantised pages
    "portable": ("paged_decode", "quantized_decode"),
    "matrix": MATRIX_BODIES,
    "tensor": ("paged_decode_tensor", "quantized_decode_tensor"),
}


def launch(case, kind="portable", *, backend=None, cores=None, shape=(), edits=(), append=None, **options):
    """Run a decode body on the emulator; return (out as float32 NumPy, the Emulated).

    Args:
        kind: of DECODE_BODIES.
        cores: of the GPU, which determine the launch's shape.
        shape: changes of the launch's shape: fields, and constants in capitals.
        edits: mutations of the body.
        options: ``max_visible``, or arguments of :func:`emulated`.
    """
    body = DECODE_BODIES[kind][case.pages is not None]
    given = {"append": append, "max_visible": options.pop("max_visible", None)}
    options["edit"] = {**options.get("edit", {}), body: edits}
    with emulated(backend or ("cuda" if kind == "tensor" else "metal"), **options) as fake:
        variant = case.variant(0 if kind == "tensor" else -1)._replace(body=body)
        own = shape_for(variant, cores)
        changes = {name: value for name, value in dict(shape).items() if name.islower()}
        constants = {**dict(own.constants), **{name: value for name, value in dict(shape).items() if name.isupper()}}
        own = own._replace(**changes, constants=tuple(constants.items()))
        out, fence = case.run(variant=variant, launch_shape=own, **given)
    assert int(np.asarray(fence)[0]) == 8 and {name for name, _ in fake.calls} <= {body, "merge_partitions"}
    return out, fake


TOLERANCE = {mx.float32: 3e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}
KINDS = {  # of decode bodies, and what their cases have unless they say otherwise
    "portable": {"group_size": 32, "dtype": mx.float32},
    "matrix": {"group_size": 32, "dtype": mx.bfloat16, "heads": (8, 1)},
    "tensor": {"group_size": 64, "dtype": mx.float16},
}


def decode_case(contexts, bits=None, kind="portable", **options):
    """Return a case for a kind of body, over quantised pages unless ``bits`` is None."""
    options = {**KINDS[kind], **options}
    dim, value_dim, size = options.get("head_dim", 64), options.get("value_dim") or 0, options.pop("group_size")
    pages = bits and page_shape(dim, bits, size, options["dtype"], value_dim)
    return Case(contexts, pages=pages, **options)


def check_decode(case, kind="portable", **options):
    """Compare a launch's output, which is returned, with the reference."""
    if kind == "portable":  # short contexts are split, too; the bodies for matrices have single partitions
        options["shape"] = {"first": 0, **options.get("shape", {})}
    out, _ = launch(case, kind, **options)
    np.testing.assert_allclose(out, case.reference(), atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    return out
