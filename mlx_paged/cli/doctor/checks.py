"""Checks of the doctor's report besides single kernels: programs that the doctor runs in a process each.

    python -m mlx_paged.cli.doctor.checks PROGRAM [ARGUMENTS]

``threads BLOCK_SIZE`` prints a line of JSON per shape of popular models: how many threads Metal allows in a group of
the shape's decode kernel. The number hints at register use: an Apple GPU shares its registers among the threads of a
group, and allows fewer than 1,024 threads to a kernel that needs many. MLX reveals it only in the error for a group
that is too large ("Thread group size (2048) is greater than the maximum allowed threads per threadgroup (896)."), so
each kernel is launched with 2,048 threads on purpose, and never runs.

``speed`` prints, as JSON, the tokens per second of a small model on stock mlx-lm and on the paged cache. The model is
the demo model if it is in the cache folder, else a Llama with random weights.

``ordering SEED STEPS`` prints, as JSON, the greedy tokens of requests that come and go in two generators over one pool,
on two streams, and how often attention took each path. With other limits on MLX's command buffers
(MLX_MAX_OPS_PER_BUFFER) the kernels are cut into other buffers, and the tokens must stay the same: only the chain of
fences orders the kernels.

All programs read the variables of the paged cache (``MLX_PAGED_KERNEL``, ...).
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import llama

from ...by_model import kept_of
from ...config import PagedConfig
from ...kernels import ops as kernels
from ...kernels.availability import device_unsupported_reason
from ...kernels.build import NoKernelError, backend, prepared
from ..generate import raise_cpu_cache_limit
from .jobs import Shape, popular_shapes
from .report import Outcome, Report, run_program

PROGRAM = "mlx_paged.cli.doctor.checks"
# Threads ------------------------------------------------------------------------------------------------------------

EXCESSIVE_THREADS = 2048  # no Metal GPU allows more than 1,024
THREADS_METHOD = (
    "each decode kernel was launched with 2,048 threads per group, which is an error; MLX's error message names "
    "Metal's limit. 1,024: registers do not limit the kernel; fewer: the kernel needs more registers"
)
_KV_HEADS = 2
_ROWS, _WIDTH = 9, 16


def allowed_threads(message: str) -> int | None:
    """Return the limit in MLX's error for a thread group that is too large; None if the text is another error."""
    found = re.search(r"maximum allowed threads per threadgroup \((\d+)\)", message)
    return int(found[1]) if found else None


def probe(shape: Shape) -> dict[str, Any]:
    """Launch the decode kernel of a shape with too many threads.

    Returns:
        ``shape``, ``needed`` (threads of the group in normal use) and ``allowed`` (the limit in the error). If the
        error names no limit, ``allowed`` is None and ``message`` has the first 500 characters of the error.
    """
    pools = [mx.zeros((_WIDTH + 1, _KV_HEADS, shape.block_size, shape.head_dim), shape.dtype) for _ in "kv"]
    heads = _KV_HEADS * shape.gqa
    visible = (
        mx.zeros((_ROWS, _WIDTH), mx.int32),
        mx.ones((_ROWS, 1), mx.int32),
        mx.zeros((_ROWS, 1), mx.int32),
    )
    try:
        launch = kernels.prepare_decode(
            pools[0],
            pools[1],
            visible,
            n_q_heads=heads,
            scale=1.0,
            softcap=10.0 if shape.softcap else None,
            sinks=shape.sinks,
        )
    except NoKernelError as error:
        return {"shape": str(shape), "needed": None, "allowed": None, "message": str(error)[:500]}
    needed = launch.options["threadgroup"][0]
    decode = prepared(launch.kernel, {**launch.options, "threadgroup": (EXCESSIVE_THREADS, 1, 1)})
    q = mx.zeros((_ROWS, heads, 1, shape.head_dim), shape.dtype)
    message = "no error: the kernel ran"
    try:
        mx.eval(
            launch._replace(decode=decode, merge=None)(
                q, pools[0], pools[1], kernels.new_fence(), mx.zeros((heads,)) if shape.sinks else None
            )
        )
    except (RuntimeError, ValueError) as error:
        message = str(error)
    allowed = allowed_threads(message)
    found: dict[str, Any] = {"shape": str(shape), "needed": needed, "allowed": allowed}
    return found if allowed is not None else {**found, "message": message[:500]}


