"""scripts/dump_kernels.py writes the texts that MLX would compile; scripts/support/compile_metal.py compiles them.
libclang stands in for Apple's compiler, and a fake xcrun for its command."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlx_paged.cli.doctor_kernels import POPULAR
from mlx_paged.kernels.bodies import BODIES
from mlx_paged.kernels.launch_shape import DTYPES
from tests.support.cases import slow
from tests.support.processes import commands

checker: Any = pytest.importorskip("tests.support.msl.checker")

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{Path(name).name}_under_test", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve types by this entry
    spec.loader.exec_module(module)
    return module


dump_kernels = _load("dump_kernels")
compile_metal = _load("support/compile_metal")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the script for the shapes of popular models; return the folder of texts."""
    folder = tmp_path_factory.mktemp("metal")
    ended = commands.run(SCRIPTS / "dump_kernels.py", folder)
    assert ended.returncode == 0, ended.stderr
    return folder


def warnings_of(text: str) -> list[str]:
    """Return clang's diagnostics of a text with -Wall; the checker's header replaces MLX's preamble."""
    clang = checker.ci
    text = text.replace(dump_kernels.PREAMBLE, '#include "msl_check.hpp"\n', 1)
    unit = clang.Index.create().parse(
        "/msl/unit.cpp",
        args=[*checker.ARGS, "-Wall", "-Wno-unused-local-typedef"],
        unsaved_files=[("/msl/unit.cpp", checker.prepare(text))],
    )
    return [d.spelling for d in unit.diagnostics if d.severity >= clang.Diagnostic.Warning]


@pytest.mark.parametrize("per_body", [1, *slow(1000)])
def test_every_text_compiles_without_a_warning(folder: Path, per_body: int) -> None:
    bodies: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*.metal")):
        bodies.setdefault(file.name.partition("-")[0], []).append(file)
    assert sum(map(len, bodies.values())) > 100
    files = [file for found in bodies.values() for file in found[:per_body]]
    include = Path((folder / dump_kernels.INCLUDE).read_text().strip())
    assert (include / "mlx/backend/metal/kernels/utils.h").is_file()
    for file in files:
        text = file.read_text()
        assert text.isascii() and text.startswith(dump_kernels.PREAMBLE)
        assert warnings_of(text) == [], file.name
    for body in ("paged_decode", "merge_partitions", "write_slots", "gather_blocks"):
        file = next(file for file in files if file.name.startswith(body))
        assert checker.check_text(checker.prepare(file.read_text().replace(dump_kernels.PREAMBLE, ""))) == []


def test_every_metal_body_is_dumped(folder: Path) -> None:
    assert {file.name.partition("-")[0] for file in folder.glob("*.metal")} == {
        name for name, body in BODIES.items() if not body.cuda_only
    }


def test_every_popular_shape_is_dumped(folder: Path) -> None:
    decodes: dict[tuple[str, ...], set[str]] = {}
    for file in folder.glob("paged_decode*.metal"):
        text = file.read_text()
        constants = dict(re.findall(r"constexpr \w+ (\w+) = (\w+);", text))
        kind = re.search(r"typedef (\w+) T;", text)
        assert kind is not None
        key = kind[1], constants["D"], constants["G"], constants["SOFTCAP"], constants["SINKS"]
        assert text.count("const device int32_t* ") == 3, "tables, ends and starts have at least 8 elements"
        decodes.setdefault(key, set()).add(constants["SINGLE"])
    assert len(decodes) == len(POPULAR) + len(DTYPES) - 1
    assert set(map(frozenset, decodes.values())) == {frozenset({"true", "false"})}
    merges = [file.read_text() for file in folder.glob("merge_partitions*.metal")]
    assert all("mlx/backend/metal/kernels/utils.h" in text for text in merges)


