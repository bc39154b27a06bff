"""What an installed package has: every module, and every file that is none."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def installed_files() -> list[tuple[str, str]]:
    """Package and name of each file that belongs to an installed package."""
    return [
        ("mlx_paged." * (top != "mlx_paged") + ".".join(file.relative_to(ROOT).parent.parts), file.name)
        for top in ("mlx_paged", "patches")
        for file in (ROOT / top).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]


def test_every_file_is_installed() -> None:
    packages, data = SETUPTOOLS["packages"], SETUPTOOLS["package-data"]
    found = installed_files()
    assert {"prelude.metal", "tensor.cuh", "cache_page.html", "py.typed"} <= {name for _, name in found}
    missing = [
        f"{package}: {name}"
        for package, name in found
        if package not in packages
        or not (name.endswith(".py") or any(fnmatch(name, pattern) for pattern in data.get(package, [])))
    ]
    assert not missing


def test_every_package_and_pattern_is_there() -> None:
    found = installed_files()
    assert set(SETUPTOOLS["packages"]) == {package for package, _ in found}
    for package, patterns in SETUPTOOLS["package-data"].items():
        for pattern in patterns:
            assert any(package == there and fnmatch(name, pattern) for there, name in found), (package, pattern)