def print_threads(block_size: int) -> None:
    """Print a line for each popular shape."""
    if backend() != "metal":
        sys.exit("MLX sees no Metal GPU")
    for shape in popular_shapes(block_size):
        print(json.dumps(probe(shape)), flush=True)


# Speed --------------------------------------------------------------------------------------------------------------

DEMO_FOLDER = "SmolLM2-135M-Instruct-Q4_1"
VOCAB = 320


def demo_folder() -> Path | None:
    """Return where ``scripts/demo_model.py`` puts the demo model, or None if it is not there."""
    if own := os.environ.get("MLX_PAGED_CACHE"):
        cache = Path(own)
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        cache = Path(xdg) / "mlx_paged"
    else:
        cache = Path("~/Library/Caches/mlx_paged" if sys.platform == "darwin" else "~/.cache/mlx_paged")
    try:
        folder = cache.expanduser() / DEMO_FOLDER
    except RuntimeError:  # no home directory
        return None
    return folder if (folder / "manifest.json").is_file() else None


def random_llama(dtype: mx.Dtype = mx.float32, **changes: Any) -> Any:
    """Return a Llama with random weights, the same each time; ``changes`` are fields of mlx-lm's ``ModelArgs``."""
    mx.random.seed(0)
    shape: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
    }
    model = llama.Model(llama.ModelArgs(**{**shape, **changes}))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


class Work(NamedTuple):
    """Size of a measurement: prompt tokens, generated tokens, and timed runs."""

    prompt: int
    tokens: int
    repeats: int


GPU_WORK, CPU_WORK = Work(256, 128, 2), Work(8, 6, 1)  # on a CPU only to see that it works
RANDOM_MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
}


def load_model() -> tuple[Any, int, str]:
    """Return the model, the size of its vocabulary, and a description of the model."""
    folder = demo_folder()
    if folder is not None:
        from mlx_lm.utils import load_model as load

        model, config = load(folder)
        return model, config["vocab_size"], "the demo model, SmolLM2-135M-Instruct"
    dtype = mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16
    shape = f"{RANDOM_MODEL['num_hidden_layers']} layers of {RANDOM_MODEL['hidden_size']}"
    name = str(dtype).removeprefix("mlx.core.")
    what = f"a Llama with random weights, {shape}, {name}"
    return random_llama(dtype, **RANDOM_MODEL), RANDOM_MODEL["vocab_size"], what


def tokens_per_second(model: Any, prompt: mx.array, count: int) -> tuple[float, list[int]]:
    """Return the tokens per second of greedy decoding, without prefill and the first token, and the tokens."""
    step = importlib.import_module("mlx_lm.generate").generate_step  # looked up now: patches replace it
    tokens: list[int] = []
    begin = 0.0
    for token, _ in step(prompt, model, max_tokens=count):
        if not tokens:
            begin = time.perf_counter()
        tokens.append(int(token))
    return (len(tokens) - 1) / (time.perf_counter() - begin), tokens


