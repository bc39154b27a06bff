"""The page /cache, as a phone's browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_paged import BlockPool, LayerGroup
from mlx_paged.prefix.radix import RadixTree
from mlx_paged.serve.report import cache_page
from mlx_paged.serve.report.block_map import STATES, block_map
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes.server_process import ServerProcess

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]


def test_the_page_needs_nothing_else() -> None:
    page = cache_page.html().decode()
    assert len(page) < 20_000
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", page)
    assert 'name="viewport"' in page and all(name in page for name in STATES.values())


def test_every_block_has_one_state() -> None:
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    tree = RadixTree(pool)
    first, second, third = (pool.new_table() for _ in range(3))
    for table in (first, second, third):
        pool.append_tokens(table, 8)
        x = mx.zeros((1, 1, 8, 4))
        pool.write_prefill(table, 0, x, x)
    tree.insert(range(8), [first])
    fork = pool.fork(second)
    assert block_map(pool)[0][:3] == [("s", 4), ("l", 2), ("f", pool.stats().free_blocks)]
    pool.release_table(first)
    pool.release_table(fork)
    assert block_map(pool)[0][:3] == [("c", 2), ("l", 4), ("f", pool.stats().free_blocks)]


@pytest.fixture(scope="module")
def server(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"), demo_model_folder, "gemma3")
    process = ServerProcess(model, tmp_path_factory.mktemp("server"))
    yield process
    assert process.stop() == 0, process.log


def browse(url: str, folder: Path, *flags: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "--virtual-time-budget=4000", *flags, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.demo_model
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_the_blocks(server: ServerProcess, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is on this page? " * 10}]
    server.chat(messages, max_tokens=3)
    connection = server.send_and_leave_open(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 100000, "stream": True}
    )
    server.wait_until(lambda: server.stats()["running"]["running"] == 1)
    page = browse(f"{server.url}/cache", tmp_path / "profile", "--dump-dom", "--window-size=390,844")
    assert 'data-ready="yes"' in page and re.search(r'id="state"[^>]*>live<', page)
    counts = {
        name: int(re.search(rf'id="count-{name}">{name} ([\d,]+)', page)[1].replace(",", ""))
        for name in STATES.values()
    }
    total = server.stats()["pool"]["total_blocks"]
    assert counts["free"] > 0 and counts["live"] > 0 and counts["shared"] > 0 and sum(counts.values()) <= total
    assert page.count("<canvas") == 2  # one for each group of layers
    assert "hit rate" in page and "tokens/s" in page
    connection.close()

    picture = tmp_path / "page.png"
    browse(f"{server.url}/cache", tmp_path / "profile", f"--screenshot={picture}", "--window-size=390,844")
    assert picture.stat().st_size > 5000
