"""The installed package has every module and data file; constraints pin development tools and minimum versions."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIN = re.compile(r"([A-Za-z0-9._-]+)==([\w.]+)")


def sources() -> set[str]:
    """Return the package's files by their installed paths."""
    folders = {"mlx_paged": ROOT / "mlx_paged", "mlx_paged/patches": ROOT / "patches"}
    return {
        f"{name}/{file.relative_to(folder)}"
        for name, folder in folders.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def build(kind: str, source: Path, out: Path) -> Path:
    """Have setuptools build a ``wheel``, an ``editable`` or an ``sdist`` of a folder."""
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package's files into a folder, as in a clone."""
    clone = tmp_path_factory.mktemp("clone")
    for name in ("mlx_paged", "patches"):
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        (clone / name / "__pycache__").mkdir()
        (clone / name / "__pycache__" / "x.cpython-311.pyc").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    return clone


def test_wheel_built_from_the_sdist_has_every_file(clone: Path, tmp_path: Path) -> None:
    assert {"mlx_paged/py.typed", "mlx_paged/patches/registry.py"} <= sources()
    with tarfile.open(build("sdist", clone, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    with zipfile.ZipFile(build("wheel", unpacked, tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if not name.startswith("mlx_paged-")}
        metadata = wheel.read(f"mlx_paged-{PROJECT['version']}.dist-info/METADATA").decode()
    assert names == sources()
    assert "Requires-Dist: mlx-lm<0.33,>=0.32.1" in metadata


def test_editable_install_is_a_path_that_type_checkers_follow(clone: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build("editable", clone, tmp_path)) as wheel:
        (path,) = (name for name in wheel.namelist() if "dist-info" not in name)
        assert path.endswith(".pth") and wheel.read(path).decode().split() == [os.path.realpath(clone)]


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-lowest.txt"])
def test_constraints_pin_exact_versions(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert lines and len(lines) == len(set(lines)) and all(PIN.fullmatch(line) for line in lines)


def test_development_tools_are_pinned_and_runtime_dependencies_are_not() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=!~ ]", requirement)[0].lower() for requirement in requirements}

    extras = dict(PROJECT["optional-dependencies"])
    tools = names(extras.pop("dev"))
    product = names(PROJECT["dependencies"]) | {name for extra in extras.values() for name in names(extra)}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert pinned >= tools - product and not pinned & product


def test_lowest_constraints_equal_the_required_minimums() -> None:
    lowest = dict(line.split("==") for line in (ROOT / "constraints-lowest.txt").read_text().splitlines())
    required = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["grammar"]]
    bounds = {found[1]: found[2] for text in required if (found := re.match(r"([\w-]+)>=([\d.]+)", text))}
    assert set(bounds) <= set(lowest)
    assert {name: lowest[name].removesuffix(".0") for name in bounds} == bounds