def measure() -> dict[str, Any]:
    """Measure stock mlx-lm and the paged cache: the fastest of several runs, after one warm-up.

    Returns:
        ``model`` (description), ``prompt`` and ``tokens`` (counts), ``stock`` and ``paged`` (tokens per second),
        ``path`` (the last that the paged cache's attention took), ``same_tokens`` (length of the common prefix of both
        outputs, which may differ with 16-bit weights), and ``kept`` (the keys of :func:`kept_of`).
    """
    from ... import patches
    from ...attention.dispatch import last_dispatch

    raise_cpu_cache_limit()
    model, vocab, name = load_model()
    work = CPU_WORK if mx.default_device() == mx.Device(mx.cpu) else GPU_WORK
    prompt = mx.random.randint(0, vocab, (work.prompt,), key=mx.random.key(1))
    speeds: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    for which in ("stock", "paged"):
        if which == "paged":
            patches.apply_patches(PagedConfig.from_env())
        runs = [tokens_per_second(model, prompt, work.tokens) for _ in range(1 + work.repeats)]
        speeds[which] = round(max(speed for speed, _ in runs[1:]), 1)
        tokens[which] = runs[-1][1]
    path, kept = last_dispatch(), sorted(kept_of(model))
    patches.remove_patches()
    pairs = zip(tokens["stock"], tokens["paged"], strict=True)
    return {
        "model": name,
        "prompt": work.prompt,
        "tokens": work.tokens,
        **speeds,
        "path": None if path is None else f"{path.path}: {path.reason}",
        "same_tokens": next((i for i, (a, b) in enumerate(pairs) if a != b), work.tokens),
        "kept": kept,
    }


# Ordering -----------------------------------------------------------------------------------------------------------

PROMPTS = (1, 7, 33, 64, 150, 300)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
WINDOW = 40
# The run that all others are compared with: attention over gathered blocks, without kernels.
REFERENCE = {"MLX_PAGED_KERNEL": "off"}
VARIANTS = {
    "1 operation in a command buffer": {"MLX_MAX_OPS_PER_BUFFER": "1"},
    "1000 operations in a command buffer": {"MLX_MAX_OPS_PER_BUFFER": "1000"},
}


def tokens_of(seed: int, steps: int) -> dict[int, list[int]]:
    """Return the greedy tokens by request. Over ``steps`` steps, random requests go to a random generator, so that the
    pool grows and blocks are reused. ``MLX_PAGED_KERNEL`` decides whether the kernels run."""
    from ... import patches

    upstream = importlib.import_module("mlx_lm.generate")
    rng = random.Random(seed)
    model = random_llama(layer_types=LAYERS, sliding_window=WINDOW)
    patches.apply_patches(replace(PagedConfig.from_env(), block_size=8, kv_cache_memory=1 << 28))
    device = mx.default_device()
    generators = [upstream.BatchGenerator(model, stream=mx.new_stream(device), prefill_step_size=64) for _ in range(2)]
    requests: dict[tuple[int, int], int] = {}
    tokens: dict[int, list[int]] = {}
    for step in range(steps):
        which = rng.randrange(2)
        if step % 5 == 0:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice(PROMPTS))]
            (uid,) = generators[which].insert([prompt], [rng.randint(1, 40)])
            requests[which, uid] = len(tokens)
            tokens[len(tokens)] = []
        for response in generators[which].next()[1]:
            tokens[requests[which, response.uid]].append(response.token)
    for which, generator in enumerate(generators):
        while generated := generator.next_generated():
            for response in generated:
                tokens[requests[which, response.uid]].append(response.token)
        generator.close()
    return tokens


def tokens_with(seed: int, steps: int, **variables: str) -> Outcome:
    """Run ``ordering`` in a process of its own, with these variables: tokens by request, attention calls by path."""
    return run_program(PROGRAM, "ordering", str(seed), str(steps), variables=variables)


def ordering_stress(seed: int = 0, steps: int = 100) -> dict[str, str]:
    """Compare the tokens under several limits on command buffers with those of gathered blocks.

    Returns:
        The outcome by limit: ``same``, or how the tokens differ, or why the run failed.
    """
    reference = tokens_with(seed, steps, **REFERENCE)
    if reference.error is not None or not reference.values:
        return {"gathered blocks": reference.error or "no output"}
    expected: dict[str, list[int]] = reference.values[0]
    outcome = {}
    for name, variables in VARIANTS.items():
        got = tokens_with(seed, steps, **variables)
        if got.error is not None or not got.values:
            outcome[name] = got.error or "no output"
        else:
            outcome[name] = difference(expected, got.values[0]) or "same"
            if not got.values[-1].get("kernel"):
                outcome[name] += ", but the kernels did not run"
    return outcome


