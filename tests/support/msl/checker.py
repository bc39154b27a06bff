# ruff: noqa: E501, E741, UP031, B007, RUF059
"""Type-check MSL text as MLX would generate it, with stock libclang: address spaces, narrowing, names MSL lacks."""

import os
import re

import clang.cindex as ci

from tests.support.msl.msl_source import _DECL, ATTRS, mlx_source, strip_comments

ci.Index.create()  # loads the library now, by the platform's name

HERE = os.path.dirname(os.path.abspath(__file__))
CK, TK = ci.CursorKind, ci.TypeKind
BANNED = {  # beside the words that msl_check.hpp makes undeclared names
    CK.LAMBDA_EXPR: "lambda expression",
    CK.CXX_NEW_EXPR: "new",
    CK.CXX_DELETE_EXPR: "delete",
}
ARGS = [
    "-x",
    "c++",
    "-std=c++14",
    "-nostdinc",
    "-nostdinc++",
    "-ferror-limit=0",
    "-Wno-unknown-attributes",
    "-Wno-ignored-attributes",
    "-Wno-c++17-extensions",
    "-Wno-undefined-internal",
    "-Wno-undefined-inline",
    "-Wno-undefined-var-template",
    "-Werror=implicit-float-conversion",
    "-Werror=return-type",
    "-Werror=uninitialized",
    "-Werror=sometimes-uninitialized",
    "-Werror=implicit-int-conversion",
    "-Werror=shorten-64-to-32",
    "-Werror=sign-compare",
    "-Werror=vla",
    "-Werror=array-bounds",
    "-Xclang",
    "-cl-single-precision-constant",
    "-I" + HERE,
]


def prepare(s):
    s = strip_comments(s)
    return _DECL.sub(lambda m: "static " + m.group(0), s)  # clang: automatic variables cannot have an address space


def lint_tokens(s, where):
    out = []
    for i, l in enumerate(s.split("\n"), 1):
        if not l.isascii():
            out.append(
                f"{where}:{i}: lint: non-ASCII character (MLX passes the source to Metal as NSASCIIStringEncoding)"
            )
    for i, l in enumerate(strip_comments(s).split("\n"), 1):
        for pat, why in (
            (r"\bstatic\b(?!_cast|_assert)(?!\s+constexpr)", "static local/global variable"),
            (r"#\s*include\s*[<\"](?!metal)", "#include of a non-Metal header"),
            (r"\bstd::", "std:: (Metal has metal::)"),
            (r"\b\d+\.\d*(e[+-]?\d+)?(?![\w.])", "unsuffixed floating literal (double in CUDA, float in MSL)"),
        ):
            if re.search(pat, l):
                out.append(f"{where}:{i}: lint: {why}: {l.strip()[:80]}")
    return out


def lint_names(ins, outs, source, header):
    """Check names: MLX adds extra parameters by substring search in the body (comments included, header excluded)."""
    out, code = [], strip_comments(source)
    for n in ins:
        for suf in ("_shape", "_strides", "_ndim"):
            if n + suf in source and not re.search(rf"\b{n}{suf}\b", code):
                out.append(
                    f"body: lint: '{n}{suf}' occurs only inside another identifier or a comment: MLX adds an unused buffer for it"
                )
    for a, _ in ATTRS:
        if re.search(rf"\b{a}\b", strip_comments(header)) and not re.search(rf"\b{a}\b", code):
            out.append(
                f"header: lint: {a} is used in the header only: MLX scans the body only, so it will be undeclared"
            )
        if (
            a in source
            and not re.search(rf"\b{a}\b", code)
            and not any(a in b and b != a and re.search(rf"\b{b}\b", code) for b, _ in ATTRS)
        ):
            out.append(f"body: lint: attribute {a} occurs only inside another identifier or a comment")
    nb = len(ins) + len(outs) + sum(n + s in source for n in ins for s in ("_shape", "_strides", "_ndim"))
    if nb > 31:
        out.append(f"body: lint: {nb} buffers, Metal allows 31")
    return out


def line_map(text):
    """Return (file, line) by physical line, honouring #line."""
    m, f, n = {}, "<unit>", 0
    for i, l in enumerate(text.split("\n"), 1):
        d = re.match(r'#line (\d+) "(.*)"', l)
        if d:
            f, n = d.group(2), int(d.group(1)) - 1
        else:
            n += 1
        m[i] = (f, n)
    return m


