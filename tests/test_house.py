"""The house stays one to live in: files that can be read in one go, folders that can be looked over."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("mlx_paged", "patches", "tests", "scripts")
SUFFIXES = {".py", ".cuh", ".metal", ".cpp", ".hpp"}
MOST_LINES, MOST_FILES = 400, 12


def files_of(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES and path.is_file()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_is_long(folder: str) -> None:
    files = files_of(folder)
    assert files
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_folder_is_full(folder: str) -> None:
    counts: dict[str, int] = {}
    for path in files_of(folder):
        if path.name != "__init__.py":
            parent = str(path.parent.relative_to(ROOT))
            counts[parent] = counts.get(parent, 0) + 1
    assert {parent: count for parent, count in counts.items() if count > MOST_FILES} == {}
