"""Chat templates of eight model families: files beside the tests, and two from a wheel."""

import functools
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx_lm.utils
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from mlx_paged.cli.doctor import demo_place
from scripts.demo_model import ensure_demo_model
from tests.support.models.tiny_model import copy_tokenizer

FOLDER = Path(__file__).parents[2] / "server" / "templates"
# Their licences do not suit this repository; the wheel has them as published.
WHEEL = "trl-1.16.0-py3-none-any.whl"
WHEEL_SHA256 = "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
OF_WHEEL = {"llama-3.1": "llama3_1", "gemma-3": "gemma3"}
FAMILIES = (*sorted(path.stem for path in FOLDER.glob("*.jinja")), *OF_WHEEL)
MARKER = re.compile(
    r"<[|｜][^<>\s]{1,40}[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z]+(?:_[A-Z]+)*\]|</?think>|</?tool_call>"
)


def chat_template(family: str) -> str:
    """Return the template of a family; skip the test if it is unavailable."""
    if family not in OF_WHEEL:
        return (FOLDER / f"{family}.jinja").read_text()
    place = demo_place().parent / WHEEL
    if not place.is_file():
        _download(place)
    assert hashlib.sha256(place.read_bytes()).hexdigest() == WHEEL_SHA256, f"{place} is another file"
    with zipfile.ZipFile(place) as wheel:
        return wheel.read(f"trl/chat_templates/{OF_WHEEL[family]}.jinja").decode()


def _download(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    name, version, *_ = WHEEL.split("-")
    with TemporaryDirectory(dir=place.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
        done = subprocess.run([*command, f"{name}=={version}"], capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"pip could not download {name} {version}")
        os.replace(Path(folder) / WHEEL, place)


@functools.cache
def family_tokenizer(family: str) -> Any:
    """Return mlx-lm's tokenizer with a family's template: the demo model's tokens plus the template's markers."""
    with TemporaryDirectory() as folder:
        copy_tokenizer(ensure_demo_model(), Path(folder))
        inner: Any = AutoTokenizer.from_pretrained(folder)
        inner.chat_template = chat_template(family)
        markers = dict.fromkeys(MARKER.findall(inner.chat_template))
        inner.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
        inner.save_pretrained(folder)
        return mlx_lm.utils.load_tokenizer(Path(folder))
