"""``mlx_paged doctor``: does the paged cache work on this machine? Checks and times each kernel for the shapes of
popular models ("launch" is ours, "MLX's" its own attention for the same shape), and generates with the demo model on
stock mlx-lm and on the paged cache."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import __version__
from ..config import PagedConfig
from ..errors import ConfigError
from ..kernels.availability import backend, device_unsupported_reason, gpu_cores
from ..kernels.fused_attention import NAX_RELEASE, wheel_release
from ..kernels.nvidia import part
from .doctor_kernels import HEADER, rows
from .generate import raise_cpu_cache_limit
from .terminal import Parser, add_version, orderly_end, rate

# Variables that are reported. Not all of the environment: it holds keys and names.
PREFIXES = ("MLX_PAGED_", "MLX_MAX_", "MLX_METAL_", "MTL_")
DEMO_FOLDER = "SmolLM2-135M-Instruct-Q4_1"
GPU_TOKENS, CPU_TOKENS = (256, 128), (8, 6)  # of prompt and answer; on a CPU only to see that it works


def facts() -> dict[str, str]:
    """Return the versions, the system and the device, by label."""
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    info = mx.device_info() if on_gpu else {}
    return {
        "mlx_paged": __version__,
        **{package: metadata.version(package) for package in ("mlx", "mlx-lm")},
        "python": platform.python_version(),
        "system": _system(),
        "device": f"{mx.default_device()} {info.get('device_name', '')}".strip(),
        "architecture": str(info.get("architecture", "") or "unknown"),
        "GPU cores": str(gpu_cores() or "unknown"),
        "memory": _memory(info),
        **_wheel(),
        "kernel dialect": backend() or "none",
        "compiled by": part("cubins").compiler_name() if backend() == "cuda" else "MLX",
        "kernel": device_unsupported_reason() or "can run here",
    }


def _system() -> str:
    release = f"macOS {mac}" if (mac := platform.mac_ver()[0]) else f"{platform.system()} {platform.release()}"
    return f"{release} {platform.machine()}"


def _memory(info: Mapping[str, Any]) -> str:
    """Describe the machine's memory, Metal's recommended limit for a process, and its largest array, in GiB."""
    total = info.get("memory_size") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{total / 2**30:.0f} GiB"
    if "max_recommended_working_set_size" in info:
        text += f", {info['max_recommended_working_set_size'] / 2**30:.0f} GiB for the GPU"
    if "max_buffer_length" in info:
        text += f", {info['max_buffer_length'] / 2**30:.0f} GiB in one array"
    return text


def _wheel() -> dict[str, str]:
    """Return the macOS release that MLX's wheel was built for, where it is known. Only wheels for macOS 26 have kernels
    for an M5's matrix units."""
    release, mac = wheel_release(), platform.mac_ver()[0]
    if release is None:
        return {}
    text = f"for macOS {release}"
    if release < NAX_RELEASE <= int(mac.partition(".")[0]):
        text += f", which does not use an M5's matrix units; a current pip installs the one for macOS {NAX_RELEASE}"
    return {"MLX wheel": text}


# The demo model -----------------------------------------------------------------------------------------------------


def demo_place() -> Path:
    """Return where ``scripts/demo_model.py`` puts the demo model. Raises RuntimeError without a home directory."""
    if own := os.environ.get("MLX_PAGED_CACHE"):
        cache = Path(own)
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        cache = Path(xdg) / "mlx_paged"
    else:
        cache = Path("~/Library/Caches/mlx_paged" if sys.platform == "darwin" else "~/.cache/mlx_paged")
    return cache.expanduser().absolute() / DEMO_FOLDER


def demo_folder() -> Path | None:
    """Return the demo model's folder, or None if it is not there."""
    folder = demo_place()
    return folder if folder.is_dir() else None


def generated(model: Any, prompt: mx.array, count: int) -> tuple[float, list[int]]:
    """Decode greedily. Return the seconds after the first token, and the tokens."""
    step = importlib.import_module("mlx_lm.generate").generate_step  # looked up now: patches replace it
    tokens: list[int] = []
    begin = 0.0
    for token, _ in step(prompt, model, max_tokens=count):
        begin = begin if tokens else time.perf_counter()
        tokens.append(int(token))
    return time.perf_counter() - begin, tokens