def difference(expected: dict[str, list[int]], got: dict[str, list[int]]) -> str | None:
    """Say where tokens by request differ first, and in how many requests; return None if they are equal."""
    wrong = [request for request, tokens in expected.items() if got.get(request) != tokens]
    if not wrong:
        return None
    first = wrong[0]
    pairs = zip(expected[first], got.get(first, []), strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected[first]), len(got.get(first, []))))
    return f"tokens differ in {len(wrong)} of {len(expected)} requests, first in request {first} at token {at}"


def print_ordering(seed: int, steps: int) -> None:
    """Print the tokens by request, and attention's calls by path."""
    from ...attention.dispatch import dispatch_counts

    print(json.dumps(tokens_of(seed, steps)))
    paths: Counter[str] = Counter()
    for choice, calls in dispatch_counts().items():
        paths[choice.path] += calls
    print(json.dumps(paths))


# For the report -----------------------------------------------------------------------------------------------------

KERNEL = {None: "auto", True: "on", False: "off"}
Finding = tuple[bool, Any]  # passed (also if it cannot run here), and its section of the report


def threads(config: PagedConfig) -> Finding:
    """Check that Metal allows each decode kernel at least the threads of its group."""
    if backend() != "metal":
        return True, {"not run": "only Metal has this limit and names it in error messages"}
    outcome = run_program(PROGRAM, "threads", str(config.block_size))
    found: dict[str, Any] = {"how": THREADS_METHOD, "shapes": outcome.values}
    if outcome.error is not None:
        found["error"] = outcome.error
    enough = all(value["allowed"] is None or value["allowed"] >= value["needed"] for value in outcome.values)
    return enough and outcome.error is None, found


def ordering(config: PagedConfig) -> Finding:
    """Check that tokens do not depend on how MLX cuts command buffers."""
    why = device_unsupported_reason()
    if why is not None:
        return True, {"not run": f"{why}, so there are no command buffers"}
    if config.kernel is False:
        return True, {"not run": "the kernels are off"}
    found = ordering_stress()
    return all(text == "same" for text in found.values()), found


def speed(config: PagedConfig) -> Finding:
    """Measure the tokens per second of a small model, stock and paged."""
    variables = {"MLX_PAGED_KERNEL": KERNEL[config.kernel], "MLX_PAGED_BLOCK_SIZE": str(config.block_size)}
    outcome = run_program(PROGRAM, "speed", variables=variables)
    if outcome.error is not None or not outcome.values:
        return False, {"error": outcome.error or "no output"}
    return True, outcome.values[-1]


# Section of the report, description, and check.
CHECKS: tuple[tuple[str, str, Callable[[PagedConfig], Finding]], ...] = (
    ("threads", "threads per group that Metal allows", threads),
    ("ordering", "order of command buffers", ordering),
    ("speed", "tokens per second", speed),
)


def run_checks(report: Report, config: PagedConfig) -> int:
    """Run all checks, print their outcomes, add them to the report, and return how many failed."""
    failed = 0
    for section, what, check in CHECKS:
        report.begin(what)
        passed, found = check(config)
        failed += not passed
        report.add(section, found)
        print(f"{what}: {found.get('not run') or ('passed' if passed else f'FAILED: {found}')}", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1] == "threads":
        print_threads(int(sys.argv[2]))
    elif sys.argv[1] == "ordering":
        print_ordering(int(sys.argv[2]), int(sys.argv[3]))
    else:
        print(json.dumps(measure()))
