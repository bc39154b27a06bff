# ruff: noqa: E501
"""latent_prefill_tensor's text on the emulator: against float64, row independence, and planted defects."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import latent_prompts as prompts
from mlx_paged.kernels import ops
from mlx_paged.kernels.check import self_check
from mlx_paged.kernels.latent_prompts import ROPE, prepare_prompts, prompt_constants_of, prompt_shape_for
from mlx_paged.kernels.launch_shape import BLOCK_SIZES
from mlx_paged.kernels.prefill import PrefillShape
from mlx_paged.kernels.trial import KernelKey, launch_alone
from tests.support.cases import quick
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import to_float
from tests.support.msl.prefill_harness import emulated_launches

TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 2e-2}
RAGGED = [5, 40, 1, 130], [0, 30, 64, 3]
CUTS = [PrefillShape(4, 1, 32, 1, False, 2), PrefillShape(2, 2, 64, 1, True, 1), PrefillShape(1, 2, 64, 2, True, 1)]
CLASSES = {
    "bf16": {},
    "DeepSeek": {"dims": (128, 128), "heads": 1, "dtype": mx.float16},
    "GLM": {"dims": (192, 256), "heads": 1, "block_size": 32},
    "block 8": {"block_size": 8, "heads": 3},
    "block 128": {"block_size": 128, "dtype": mx.float16},
}


def emulated(edit=(), orders=(0, 2), checked=True):
    """Run the kernel on the emulator as if on CUDA, without trials. ``edit`` plants mutations."""
    return emulated_launches(prompts, prompts.prompt_variant_of, edit, orders, checked)


class Prompts:
    """New tokens of several sequences. Unseen slots are NaN, blocks are permuted, and unseen entries of the tables
    point outside the arrays."""

    def __init__(self, counts, prefixes, *, heads=2, dims=(64, 64), block_size=16, dtype=mx.bfloat16, seed=0):
        rng = np.random.default_rng(seed)
        self.counts, self.lengths = list(counts), [n + p for n, p in zip(counts, prefixes, strict=True)]
        self.dtype, self.block_size, self.dims = dtype, block_size, dims
        head_dim = dims[0] + ROPE
        self.head_dim, self.scale = head_dim, head_dim**-0.5
        used = [-(-n // block_size) for n in self.lengths]
        order = list(rng.permutation(sum(used)))
        self.tables = np.full((len(counts), max(used)), 10**6, np.int32)
        slots = sum(used) * block_size

        def rows(*shape):
            return to_float(mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype))

        pools = [
            np.full((1, n, slots, dim), np.nan, np.float32)
            for n, dim in ((heads, dims[0]), (heads, dims[1]), (1, ROPE))
        ]
        self.q = mx.array(rows(sum(counts), heads, 1, head_dim)).astype(dtype)
        self.rows = []
        for s, length in enumerate(self.lengths):
            self.rows.append([rows(n, length, dim) for n, dim in ((heads, dims[0]), (heads, dims[1]), (1, ROPE))])
            for t in range(length):
                if t % block_size == 0:
                    self.tables[s, t // block_size] = order.pop()
                slot = self.tables[s, t // block_size] * block_size + t % block_size
                for pool, row in zip(pools, self.rows[-1], strict=True):
                    pool[0, :, slot] = row[:, t]
        self.arrays = [mx.array(pool).astype(dtype) for pool in pools]

    def alone(self, s):
        """Return the pack of one of its sequences."""
        pack = object.__new__(type(self))
        pack.__dict__.update(self.__dict__)
        first = sum(self.counts[:s])
        pack.counts, pack.lengths = [self.counts[s]], [self.lengths[s]]
        pack.tables, pack.rows = self.tables[s : s + 1], [self.rows[s]]
        pack.q = self.q[first : first + self.counts[s]]
        return pack

    def reference(self):
        """Return float64 attention over the dense rows."""
        q = to_float(self.q).astype(np.float64)
        out = np.zeros((*q.shape[:3], self.dims[1]))
        token = 0
        for count, length, (keys, values, rotated) in zip(self.counts, self.lengths, self.rows, strict=True):
            for own in range(length - count, length):
                for h in range(q.shape[1]):
                    k = np.concatenate([keys[h, : own + 1], rotated[0, : own + 1]], axis=1).astype(np.float64)
                    s = k @ q[token, h, 0] * self.scale
                    p = np.exp(s - s.max())
                    out[token, h, 0] = p @ values[h, : own + 1].astype(np.float64) / p.sum()
                token += 1
        return out

    def prepare(self, **options):
        """Return the launch for this pack."""
        variant = prompts.prompt_variant_of(self.dtype, self.head_dim, self.dims[1], ROPE, self.block_size)
        return prepare_prompts(
            mx.array(self.tables), self.counts, self.lengths, variant=variant, scale=self.scale, **options
        )

    def run(self, **options):
        """Launch, and return the result in float32."""
        return to_float(self.prepare(**options)(self.q, *self.arrays))


def check(pack, edit=(), orders=(0, 2), **options):
    with emulated(edit, orders):
        out = pack.run(**options)
    np.testing.assert_allclose(out, pack.reference(), atol=TOLERANCE[pack.dtype], rtol=TOLERANCE[pack.dtype])


@pytest.mark.parametrize("name", quick(list(CLASSES), "bf16", "block 8"))
def test_matches_reference(name):
    check(Prompts(*RAGGED, **CLASSES[name]), orders=(2,))


@pytest.mark.parametrize("cut", quick(CUTS, CUTS[0], CUTS[2], single=True), ids=str)
def test_every_launch_shape_matches_reference(cut):
    check(Prompts([5, 40, 1], [0, 30, 64], heads=3, dtype=mx.float16), launch_shape=cut)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 256)])
def test_sweep(dims, dtype):
    for block_size in BLOCK_SIZES:
        check(Prompts([3, 70], [99, 0], dims=dims, heads=1, block_size=block_size, dtype=dtype), orders=(0,))


def test_bits_do_not_depend_on_the_pack():
    pack = Prompts([90, 1, 33], [10, 200, 64], dtype=mx.float16)
    with emulated(checked=False, orders=(0,)):
        together, first = pack.run(), 0
        for s, count in enumerate(pack.counts):
            assert pack.alone(s).run().tobytes() == together[first : first + count].tobytes()
            first += count


def test_inconsistent_arguments_are_refused():
    pack = Prompts([5, 6], [0, 3])
    with emulated():
        for change, why in [
            ({"tables": pack.tables[:1]}, "differ in number: 1, 2, 2"),
            ({"tables": pack.tables.astype(np.int64)}, "tables must be int32"),
            ({"counts": [5, 0]}, "0 new tokens"),
            ({"counts": [6, 6]}, "6 new tokens of a sequence of 5"),
            ({"lengths": [5, 900]}, "do not fit a table"),
            ({"scale": 0.0}, "scale must be positive, got 0.0"),
            ({"dtype": mx.float32}, "float32"),
            ({"head_dim": 320}, "head_dim"),
        ]:
            wrong = pack.alone(0)
            wrong.__dict__.update(pack.__dict__ | change)
            with pytest.raises(ValueError, match=why):
                wrong.prepare()
        with pytest.raises(ValueError, match="64 rotated values, got 32"):
            prompts.prompt_variant_of(mx.float16, 96, 64, 32, 16)


def test_kernel_needs_cuda_and_is_not_launched_while_off(monkeypatch):
    assert prompts.prompt_variant_of(mx.float16, 128, 64, ROPE, 16) is None
    pack = Prompts([5], [0])
    with emulated():
        variant = prompts.prompt_variant_of(mx.bfloat16, 128, 64, ROPE, 16)
        monkeypatch.setattr(ops, "_switched_off", {variant: "it was wrong"})
        with pytest.raises(prompts.NoKernelError, match="it was wrong"):
            pack.prepare()


def test_trial_launches_the_text():
    with emulated():
        variant = prompts.prompt_variant_of(mx.float16, 192, 128, ROPE, 16)
        key = KernelKey(prompts.BODY, prompt_constants_of(variant, prompt_shape_for(192, 128)))
        with pytest.raises(EmuError, match=r"output out: .* never written"):
            launch_alone(key, prompts.build_kernel)


def test_self_check_passes_and_finds_a_defect(monkeypatch):
    real = prompts.PromptLaunch.__call__
    in_mlx = lambda launch, q, *arrays: mx.array(to_float(real(launch, q, *arrays))).astype(q.dtype)  # noqa: E731
    monkeypatch.setattr(prompts.PromptLaunch, "__call__", in_mlx)
    with emulated(orders=(0,)):
        variant = prompts.prompt_variant_of(mx.float16, 128, 64, ROPE, 16)
        result = self_check(variant)
        assert result.ok and result.rms < 1e-3
    with emulated([("token > own ||", "token > own + 1 ||")], orders=(0,)):
        assert not self_check(variant).ok


def test_shared_memory_holds_thread_groups():
    for head_dim, value_dim in ((128, 128), (192, 128), (256, 256)):
        cut = prompt_shape_for(head_dim, value_dim)
        size = cut.shared_bytes(head_dim, value_dim)
        assert size <= 99 << 10, "one group must fit where there is least (a 4090)"
        assert (size + 1024) * cut.groups <= 227 << 10, "all groups must fit on an H100's core"


CAUGHT = {  # old, new, what the emulator says
    "no barriers": ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race"),
    "block past the context": ("(hi - 1) / BS)];", "(hi - 1) / BS + 1)];", "out-of-bounds|wild"),
    "fence not passed on": ("fence_out[0] = fence[0] + 1u;", "", "never written"),
    "rows past the last token": ("if (row < n_tokens * G) {", "{", "race|out-of-bounds"),
    "keys of too many values": ("load(Number<D - DR>(), Number<0>()", "load(Number<D>(), Number<0>()", "out-of-bounds|race"),
    "heads and tiles exchanged": ("TILES_FIRST ? unit / n_tiles", "TILES_FIRST ? unit % n_tiles", "out-of-bounds|race|never written"),
}  # fmt: skip


@pytest.mark.parametrize("name", quick(list(CAUGHT), "no barriers", "heads and tiles exchanged"))
def test_emulator_catches_planted_defects(name):
    old, new, want = CAUGHT[name]
    pack = Prompts([30, 90], [70, 40], block_size=8, heads=2)
    with emulated([(old, new)]), pytest.raises(EmuError, match=want):
        pack.run()


WRONG = {  # the numbers come out wrong
    "keys of another head": ("k_pool + head_slot * (D - DR)", "k_pool"),
    "values of another head": ("v_pool + head_slot * DV", "v_pool"),
    "rotated part is not read": ("load(Number<DR>(), Number<D - DR>(), Number<KW>(), rotated", "if (false) load(Number<DR>(), Number<D - DR>(), Number<KW>(), rotated"),
    "rotated part is elsewhere": ("load(Number<DR>(), Number<D - DR>()", "load(Number<DR>(), Number<0>()"),
    "a token sees the next": ("token > own ||", "token > own + 1 ||"),
    "dead tokens are read": ("- lo) < static_cast<uint>(hi - lo);", "- lo) < 1u << 31;"),
    "block of another part": ("token / BS % BLOCKS", "(token / BS + 1) % BLOCKS"),
    "another table": ("static_cast<int64_t>(tile[0])", "static_cast<int64_t>(0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", quick(list(WRONG), "keys of another head"))
def test_defects_that_change_numbers_are_seen(name):
    pack = Prompts([30, 70], [50, 45], block_size=8, heads=2, dtype=mx.float16)
    pack.scale = 0.3
    try:
        with emulated([WRONG[name]], orders=(0,)):
            out = pack.run()
    except EmuError:
        return
    assert not np.allclose(out, pack.reference(), atol=4e-3)