def try_demo_model(config: PagedConfig) -> tuple[bool, list[str]]:
    """Generate with the demo model on stock mlx-lm and on the paged cache: the second of two runs each.

    Returns:
        Whether it passed, and lines to print. With 16-bit weights the tokens may differ late in an answer.
    """
    from mlx_lm.utils import load_model

    from ..attention.dispatch import last_dispatch
    from ..patches import registry

    folder = demo_folder()
    if folder is None:
        return True, ["demo model      not run: scripts/demo_model.py fetches it"]
    raise_cpu_cache_limit()
    try:
        model, model_config = load_model(folder)
        num_prompt, count = CPU_TOKENS if mx.default_device() == mx.Device(mx.cpu) else GPU_TOKENS
        prompt = mx.random.randint(0, model_config["vocab_size"], (num_prompt,), key=mx.random.key(1))
        _, (stock_seconds, stock) = [generated(model, prompt, count) for _ in range(2)]
        registry.apply_patches(config)
        try:
            _, (seconds, paged) = [generated(model, prompt, count) for _ in range(2)]
            path = last_dispatch()
        finally:
            registry.remove_patches()
    except (RuntimeError, ValueError, OSError) as error:
        return False, [f"demo model      FAILED: {type(error).__name__}: {str(error)[:500]}"]
    same = next((i for i, (a, b) in enumerate(zip(stock, paged, strict=True)) if a != b), count)
    return same > 0, [
        f"demo model      {num_prompt} tokens of prompt, {count} generated",
        f"  stock         {rate(count - 1, stock_seconds)}",
        f"  paged         {rate(count - 1, seconds)}, the first {same} tokens are stock's"
        + ("" if path is None else f" ({path.path}: {path.reason})"),
    ]


# The command --------------------------------------------------------------------------------------------------------


class Report:
    """What the doctor says: on the terminal, and the same words in a file that is safe to post, as they come.

    Args:
        path: the file, whose folder is created; None: there is no file.

    Attributes:
        failed: number of failures so far.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self.failed = 0
        self._path = path
        self._write("", "w")

    def say(self, text: object = "", *, passed: bool = True) -> None:
        """Print a line, and count it if it tells of a failure."""
        print(text, flush=True)
        self.failed += not passed
        home = os.path.expanduser("~")
        self._write(f"{text}\n".replace(home, "~") if len(home) > 1 else f"{text}\n", "a")

    def _write(self, text: str, mode: str) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode) as out:
                out.write(text)
        except OSError as error:
            raise ConfigError(f"cannot write the report {self._path}: {error.strerror or error}") from None


def run(config: PagedConfig, report_file: Path | None = None) -> int:
    """Print the facts, one line per kernel, and what the demo model did. Return the number of failures.

    Raises:
        ConfigError: the report cannot be written.
    """
    begin = time.perf_counter()
    report = Report(report_file)
    found = facts() | {
        name: value for name, value in os.environ.items() if name.startswith(PREFIXES) and "KEY" not in name
    }
    for name, value in found.items():
        report.say(f"{name:<16}{value}")
    report.say(f"\n{HEADER}\n{'-' * len(HEADER)}")
    for row in rows(config.tokens_per_block, config):
        report.say(row, passed=row.passed)
    passed, lines = try_demo_model(config)
    report.say("\n" + "\n".join(lines), passed=passed)
    report.say(f"\n{time.perf_counter() - begin:.1f} s in all")
    report.say(_verdict(report.failed, config))
    if report_file is not None:
        print(f"the report is in {report_file}")
    return report.failed


def _verdict(failed: int, config: PagedConfig) -> str:
    if failed:
        return f"{failed} failed"
    why = device_unsupported_reason() or ("--kernel is off" if config.kernel is False else None)
    return "all passed" if why is None else f"no kernel ran ({why}); attention without kernels passed for every shape"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the doctor. Exits with status 1 if a line failed."""
    parser = Parser(prog="mlx_paged doctor", description=__doc__)
    PagedConfig.add_arguments(parser)
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="Also write what is printed to a file that is safe to post (the home folder is replaced by ~)",
    )
    add_version(parser)
    with orderly_end("mlx_paged doctor"):
        args = parser.parse(argv)
        config = PagedConfig.from_env().with_arguments(args)
        config.check_rotation()
        config.check_kernel()
        sys.exit(1 if run(config, args.report) else 0)
