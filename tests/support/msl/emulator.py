# ruff: noqa: E501, B905, SIM115, E741, B007
"""Run the body given to mx.fast.metal_kernel on the CPU: simdgroups, barriers and threadgroup memory, with checks. A
test that launches a kernel here is skipped unless the platform is Linux.

metal_kernel(...) has the call signature of mx.fast.metal_kernel, so the real launch code can be driven by it. Two more
arguments: `writes` names the inputs that the kernel stores to (found in `.written` afterwards), `sparse` names outputs
that may stay partly unwritten.
"""

import ctypes as C
import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile

import numpy as np
import pytest

from tests.support.msl.msl_source import _DECL, DT, dtype_name, mlx_source, strip_comments

HERE = os.path.dirname(os.path.abspath(__file__))
CACHE = os.environ.get("MSLEMU_CACHE", os.path.join(tempfile.gettempdir(), "mslemu-cache"))
CXX = "g++"


class EmuError(AssertionError):
    pass


class BF16(np.ndarray):
    """uint16 storage of bfloat16 values"""


def to_bf16(x):
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16).view(BF16)


def from_bf16(x):
    return (np.asarray(x).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def as_np(a):
    """Return (contiguous NumPy array, MLX dtype name)."""
    if isinstance(a, BF16):
        return np.ascontiguousarray(a.view(np.ndarray)), "bfloat16"
    if type(a).__module__.startswith("mlx"):
        import mlx.core as mx

        n = dtype_name(a.dtype)
        return (np.array(a.view(mx.uint16)), n) if n == "bfloat16" else (np.array(a), n)
    a = np.asarray(a)
    if a.dtype == np.float64:
        a = a.astype(np.float32)
    return (np.ascontiguousarray(a) if a.ndim else a), a.dtype.name


def memory_span(a):
    """Return a flat copy of the memory under a strided array, from its first element on."""
    span = 1 + sum((n - 1) * s // a.itemsize for n, s in zip(a.shape, a.strides, strict=True))
    return np.lib.stride_tricks.as_strided(a, (span,), (a.itemsize,)).copy()


def rewrite_threadgroup(s):
    """Turn ``threadgroup T a[N], b;`` into ``MSL_TG(T, a, [N]) MSL_TG(T, b, )``; other uses (pointers, parameters,
    casts) lose the keyword."""

    def decl(m):
        out = []
        for n, dims in re.findall(r"([A-Za-z_]\w*)((?:\s*\[[^\]]*\])*)", m.group(2)):
            out.append(f"typedef {m.group(1)} msl_tge_{n}; MSL_TG(msl_tge_{n}, {n}, {dims})")
        return " ".join(out) + "\n" * m.group(0).count("\n")

    s = _DECL.sub(decl, strip_comments(s))
    for m in re.finditer(r"\bthreadgroup\b[^;,()={}]*", s):
        if "*" not in m.group(0) and "&" not in m.group(0):
            raise EmuError("unsupported threadgroup declaration: " + m.group(0).strip())
    return re.sub(r"\bthreadgroup\b", " ", s)


@functools.cache
def _flags(checked):
    flags = ["-std=c++20", "-fPIC", "-shared", "-w", "-fsingle-precision-constant", "-fno-math-errno"]
    flags += ["-fvisibility=hidden", "-O1"]  # -O2 takes 30 % longer to compile, and the programs are no faster
    if "f16c" in open("/proc/cpuinfo").read():
        flags.append("-mf16c")
    if checked:
        flags += ["-g1", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]
    return flags


def _run(cmd):
    p = subprocess.run(cmd, capture_output=True, text=True)
    if p.returncode:
        raise EmuError("compile failed: " + " ".join(cmd[:3]) + "\n" + p.stderr[:4000])


@functools.cache
def _text(name):
    return open(f"{HERE}/{name}").read()


@functools.cache
def _precompiled(*flags):
    """Return a folder with the emulator's header precompiled by GCC for these flags."""
    key = hashlib.sha256((_text("msl_rt.hpp") + _text("msl_cpu.hpp") + repr(flags)).encode()).hexdigest()[:24]
    folder = f"{CACHE}/headers_{key}"
    os.makedirs(folder, exist_ok=True)
    header = f"{folder}/msl_cpu.hpp.gch"
    if not os.path.exists(header):
        own = f"{header}.{os.getpid()}"  # several test processes may be at it
        _run([CXX, *flags, "-x", "c++-header", f"{HERE}/msl_cpu.hpp", "-o", own])
        os.replace(own, header)
    return folder


def skip_unless_linux():
    """Skip the test that calls a compiler: the runtime reads ELF's list of libraries, the flags are GCC's and nvcc's."""
    if platform.system() != "Linux":
        pytest.skip("the emulator needs Linux", allow_module_level=True)


def _build(cpp, checked):
    skip_unless_linux()
    os.makedirs(CACHE, exist_ok=True)
    rts = _text("msl_rt.cpp") + _text("msl_rt.hpp")
    # All programs link to one runtime, so its state of a launch exists once.
    rt = f"{CACHE}/librt_{hashlib.sha256(rts.encode()).hexdigest()[:16]}.so"
    if not os.path.exists(rt):
        own = f"{rt}.{os.getpid()}"  # several test processes may be at it
        _run([CXX, "-std=c++17", "-O2", "-fPIC", "-shared", f"{HERE}/msl_rt.cpp", "-o", own, "-ldl"])
        os.replace(own, rt)
    fl = _flags(checked)
    h = hashlib.sha256((cpp + rts + _text("msl_cpu.hpp") + repr(fl)).encode()).hexdigest()[:24]
    so = f"{CACHE}/k_{h}.so"
    if not os.path.exists(so):
        own = f"{CACHE}/k_{h}.{os.getpid()}"
        open(own + ".cpp", "w").write(cpp)
        # The sanitizer's library is not linked: the runtime has its functions.
        include = ["-I" + _precompiled(*fl), "-I" + HERE]
        _run([CXX, *fl, "-nostdlib", *include, own + ".cpp", "-o", own + ".so", rt, "-lm", "-lc"])
        os.replace(own + ".so", so)
        os.unlink(own + ".cpp")
    return so


class U3(C.Structure):
    _fields_ = [("x", C.c_uint), ("y", C.c_uint), ("z", C.c_uint)]


class Buf(C.Structure):
    _fields_ = [
        ("ptr", C.c_void_p),
        ("bytes", C.c_size_t),
        ("writable", C.c_int),
        ("elem", C.c_int),
        ("name", C.c_char_p),
        ("init", C.c_int),
    ]


class Launch(C.Structure):
    _fields_ = [
        ("grid", U3),
        ("tg", U3),
        ("bufs", C.POINTER(Buf)),
        ("nbufs", C.c_int),
        ("order", C.c_int),
        ("strict", C.c_int),
        ("tg_limit", C.c_size_t),
        ("msg", C.c_char_p),
        ("msg_cap", C.c_size_t),
    ] + [(n, C.c_uint64) for n in ("n_switch", "n_simd", "n_barrier", "tg_bytes", "n_hooks")]


def _symbolize(so, msg):
    def sub(m):
        pc = int(m.group(1), 16) - 1
        try:
            o = subprocess.run(["addr2line", "-i", "-e", so, hex(pc)], capture_output=True, text=True).stdout.split(
                "\n"
            )
        except OSError:
            return m.group(0)
        for l in o:
            if "<kernel" in l:
                return "at " + l.split("/")[-1].split(" (disc")[0]
        return "at " + o[0]

    return re.sub(r"@pc=(0x[0-9a-f]+)", sub, msg)


class Kernel:
    """A kernel's body on the emulator; its arguments are those of mx.fast.metal_kernel."""

    def __init__(self, name, input_names, output_names, source, header="", ensure_row_contiguous=True):
        self.name, self.source, self.header = name, source, header
        self.inn, self.outn = list(input_names), list(output_names)
        self.contig = ensure_row_contiguous
        self.stats = {}

    def cpp(self, arrs, template, out_dts):
        ins = [(a.ndim, a.size, d) for a, d in arrs]
        body = '\n#line 1 "<kernel body>"\n' + rewrite_threadgroup(self.source)
        hdr = '#line 1 "<kernel header>"\n' + rewrite_threadgroup(self.header) + "\n" if self.header else ""
        text, params, targs = mlx_source("msl_kernel_fn", hdr, body, self.inn, ins, self.outn, out_dts, template)
        call, k = [], 0
        for kind, n, ty in params:
            if kind == "attr":
                call.append(f"U(t.{n})" if ty == "uint3" else f"t.{n}")
            else:
                c = "" if kind == "out" else "const "
                call.append(f"*({c}{ty}*)b[{k}]" if kind in ("in0", "ndim") else f"({c}{ty}*)b[{k}]")
                k += 1
        ta = "<" + ", ".join(targs) + ">" if targs else ""
        return (
            '#include "msl_cpu.hpp"\n'
            + text
            + '\n#line 1 "<entry>"\nMSL_NOSAN static void msl_e(void** b, const msl_rt::Builtins& t) {\n  auto U = [](msl_rt::U3 v) { return uint3(v.x, v.y, v.z); };\n'
            f"  msl_kernel_fn{ta}({', '.join(call)});\n}}\n"
            'extern "C" int msl_run(msl_rt::Entry, msl_rt::Launch*, int);\n'
            f'extern "C" __attribute__((visibility("default"))) int msl_go(msl_rt::Launch* l, int hooks) {{ return msl_run(msl_e, l, hooks); }}\n'
        ), params

    def __call__(
        self,
        *,
        inputs,
        output_shapes,
        output_dtypes,
        grid,
        threadgroup,
        template=None,
        init_value=None,
        checked=False,
        orders=(0,),
        strict=True,
        tg_limit=32768,
        writes=(),
        sparse=(),
    ):
        arrs = self._arrays(inputs)
        odt = [dtype_name(d) for d in output_dtypes]
        template = [(n, v if isinstance(v, (bool, int)) else dtype_name(v)) for n, v in template or []]
        cpp, params = self.cpp(arrs, template, odt)
        so = _build(cpp, checked)
        lib = C.CDLL(so)
        by = dict(zip(self.inn, arrs))
        outputs = {n: (shape, d) for n, shape, d in zip(self.outn, output_shapes, odt)}
        outs_all = []
        written_all = []
        for order in orders:
            outs, self.written = {}, {}
            bufs, keep = [], []
            for kind, n, ty in params:
                if kind == "attr":
                    continue
                if kind == "out":
                    a = outs[n] = _output(*outputs[n], init_value, n in sparse)
                    elem = a.itemsize
                else:
                    a, elem = _argument(kind, by[n][0], n in writes)
                    if kind in ("in", "in0") and n in writes:
                        self.written[n] = a
                keep.append(a)
                stored = kind == "out" or (kind == "in" and n in writes)
                known = stored and (kind == "in" or init_value is not None or n in sparse)
                label = n if kind in ("in", "in0", "out") else f"{n}_{kind}"
                bufs.append(Buf(a.ctypes.data, a.nbytes, stored, elem, label.encode(), known))
            msg = C.create_string_buffer(1 << 16)
            L = Launch(
                U3(*grid),
                U3(*[min(a, b) for a, b in zip(threadgroup, grid)]),
                (Buf * len(bufs))(*bufs),
                len(bufs),
                order,
                int(strict),
                tg_limit,
                C.cast(msg, C.c_char_p),
                len(msg),
            )
            rc = lib.msl_go(C.byref(L), int(checked))
            self.stats = {k: getattr(L, k) for k in ("n_switch", "n_simd", "n_barrier", "tg_bytes", "n_hooks")}
            if rc:
                raise EmuError(f"[{self.name}, order {order}]\n" + _symbolize(so, msg.value.decode()))
            outs_all.append({n: a.view(BF16) if outputs[n][1] == "bfloat16" else a for n, a in outs.items()})
            self.written = {n: a.view(BF16) if by[n][1] == "bfloat16" else a for n, a in self.written.items()}
            written_all.append(self.written)
        self._same_in_every_order("output {}", outs_all, orders)
        self._same_in_every_order("input {} as written", written_all, orders)
        return [outs_all[0][n] for n in self.outn]

    def _arrays(self, inputs):
        """Return the inputs as NumPy arrays with the names of their types, contiguous if the kernel requires it."""
        arrs = [as_np(a) for a in inputs]
        if self.contig:
            return [(np.ascontiguousarray(a) if a.ndim else a, d) for a, d in arrs]
        return [
            (a, d) if not isinstance(raw, np.ndarray) else (raw.view(np.ndarray), d)
            for raw, (a, d) in zip(inputs, arrs, strict=True)
        ]

    def _same_in_every_order(self, what, runs, orders):
        for later, order in zip(runs[1:], orders[1:]):
            for n, a in runs[0].items():
                if a.tobytes() != later[n].tobytes():
                    raise EmuError(
                        f"[{self.name}] {what.format(n)} depends on the order in which threads run "
                        f"(order {orders[0]} vs {order})"
                    )


def _argument(kind, a, written):
    """Return the array that a kernel gets for an input, its shape, strides or ndim, and the bytes of an element."""
    if kind == "shape":
        return np.array(a.shape, np.int32), 4
    if kind == "strides":
        return np.array([s // a.itemsize for s in a.strides], np.int64), 8
    if kind == "ndim":
        return np.array(a.ndim, np.int32), 4
    if written:
        return a.copy(), a.itemsize
    return memory_span(a) if a.ndim and not a.flags.c_contiguous else a, a.itemsize


def _output(shape, dtype, init_value, sparse):
    """Return a kernel's output before it runs: filled with `init_value`, with 1 bits if `sparse`, or uninitialised."""
    a = np.empty(shape, DT[dtype][1])
    if init_value is not None:
        # Converted as by MLX: NaN becomes 0 in integers.
        value = 0 if np.isnan(init_value) and a.dtype.kind in "iu" else init_value
        a[...] = to_bf16(np.float32(init_value)) if dtype == "bfloat16" else value
    if sparse:
        a.view(np.uint8).fill(0xFF)
    return a


metal_kernel = Kernel
