"""Count the calls of this package's functions in a decode step of two rows, on the host and with stand-ins for a GPU's
kernels: python scripts/count_calls.py"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mlx.core as mx  # noqa: E402

import mlx_paged  # noqa: E402
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator  # noqa: E402
from tests.support.kernels.fake_kernels import fake_kernels  # noqa: E402
from tests.support.models.builders import build, prompt_of  # noqa: E402

ROWS, LAYERS = 2, 4


def calls_in_a_step(*, on_device: bool) -> Counter[str]:
    """Return the calls of a decode step by function."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and ("/mlx_paged/" in code.co_filename or "/patches/" in code.co_filename):
            found[f"{Path(code.co_filename).name}:{code.co_qualname}"] += 1

    kernels: AbstractContextManager[Any] = fake_kernels() if on_device else nullcontext()
    with kernels:
        mlx_paged.apply_patches(mlx_paged.PagedConfig(kv_cache_memory=64 << 20))
        try:
            model = build("llama", num_hidden_layers=LAYERS)
            gen = PagedBatchGenerator(model, max_tokens=40)
            gen.insert([prompt_of(9, seed=row).tolist() for row in range(ROWS)])
            for _ in range(4):
                gen.next()
            sys.setprofile(note)
            try:
                gen.next()
            finally:
                sys.setprofile(None)
            gen.close()
        finally:
            mlx_paged.remove_patches()
    mx.synchronize()
    return found


def main() -> None:
    """Print the counts, and those of the most called functions, as many as the argument says."""
    for on_device in (False, True):
        found = calls_in_a_step(on_device=on_device)
        print(f"{'device' if on_device else 'host'} blocks: {found.total()} calls of {len(found)} functions")
        for name, count in found.most_common(int(sys.argv[1]) if len(sys.argv) > 1 else 0):
            print(f"  {count:4} {name}")


if __name__ == "__main__":
    main()
