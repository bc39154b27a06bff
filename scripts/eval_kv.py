"""What quantised keys and values cost in quality: perplexity of a text, and how far each token's distribution is from
the one over keys and values as they are. Quantised pages, rotated ones, and mlx-lm's own quantised cache beside them.

    python scripts/eval_kv.py --dequantize --dtype bfloat16 --out out/kv        # the demo model
    python scripts/eval_kv.py --model path/to/model --text book.txt --tokens 8192
    python scripts/eval_kv.py --model path/to/model --kv-bits 8 4 --kv-group-size 32 64 --kv-rotate 8 4

The text goes through the model in chunks, each behind what its side's cache holds of those before, with the text's own
tokens, whatever a side would have said. Every side sees the same chunks in the same process: pages of each format,
mlx-lm's ``QuantizedKVCache`` in mlx-lm's own attention, quantised from the first token as pages are, and unquantised
caches: mlx-lm's against pages shows what the order of rounding alone makes. All are compared with unquantised pages.

- ``KL``: the Kullback-Leibler divergence of a side's distribution of the next token from the reference's, in nats per
  token, and its 99th percentile. In float32, over the whole vocabulary.
- ``perplexity``: of the text, from its second token on.
- ``same token``: how often the most likely token is the reference's.

Without ``--text`` the text is this repository's documentation; without ``--model`` the model is the demo model. A model
of random weights has no tokenizer, and gets the text's bytes. Writes eval_kv.json and, with matplotlib, eval_kv.png.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from benchmarks.models import BenchError, add_model_arguments, chosen_model, model_name
from benchmarks.report import Panel, table, write_results
from demo_model import DemoModelError, ensure_demo_model
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import dequantize_model, load_tokenizer

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.config import parse_kernel, parse_kv_bits, parse_kv_group_size, parse_memory
from mlx_paged.kv.storage.base import PageFormat

DOCS = Path(__file__).resolve().parents[1] / "docs"
DEFAULT_TEXTS = (DOCS / "architecture.md", DOCS / "reference.md")
SIDES = ("pages", "rotated pages", "mlx-lm")
PANELS: tuple[Panel, ...] = (
    ("KL, nats/token", lambda r: r["kl_mean"]),
    ("KL, 99th percentile", lambda r: r["kl_p99"]),
    ("perplexity / reference's", lambda r: r["perplexity"] / r["reference_perplexity"]),
    ("other greedy token, %", lambda r: 100 * (1 - r["same_token"])),
)


class Side:
    """One way to keep keys and values, and how it has done so far.

    Args:
        page_format: of the keys and values; None: as they are.
        paged: in pages, or in mlx-lm's own caches.
    """

    def __init__(self, page_format: PageFormat | None, *, paged: bool) -> None:
        self.page_format, self.paged = page_format, paged
        self.caches: list[Any] = []
        self.nll: list[float] = []
        self.kl: list[float] = []
        self.same: list[bool] = []

    @property
    def name(self) -> str:
        rotated = self.page_format is not None and self.page_format.rotate
        return "mlx-lm" if not self.paged else "rotated pages" if rotated else "pages"

    @property
    def format_name(self) -> str:
        return "as they are" if self.page_format is None else str(self.page_format._replace(rotate=False))

    def begin(self, model: Any, config: PagedConfig) -> None:
        """Make empty caches; for pages, under patches that stay applied.

        Raises:
            BenchError: the model's keys and values cannot be kept so.
        """
        if not self.paged:
            mlx_paged.remove_patches()
            self.caches = make_prompt_cache(model)
            if self.page_format is not None:
                if any(type(cache) is not KVCache for cache in self.caches):
                    raise BenchError("mlx-lm has no quantised cache for all of this model's layers")
                bits, _, group_size, _ = self.page_format
                self.caches = [cache.to_quantized(group_size, bits) for cache in self.caches]
            return
        mlx_paged.apply_patches(config)
        self.caches = make_prompt_cache(model)
        pool = mlx_paged.pool_of(model)
        if pool is None:
            raise BenchError("no layer of this model is paged")

    def take(self, model: Any, tokens: np.ndarray) -> mx.array:
        """Log-probabilities ``[n, vocab]`` in float32 behind each of the next n tokens of the text."""
        logits = model(mx.array(tokens)[None], cache=self.caches)[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs, [cache.state for cache in self.caches] if not self.paged else [])
        return logprobs

    def compare(self, logprobs: mx.array, reference: mx.array, following: np.ndarray) -> None:
        """Count what came for a chunk, of which the tokens that follow each are known (the last one's may not be)."""
        mine, theirs = logprobs[: len(following)], reference[: len(following)]
        targets = mx.array(following)[:, None]
        self.nll += (-mx.take_along_axis(mine, targets, axis=1)[:, 0]).tolist()
        self.kl += (mx.exp(theirs) * (theirs - mine)).sum(axis=-1).tolist()
        self.same += (mx.argmax(mine, axis=-1) == mx.argmax(theirs, axis=-1)).tolist()

    def result(self, reference: Side) -> dict[str, Any]:
        """Its figures. Raises BenchError if the pages hold nothing in the format that was asked for."""
        layers = None
        if self.paged:
            stats = self.caches[0].pool.stats()
            layers = {"quantised": stats.quantized_layers, "dense": stats.dense_layers}
            if self.page_format is not None and not stats.quantized_layers:
                reasons = {group.dense_reason for group in self.caches[0].pool.groups}
                raise BenchError(f"no layer is quantised: {'; '.join(sorted(filter(None, reasons)))}")
        return {
            "side": self.name,
            "format": self.format_name,
            "positions": len(self.kl),
            "kl_mean": float(np.mean(self.kl)),
            "kl_p99": float(np.percentile(self.kl, 99)),
            "kl_max": float(np.max(self.kl)),
            "perplexity": float(np.exp(np.mean(self.nll))),
            "reference_perplexity": float(np.exp(np.mean(reference.nll))),
            "same_token": float(np.mean(self.same)),
            "layers": layers,
        }


def evaluate(model: Any, tokens: np.ndarray, formats: Sequence[PageFormat], args: argparse.Namespace) -> list[Any]:
    """The sides' figures, the reference's own among them."""
    reference = Side(None, paged=True)
    sides = [reference, *(Side(each, paged=True) for each in formats)]
    plain = [each for each in formats if each.k_bits == each.v_bits and not each.rotate]
    sides += [Side(each, paged=False) for each in (None, *plain)]
    results: list[dict[str, Any]] = []

    def attempt(side: Side, action: Any) -> Any:
        try:
            return action()
        except BenchError as error:
            if side is reference:
                raise
            results.append({"side": side.name, "format": side.format_name, "error": str(error)})
            running.remove(side)
            return None

    running = list(sides)
    for side in sides:
        attempt(side, lambda side=side: side.begin(model, config_of(side.page_format, args)))
    for start in range(0, len(tokens) - 1, args.chunk):
        chunk, following = tokens[start : start + args.chunk], tokens[start + 1 : start + args.chunk + 1]
        expected = None
        for side in running:  # pages first: the patches go in and out once for each chunk
            if side.paged:
                mlx_paged.apply_patches()
            else:
                mlx_paged.remove_patches()
            logprobs = side.take(model, chunk)
            expected = logprobs if side is reference else expected
            side.compare(logprobs, expected, following)
        print(f"{min(start + args.chunk, len(tokens))} of {len(tokens)} tokens", file=sys.stderr)
    mlx_paged.remove_patches()
    for side in list(running):
        if (result := attempt(side, lambda side=side: side.result(reference))) is not None:
            results.append(result)
    return results


def config_of(page_format: PageFormat | None, args: argparse.Namespace) -> PagedConfig:
    """What makes such pages."""
    options: dict[str, Any] = {"kernel": args.kernel, "kv_cache_memory": args.kv_cache_memory}
    if page_format is None:
        return PagedConfig(**options)
    bits = (page_format.k_bits, page_format.v_bits)
    return PagedConfig(**options, kv_bits=bits, kv_group_size=page_format.group_size, kv_rotate=page_format.rotate)


def formats_of(args: argparse.Namespace) -> list[PageFormat]:
    """Each number of bits in groups of each size, and rotated where that is asked for."""
    rotated = args.kv_rotate
    every = [(bits, False) for bits in args.kv_bits] + [(bits, True) for bits in rotated]
    return [PageFormat.of(bits, size, rotate) for size in args.kv_group_size for bits, rotate in every]


def text_of(path: Path | None) -> str:
    """Raises BenchError if it cannot be read."""
    try:
        return "\n".join(each.read_text(encoding="utf-8") for each in ([path] if path else DEFAULT_TEXTS))
    except (OSError, UnicodeError) as error:
        raise BenchError(f"the text cannot be read: {error}") from None


def tokens_of(text: str, model: Any, args: argparse.Namespace) -> np.ndarray:
    """The text's first tokens. Raises BenchError if it has fewer than two."""
    if args.random:
        ids = [byte % model.args.vocab_size for byte in text.encode()]
    else:
        ids = load_tokenizer(Path(args.model)).encode(text)
    if len(ids) < 2:
        raise BenchError("the text has fewer than two tokens")
    return np.array(ids[: args.tokens])


def print_results(results: Sequence[dict[str, Any]]) -> None:
    header = ("keys and values", "in", "KL, nats/token", "99th percentile", "perplexity", "same token", "layers")
    rows = []
    for r in results:
        if "error" in r:
            rows.append((r["format"], r["side"], *[""] * 4, r["error"][:60]))
            continue
        layers = "" if r["layers"] is None else f"{r['layers']['quantised']} quantised, {r['layers']['dense']} dense"
        figures = (f"{r['kl_mean']:.2e}", f"{r['kl_p99']:.2e}", f"{r['perplexity']:.3f}", f"{r['same_token']:.2%}")
        rows.append((r["format"], r["side"], *figures, layers))
    print(table(header, rows))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--dequantize", action="store_true", help="weights as they are multiplied with, not quantised")
    parser.add_argument("--text", type=Path, default=None, help="a file in UTF-8 (default: this repository's docs)")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text (default 2048)")
    parser.add_argument("--chunk", type=int, default=256, help="tokens in a call of the model (default 256)")
    bits = {"type": parse_kv_bits, "metavar": "BITS"}
    parser.add_argument("--kv-bits", nargs="+", default=[8, (8, 4), 4], **bits, help="8, 4 or 8,4 (default: all)")
    parser.add_argument("--kv-rotate", nargs="*", default=[4], **bits, help="also rotated (default: 4)")
    parser.add_argument("--kv-group-size", nargs="+", type=parse_kv_group_size, default=[64], metavar="VALUES")
    parser.add_argument("--kv-cache-memory", type=parse_memory, default=None, help="of each side's pages")
    parser.add_argument("--kernel", type=parse_kernel, default="auto", help="auto, on or off")
    parser.add_argument("--out", type=Path, default=None, help="folder for eval_kv.json and eval_kv.png")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    args = parser.parse_args(given)
    if args.tokens < 2 or args.chunk < 1:
        parser.error("at least two tokens, in chunks of at least one")
    if None in (*args.kv_bits, *args.kv_rotate):
        parser.error("--kv-bits and --kv-rotate take 8, 4 or 8,4; unquantised caches are always run")
    name = None
    try:
        text = text_of(args.text)
        if args.random is None and args.model is None:
            args.model, name = str(ensure_demo_model()), "demo model"
        model = chosen_model(args)
        if args.dequantize:
            model = dequantize_model(model)
            mx.eval(model.parameters())
        tokens = tokens_of(text, model, args)
        results = evaluate(model, tokens, formats_of(args), args)
    except (BenchError, DemoModelError) as error:
        print(f"eval_kv: {error}", file=sys.stderr)
        return 1
    print_results(results)
    if args.out is not None:
        for result in results:
            result["text_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        title = f"{len(tokens)} tokens of text: {name or model_name(args)}"
        write_results(args.out, "eval_kv", given, results, PANELS, "format", SIDES, title)
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