DECLARED = (CK.VAR_DECL, CK.PARM_DECL, CK.FIELD_DECL, CK.TYPEDEF_DECL, CK.TYPE_ALIAS_DECL)
LOOKED_AT = {kind.value for kind in (*BANNED, *DECLARED)}


def _cursors(tu):
    """Return (cursor, its parent) of the kinds that are checked, in the unit itself. In one visit by libclang: a text
    has some ten thousand cursors, and asking each for its file takes longer than parsing."""
    found, outermost = [], CK.TRANSLATION_UNIT.value

    def visit(k, parent, _):
        k._tu = parent._tu = tu
        if parent._kind_id == outermost and not (k.location.file and k.location.file.name == "/msl/unit.cpp"):
            return 1  # go to the next cursor
        if k._kind_id in LOOKED_AT:
            found.append((k, parent))
        return 2  # descend into this one

    ci.conf.lib.clang_visitChildren(tu.cursor, ci.callbacks["cursor_visit"](visit), None)
    return found


def _walk(tu, out, lm, text):
    for k, c in _cursors(tu):
        loc = "%s:%d" % lm[k.location.line]
        if k.kind == CK.VAR_DECL and c.kind in (CK.TRANSLATION_UNIT, CK.NAMESPACE) and k.type.get_address_space() != 2:
            out.append(f"{loc}: program-scope variable '{k.spelling}' must be in the constant address space")
        if k.kind in BANNED:
            out.append(f"{loc}: {BANNED[k.kind]} is not available in MSL")
        if k.kind in DECLARED:
            t = k.type if k.kind not in (CK.TYPEDEF_DECL, CK.TYPE_ALIAS_DECL) else k.underlying_typedef_type
            if t.kind in (TK.POINTER, TK.LVALUEREFERENCE, TK.RVALUEREFERENCE):
                p = t.get_pointee()
                st = k.extent.start.offset  # leading attribute macros are not part of a cursor's extent
                lead = text[max(text.rfind(c, 0, st) for c in ";{}(,<") + 1 : st]
                lead += " ".join(x.spelling for x in k.get_tokens())
                lead = re.split(r"[={(]", lead)[0]
                if p.kind == TK.FUNCTIONPROTO:
                    out.append(f"{loc}: function pointer '{k.spelling}'")
                elif p.get_address_space() == 0 and not re.search(r"\b(thread|auto)\b", lead):
                    out.append(
                        f"{loc}: pointer/reference '{k.spelling}' needs an explicit address space (device, constant, threadgroup or thread)"
                    )


def check_text(text, unit="<unit>"):
    """Return the problems of one translation unit of generated MSL."""
    text = '#include "msl_check.hpp"\n' + text
    lm = line_map(text)
    tu = ci.Index.create().parse("/msl/unit.cpp", args=ARGS, unsaved_files=[("/msl/unit.cpp", text)])
    out = []
    for d in tu.diagnostics:
        if d.severity >= ci.Diagnostic.Error:
            n = d.location.file.name if d.location.file else "?"
            loc = "%s:%d" % lm[d.location.line] if n == "/msl/unit.cpp" else f"{os.path.basename(n)}:{d.location.line}"
            out.append(f"{loc}: {d.spelling}")
    _walk(tu, out, lm, text)
    return list(dict.fromkeys(out))


def check_kernel(input_names, output_names, source, header="", variants=()):
    """Return a kernel's problems. ``variants``: [(inputs [(ndim, size, dtype)], output dtypes, template [(name,
    value)])], one generated function each."""
    out = (
        lint_tokens(source, "body")
        + lint_tokens(header, "header")
        + lint_names(input_names, output_names, source, header)
    )
    for n, (ins, odt, tmpl) in enumerate(variants):
        h = '\n#line 1 "<kernel header>"\n' + prepare(header) + '\n#line 1 "<entry>"\n'
        text, params, targs = mlx_source(
            "custom_kernel_x",
            h,
            '\n#line 1 "<kernel body>"\n' + prepare(source),
            input_names,
            ins,
            output_names,
            odt,
            tmpl,
        )
        if targs:
            f = f"custom_kernel_x<{', '.join(targs)}>"
            text += f"\ntemplate decltype({f}) {f};\n"
        for e in check_text(text):
            if e not in out:
                out.append(e)
    return out
