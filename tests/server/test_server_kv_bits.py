"""A server with quantised pages batches, shares prefixes, and restores them after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.server_process import ServerProcess, cached, together

FAMILY = "llama of wide heads"

pytestmark = pytest.mark.demo_model

STORY = "Once upon a time, in a forest, there lived a fox who counted the days by the rings of the moon. " * 5


def ask(server: ServerProcess, prompt: str) -> tuple[str, int]:
    """Return the text, and the number of cached prompt tokens."""
    answer = server.complete(prompt, max_tokens=12)
    return answer["choices"][0]["text"], cached(answer)


def test_requests_share_quantised_prefixes_also_after_a_crash(serve: Any, tmp_path: Path) -> None:
    flags = ("--kv-bits", "8", "--prefix-cache-dir", tmp_path / "prefixes")
    server = serve(*flags)
    assert server.stats()["pages"][0]["format"] == "8 bits in groups of 64"
    first, _ = ask(server, STORY)
    before = server.stats()["pool"]
    tails = [f"{STORY}And then number {n} came" for n in range(4)]
    answers = together(lambda prompt: ask(server, prompt), tails)
    assert all(found > 90 for _, found in answers)
    after = server.stats()["pool"]
    assert after["quantized_tokens"] - before["quantized_tokens"] < 4 * (40 + 32)  # the story is not quantised again
    assert after["quantized_layers"] == 2 and after["dense_layers"] == 0
    assert "mlx_paged_pool_quantized_layers 2.0" in server.get("/metrics").body.decode()

    def is_on_disk() -> bool:
        """Return whether all cached blocks are on disk; children are written before their parents."""
        stats = server.stats()
        return bool(stats["prefix_cache"]["on_disk"]["blocks"] >= stats["pool"]["live_blocks"] > 0)

    server.wait_until(is_on_disk)
    server.kill()  # as kill -9 does
    assert "FallThrough" not in server.log and "Traceback" not in server.log

    again = serve(*flags)
    text, found = ask(again, STORY)
    assert text == first and found > 90
    assert again.stats()["pool"]["quantized_tokens"] <= 64  # what was restored was not quantised again
    assert ask(again, tails[0])[0] == answers[0][0]
    again.check_end()
    other = serve("--kv-bits", "4", *flags[2:])
    assert ask(other, STORY)[1] == 0  # pages of another format are not restored


def test_unsupported_kv_bits_are_served_one_at_a_time(serve: Any) -> None:
    server = serve("--kv-bits", "6", "--quantized-kv-start", "0")
    assert server.complete(STORY, max_tokens=5)
    assert "one at a time" in server.log
