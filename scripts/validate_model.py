"""A whole model, stock mlx-lm against mlx_paged: logits of the same tokens, at prompts of any length.

    python scripts/validate_model.py --random llama-1b --contexts 512,8192,32768
    python scripts/validate_model.py --model path/to/model --contexts 1000

Both sides are given the same prompt and then the same tokens, one at a time (the tokens that stock prefers), so that a
single close call does not make everything after it incomparable. Printed for each context: which path attention took,
the RMS of the difference in logits against their standard deviation, how often both prefer the same token, and the gap
between stock's first two choices where they do not; then stock against itself with the prompt cut elsewhere: what the
order of rounding alone makes of it. Fails if mlx_paged differs by more than LIMIT, or by more than ten times what
stock differs from itself and more than a few units of the dtype's precision.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig
from scripts.benchmarks.models import add_model_arguments, chosen_model
from scripts.benchmarks.report import BenchError, list_of, positive, table

SEED = 7
LIMIT, LEAST_LIMIT = 0.1, 1e-4  # RMS, in standard deviations of the logits
ROUNDING_UNITS = 4


class Difference(NamedTuple):
    """Difference between the logits of two runs. ``gap``: largest gap between the two most likely tokens where the runs
    disagree, in standard deviations."""

    rms: float
    same: int
    gap: float


def run(
    model: Any, prompt: np.ndarray, chunk: int, tokens: list[int] | None, count: int
) -> tuple[list[int], np.ndarray]:
    """Return the tokens after the prompt, those given or the most likely ones, and their logits ``[count, vocab]``."""
    cache = make_prompt_cache(model)
    ids = mx.array(prompt)[None]
    for start in range(0, len(prompt) - 1, chunk):
        model(ids[:, start : min(start + chunk, len(prompt) - 1)], cache=cache)
        mx.eval([layer.state for layer in cache])
    given, logits, token = tokens, [], int(prompt[-1])
    taken = []
    for step in range(count):
        row = np.array(model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32))
        logits.append(row)
        token = int(row.argmax()) if given is None else given[step]
        taken.append(token)
    return taken, np.stack(logits)


def compare(a: np.ndarray, b: np.ndarray) -> Difference:
    """Return the difference of b from a."""
    deviation = a.std()
    same = a.argmax(1) == b.argmax(1)
    top = np.sort(a[~same], axis=1)[:, -2:]
    gap = float((top[:, 1] - top[:, 0]).max() / deviation) if len(top) else 0.0
    return Difference(float(np.sqrt(np.mean((a - b) ** 2)) / deviation), int(same.sum()), gap)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--contexts", type=list_of(positive), default=[512, 2048], help="tokens of each prompt")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens after the prompt")
    parser.add_argument("--chunk", type=positive, default=2048, help="prefill step size")
    args = parser.parse_args()
    try:
        model = chosen_model(args)
    except BenchError as error:
        print(f"validate_model: {error}", file=sys.stderr)
        return 2
    vocab = model.args.vocab_size
    rows, failed = [], 0
    # Attention over tens of thousands of random tokens is so even that stock may give equal bits with other chunks.
    dtype = model(mx.zeros((1, 1), mx.uint32)).dtype
    least = max(LEAST_LIMIT, ROUNDING_UNITS * mx.finfo(dtype).eps)
    for context in args.contexts:
        prompt = np.random.default_rng(SEED).integers(0, vocab, context)
        tokens, stock = run(model, prompt, args.chunk, None, args.tokens)
        _, again = run(model, prompt, max(1, args.chunk * 5 // 8), tokens, args.tokens)
        mlx_paged.apply_patches(PagedConfig())
        _, paged = run(model, prompt, args.chunk, tokens, args.tokens)
        choice = mlx_paged.last_dispatch()
        mlx_paged.remove_patches()
        own, other = compare(stock, again), compare(stock, paged)
        bad = not (other.rms <= LIMIT and other.rms <= max(10 * own.rms, least))
        failed += bad
        rows.append(
            [
                str(context),
                choice.path if choice else "stock",
                f"{other.rms:.2e}",
                f"{other.same}/{args.tokens}",
                f"{other.gap:.3f}",
                f"{own.rms:.2e}",
                f"{own.same}/{args.tokens}",
                "FAIL" if bad else "ok",
            ]
        )
        mx.clear_cache()
    header = ["context", "path", "RMS / std", "same token", "gap", "stock cut elsewhere", "same token", ""]
    print(table(header, rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
