"""Links in the docs resolve, and the files, classes and functions that docs/architecture.md names exist."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.requests import request_of

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
DECISIONS = sorted(ROOT.glob("docs/adr/0*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w/.-])(?:\.\./)?(?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|metal|cuh|html)\b")
MEMBER = re.compile(r"\b([A-Z]\w*[a-z]\w*)\.(\w+)\b")
UPSTREAM = {"Model", "Attention", "BatchGenerator"}  # classes of mlx-lm that docs/architecture.md names


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def names() -> tuple[set[str], set[str]]:
    """Return the top-level classes and functions of the product, and all words in its files."""
    text = "\n".join(file.read_text() for file in [*ROOT.glob("mlx_paged/**/*.py"), *ROOT.glob("patches/**/*.py")])
    return set(re.findall(r"^(?:class|def) (\w+)", text, re.MULTILINE)), set(re.findall(r"\w+", text))


def resolved(name: str) -> Path | None:
    """Return the file that a path in the docs means: below the repository, the package or docs/."""
    return next(
        (path for path in (ROOT / name, ROOT / "mlx_paged" / name, ROOT / "docs" / name) if path.exists()), None
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_resolves(page: Path) -> None:
    missing = []
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert not missing


def test_architecture_names_existing_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = set(PATH.findall(text)) | set(re.findall(r"`((?:[\w.]+/)+)`", text))
    assert len(paths) > 60
    assert not sorted(path for path in paths if resolved(path) is None)


def test_architecture_names_existing_classes_and_members() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    members = {(kind, member) for kind, member in MEMBER.findall(text) if kind not in UPSTREAM}
    assert len(members) > 20
    defined, words = names()
    assert not [f"{kind}.{member}" for kind, member in sorted(members) if kind not in defined or member not in words]


def test_diagram_of_a_request_names_each_class_beside_its_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    picture = text.split("\n    insert ", 1)[1].split("\n- ", 1)[0]
    wrong, checked = [], 0
    for line in picture.splitlines():
        files = [path.read_text() for name in PATH.findall(line) if (path := resolved(name)) is not None]
        for name in re.findall(r"\b(?:[A-Z]\w*[a-z]\w*|[a-z]+_attention)\b", PATH.sub("", line) if files else ""):
            if name in names()[0]:
                checked += 1
                if not any(re.search(rf"^(?:class|def) {name}\b", file, re.MULTILINE) for file in files):
                    wrong.append(f"{name}: {line.strip()}")
    assert checked > 12 and not wrong


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_adr_is_short_in_the_index_and_names_existing_files(page: Path) -> None:
    title, _, status = page.read_text().splitlines()[:3]
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    found = re.match(r"Status: (accepted|superseded)[^,]*, (\d{4}-\d\d-\d\d)\.", status)
    assert title.startswith(f"# {page.stem[:4]}: ") and found is not None
    line = next((line for line in index.splitlines() if f"({page.name})" in line), "")
    assert line.startswith(f"| [{page.stem[:4]}]") and f"| {found[1]}" in line and found[2] in line
    text = page.read_text()
    assert len(text.splitlines()) <= 60 and "**Decision" in text.replace("## Decision", "**Decision")
    assert not sorted(name for name in re.findall(r"`((?:[\w-]+/)+[\w-]+\.\w+)`", text) if resolved(name) is None)


def test_architecture_has_at_most_250_lines_and_15_terms() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    glossary = text.split("\n## Glossary\n", 1)[1].split("\n## ", 1)[0]
    assert len(text.splitlines()) <= 250 and len(re.findall(r"^- \*\*", glossary, re.MULTILINE)) == 15


def test_picture_of_a_requests_lengths_names_its_attributes() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("\n## The lengths of a request\n", 1)[1].split("\n## ", 1)[0]
    picture = "\n".join(line for line in section.splitlines() if line.startswith("    "))
    names = set(re.findall(r"\b[a-z]+_[a-z]+\b", picture)) | set(re.findall(r"`([a-z_]+)`", section))
    request = request_of(0, 5)
    assert len(names) > 9 and not [name for name in names if not hasattr(request, name)]