@pytest.mark.parametrize("fails", ["doctor", "pytest", "validate_kernel", "validate_model", "nothing"])
def test_check_gpu_runs_all_checks_whichever_fails(tmp_path: Path, fails: str) -> None:
    python, calls = tmp_path / "python", tmp_path / "calls.txt"
    python.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncase "$*" in *{fails}*) exit 1;; esac\n')
    python.chmod(0o755)
    command = ["make", "check-gpu", "DEV_STAMP=", f"PY={python}", "REPORT=doctor.json"]
    ended = subprocess.run(command, cwd=SCRIPTS.parent, capture_output=True, text=True, check=False)
    assert (ended.returncode == 0) is (fails == "nothing"), ended.stderr
    names = ("mlx_paged doctor", "pytest -m gpu", "validate_kernel.py", "validate_model.py")
    assert [name in call for name, call in zip(names, calls.read_text().splitlines(), strict=True)] == [True] * 4


# Fake of Apple's compiler: records its arguments and prints the diagnostics that the text asks for.
XCRUN = f"""#!{sys.executable}
import sys
from pathlib import Path
arguments = sys.argv[1:]
with open(Path(__file__).parent / "calls.txt", "a") as calls:
    print(*arguments, file=calls)
(standard,) = [argument for argument in arguments if argument.startswith("-std=")]
if standard.removeprefix("-std=") not in (Path(__file__).parent / "standards.txt").read_text().split():
    print("error: invalid value in '" + standard + "'", file=sys.stderr)
    sys.exit(1)
if "-fsyntax-only" in arguments:
    sys.exit()
text = Path(arguments[-1]).read_text()
if "WARN" in text and "-Wall" in arguments:
    print("text.metal:1:1: warning: unused variable", file=sys.stderr)
    if "-Werror" in arguments:
        sys.exit(1)
if "BROKEN" in text:
    print("text.metal:1:1: error: no such name", file=sys.stderr)
    sys.exit(1)
if "QUIET" in text:
    print("text.metal:1:1: warning: only said", file=sys.stderr)
air = "define void @kernel() {{\\n  %1 = add i32 1, 2\\n"
if "ARRAY" in text:
    air += "  %acc = alloca [8 x float], align 4\\n"
Path(arguments[arguments.index("-o") + 1]).write_text(air + "}}\\n")
"""


@pytest.fixture
def xcrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the fake on PATH; return a folder of texts."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "xcrun").write_text(XCRUN)
    (programs / "xcrun").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / compile_metal.INCLUDE).write_text("/headers\n")
    return texts


@pytest.mark.parametrize(
    ("text", "known", "status", "said"),
    [
        ("fine", ["metal3.1", "metal3.2", "metal4.0"], 0, "3 of 3 compiled: 1 texts, metal3.1, metal3.2, metal4.0"),
        ("fine", ["metal3.2"], 0, "1 of 1 compiled: 1 texts, metal3.2"),
        ("fine", [], 2, "knows none of metal3.1"),
        ("WARN", ["metal3.2"], 1, "warning: unused variable"),
        ("BROKEN", ["metal3.2"], 1, "error: no such name"),
        ("QUIET", ["metal3.2"], 1, "warning: only said"),
        ("ARRAY", ["metal3.2"], 1, "%acc = alloca [8 x float]"),
    ],
)
def test_texts_compile_with_every_known_standard_or_fail(
    xcrun: Path, capsys: pytest.CaptureFixture[str], text: str, known: list[str], status: int, said: str
) -> None:
    programs = xcrun.parent / "programs"
    (programs / "standards.txt").write_text(" ".join(known))
    (xcrun / "a.metal").write_text(text)
    assert compile_metal.main([str(xcrun)]) == status
    shown = capsys.readouterr()
    assert said in shown.out + shown.err and ("FAILED a.metal with metal3.2" in shown.out) is (status == 1)
    calls = [call for call in (programs / "calls.txt").read_text().splitlines() if "-fsyntax-only" not in call]
    assert [re.findall(r"-std=(\S+)", call)[0] for call in sorted(calls)] == known
    for call in calls:
        assert call.startswith("-sdk macosx metal ") and " -Wall -Werror " in call
        assert " -S -emit-llvm " in call and " -isystem /headers " in call
