"""The page /cache: its text, its policy, and its functions on a document of few elements."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged import BlockPool, LayerGroup
from mlx_paged.prefix.prefix_cache import PrefixCache
from mlx_paged.server.report import CACHE_PAGE_HEADERS, blocks_of, cache_page
from tests.support.processes.page_document import NEEDS_NODE, page_of
from tests.support.processes.server_process import ServerProcess

FAMILY, FLAGS = "gemma3", ("--prefill-step-size", "512")

LONG = {"messages": [{"role": "user", "content": "What is on this page? " * 10}], "max_tokens": 100000, "stream": True}
STATES = ("free", "live", "shared", "cached")


def test_page_is_small_and_self_contained() -> None:
    page = cache_page().decode()
    assert len(page) < 24_000
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", page)
    assert 'name="viewport"' in page and all(name in page for name in STATES)


def test_policy_allows_only_the_pages_own_script_and_style() -> None:
    page, policy = cache_page().decode(), CACHE_PAGE_HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy and policy.startswith("default-src 'none'; connect-src 'self'; ")
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"<[^>]*\s(style|on\w+)=", page)  # the policy forbids both
    assert "innerHTML" not in page and 'setAttribute("style' not in page


def test_every_field_that_the_page_reads_is_in_the_report(server: ServerProcess) -> None:
    server.chat([{"role": "user", "content": "Is it there?"}], max_tokens=1)
    client = server.send_and_leave_open("/v1/chat/completions", LONG)
    server.wait_for(running=1)
    report = server.stats()
    client.close()
    script = re.findall("<script>(.*?)</script>", cache_page().decode(), re.DOTALL)[0]
    of = {name: report[name] for name in ("server", "running", "pool", "prefix_cache", "health")}
    of |= {"request": report["sequences"][0], "group": report["blocks"][0], "page": report["pages"][0]}
    of |= {"path": report["dispatch"][0], "report": report}
    read = {(name, field) for name, field in re.findall(r"\b(\w+)\.(\w+)\b", script) if name in of}
    assert len(read) > 30
    missing = {(name, field) for name, field in read if field not in of[name]}
    assert missing == set()
    for fields in re.findall(r"function \w+\(\{ ([^}]+) \}\)", script):
        assert set(fields.split(", ")) <= set(report), fields
    for tag in re.findall(r'\$\("([\w-]+)"\)', script):
        assert f'id="{tag}"' in cache_page().decode()


def test_every_colour_is_in_the_legend_and_every_rate_appears_once() -> None:
    text = cache_page().decode()
    coloured = set(re.findall(r"\.(\w+) \{ background", text))
    assert coloured == {*STATES, "computing", "generated", "never"}
    legend = re.search(r"const NAMES = \{(.*?)\}", text), re.search(r"const OF_REQUESTS = \{(.*?)\}", text)
    named = {name for part in legend if part for name in re.findall(r"\w+", part[1])}
    assert coloured - named == {"never"} and 'never: "never used"' in text
    assert len(re.findall(r"\btokens_per_second\b", text)) == 1


@NEEDS_NODE
def test_page_shows_running_and_waiting_requests(tmp_path: Path) -> None:
    """Runs the page's functions on a document of few elements."""
    waiting: dict[str, Any] = {
        "number": 1,
        "state": "queued",
        "waiting": True,
        "age_seconds": 3,
        "prompt_tokens": 9,
        "cached_tokens": 0,
    }
    waiting |= {"tokens": 0, "computing_tokens": 0, "generated_tokens": 0, "blocks": []}
    server = {"prompt_tokens": 0, "cached_tokens": 0}
    few: dict[str, Any] = {"model": "m", "health": {"status": "ok", "memory": None}, "server": server, "pool": None}
    few |= {"running": {"running": 0, "waiting": 2}, "sequences": [{**waiting, "number": n} for n in (1, 2)]}
    many = {**few, "running": {"running": 0, "waiting": 9}, "sequences": [{**waiting, "number": n} for n in range(9)]}
    (first, second), state = page_of(cache_page(), [few, many], tmp_path)
    assert first["headline"] == "2 requests are being answered" and len(first["rows"]) == 2
    assert first["rows"][0][-1] == "9 prompt tokens, cached ones not counted yet"
    assert second["rows"] == [] and second["none"] == "9 wait, the first for 3.0 s"
    assert state == "the API key is wrong"


def blocks_by_state(pool: BlockPool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for state, count in blocks_of(pool)[0]["runs"]:
        counts[state] += count
    return counts


def test_block_map_gives_every_block_one_state() -> None:
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    tree = PrefixCache(pool)
    first, second, third = (pool.new_table() for _ in range(3))
    for table in (first, second, third):
        pool.append_tokens(table, 8)
        x = mx.zeros((1, 1, 8, 4))
        pool.write_prefill(table, 0, x, x)
    tree.insert(range(8), first)
    fork = pool.fork(second)
    assert blocks_by_state(pool) == {"s": 4, "l": 2, "f": pool.stats().free_blocks}
    pool.release_table(first)
    pool.release_table(fork)
    assert blocks_by_state(pool) == {"c": 2, "l": 4, "f": pool.stats().free_blocks}
