"""The functions of this package that a decode step calls: the host's time between tokens."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import mlx_paged
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from tests.support.models.builders import build, prompt_of

MOST_CALLS = 150
ROWS, LAYERS = 2, 4


def calls_in_a_step() -> Counter[str]:
    """Return the calls of a decode step by function."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and ("/mlx_paged/" in code.co_filename or "/patches/" in code.co_filename):
            found[f"{Path(code.co_filename).name}:{code.co_qualname}"] += 1

    mlx_paged.apply_patches(mlx_paged.PagedConfig(kv_cache_memory=64 << 20))
    gen = PagedBatchGenerator(build("llama", num_hidden_layers=LAYERS), max_tokens=40)
    gen.insert([prompt_of(9, seed=row).tolist() for row in range(ROWS)])
    for _ in range(4):
        gen.next()
    sys.setprofile(note)
    try:
        gen.next()
    finally:
        sys.setprofile(None)
    gen.close()
    return found


def test_a_decode_step_calls_few_functions() -> None:
    calls = calls_in_a_step()
    assert calls.total() <= MOST_CALLS, calls.most_common(30)
    by_row_and_layer = [name for name, count in calls.items() if count >= ROWS * LAYERS]
    assert not by_row_and_layer, "work for each row in each layer"
