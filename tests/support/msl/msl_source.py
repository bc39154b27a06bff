# ruff: noqa: B905
"""The MSL function that MLX makes of a kernel's body, with the parameters that it derives from the body's text."""

import re

import numpy as np

# name -> (MSL type as MLX's get_type_string spells it, numpy storage)
DT = {
    "float32": ("float", np.float32),
    "float16": ("float16_t", np.float16),
    "bfloat16": ("bfloat16_t", np.uint16),
    "bool": ("bool", np.bool_),
    "int8": ("int8_t", np.int8),
    "int16": ("int16_t", np.int16),
    "int32": ("int32_t", np.int32),
    "int64": ("int64_t", np.int64),
    "uint8": ("uint8_t", np.uint8),
    "uint16": ("uint16_t", np.uint16),
    "uint32": ("uint32_t", np.uint32),
    "uint64": ("uint64_t", np.uint64),
}
ATTRS = [
    ("dispatch_quadgroups_per_threadgroup", "uint"),
    ("dispatch_simdgroups_per_threadgroup", "uint"),
    ("dispatch_threads_per_threadgroup", "uint3"),
    ("grid_origin", "uint3"),
    ("grid_size", "uint3"),
    ("quadgroup_index_in_threadgroup", "uint"),
    ("quadgroups_per_threadgroup", "uint"),
    ("simdgroup_index_in_threadgroup", "uint"),
    ("simdgroups_per_threadgroup", "uint"),
    ("thread_execution_width", "uint"),
    ("thread_index_in_quadgroup", "uint"),
    ("thread_index_in_simdgroup", "uint"),
    ("thread_index_in_threadgroup", "uint"),
    ("thread_position_in_grid", "uint3"),
    ("thread_position_in_threadgroup", "uint3"),
    ("threadgroup_position_in_grid", "uint3"),
    ("threadgroups_per_grid", "uint3"),
    ("threads_per_grid", "uint3"),
    ("threads_per_simdgroup", "uint"),
    ("threads_per_threadgroup", "uint3"),
]


def dtype_name(d):
    s = str(d).replace("mlx.core.", "")
    if s in DT:
        return s
    return np.dtype(d).name


def mlx_source(fname, header, source, in_names, ins, out_names, out_dtypes, template):
    """Return (text, params, targs), as write_signature() in mlx/backend/common/metal_kernel.cpp makes them.

    ``ins``: [(ndim, size, dtype name)].
    """
    t, params = header, []
    if template:
        kinds = [
            ("bool" if isinstance(v, bool) else "int" if isinstance(v, int) else "typename", n) for n, v in template
        ]
        t += "template <" + ", ".join(f"{k} {n}" for k, n in kinds) + ">\n"
    t += f"[[kernel]] void {fname}(\n"
    i = 0
    for n, (ndim, size, dt) in zip(in_names, ins):
        loc, ref, ty = ("constant" if size < 8 else "device"), ("&" if ndim == 0 else "*"), DT[dt][0]
        t += f"  const {loc} {ty}{ref} {n} [[buffer({i})]],\n"
        i += 1
        params.append(("in0" if ndim == 0 else "in", n, ty))
        if ndim:
            if n + "_shape" in source:
                t += f"  const constant int* {n}_shape [[buffer({i})]],\n"
                i += 1
                params.append(("shape", n, "int"))
            if n + "_strides" in source:
                t += f"  const constant int64_t* {n}_strides [[buffer({i})]],\n"
                i += 1
                params.append(("strides", n, "int64_t"))
            if n + "_ndim" in source:
                t += f"  const constant int& {n}_ndim [[buffer({i})]],\n"
                i += 1
                params.append(("ndim", n, "int"))
    attrs = [(a, ty) for a, ty in ATTRS if a in source]
    outs = []
    for n, dt in zip(out_names, out_dtypes):
        ty = DT[dt][0]
        outs.append(f"  device {ty}* {n} [[buffer({i})]]")
        i += 1
        params.append(("out", n, ty))
    outs += [f"  {ty} {a} [[{a}]]" for a, ty in attrs]
    t += ",\n".join(outs) + ") {\n" + source + "\n}\n"
    params += [("attr", a, ty) for a, ty in attrs]
    targs = [
        ("true" if v is True else "false" if v is False else str(v) if isinstance(v, int) else DT[dtype_name(v)][0])
        for _, v in template or []
    ]
    return t, params, targs


def strip_comments(s):
    def keep_nl(m):
        return re.sub(r"[^\n]", " ", m.group(0))

    return re.sub(r"//[^\n]*|/\*.*?\*/", keep_nl, s, flags=re.S)


_DECL = re.compile(
    r"\bthreadgroup\s+((?:const\s+)?[A-Za-z_][\w:]*(?:\s*<[^;<>]*>)?)\s+([A-Za-z_]\w*(?:\s*\[[^\];]*\])*(?:\s*,\s*[A-Za-z_]\w*(?:\s*\[[^\];]*\])*)*)\s*;"
)
