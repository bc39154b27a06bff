"""What the doctor runs besides single kernels, for its report: each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...config import PagedConfig
from ...kernels.availability import device_unsupported_reason
from ...kernels.build import backend
from .ordering import ordering_stress
from .report import Report, run_program
from .threads import HOW

KERNEL = {None: "auto", True: "on", False: "off"}
Finding = tuple[bool, Any]  # whether it passed or could not be run, and what the report says of it


def threads(config: PagedConfig) -> Finding:
    """Return how many threads Metal allows in a group of each kernel; fails where it allows fewer than a kernel has."""
    if backend() != "metal":
        return True, {"not run": "only Metal has such a limit, and only MLX's errors there name it"}
    outcome = run_program("mlx_paged.cli.doctor.threads", str(config.block_size))
    found: dict[str, Any] = {"how": HOW, "shapes": outcome.values}
    if outcome.error is not None:
        found["error"] = outcome.error
    enough = all(value["allowed"] is None or value["allowed"] >= value["needed"] for value in outcome.values)
    return enough and outcome.error is None, found


def ordering(config: PagedConfig) -> Finding:
    """Do tokens depend on how MLX cuts command buffers?"""
    why = device_unsupported_reason()
    if why is not None:
        return True, {"not run": f"{why}, so there are no command buffers"}
    if config.kernel is False:
        return True, {"not run": "the kernels are off"}
    found = ordering_stress()
    return all(text == "same" for text in found.values()), found


def speed(config: PagedConfig) -> Finding:
    """Tokens per second of a small model, stock and paged."""
    variables = {"MLX_PAGED_KERNEL": KERNEL[config.kernel], "MLX_PAGED_BLOCK_SIZE": str(config.block_size)}
    outcome = run_program("mlx_paged.cli.doctor.speed", variables=variables)
    if outcome.error is not None or not outcome.values:
        return False, {"error": outcome.error or "said nothing"}
    return True, outcome.values[-1]


# The section of the report, what runs, and the check.
CHECKS: tuple[tuple[str, str, Callable[[PagedConfig], Finding]], ...] = (
    ("threads", "threads that Metal allows in a group", threads),
    ("ordering", "the ordering stress", ordering),
    ("speed", "tokens per second", speed),
)


def run_checks(report: Report, config: PagedConfig) -> int:
    """Run all, print how they ended and add them to the report; returns how many failed."""
    failed = 0
    for section, what, check in CHECKS:
        report.begin(what)
        passed, found = check(config)
        failed += not passed
        report.add(section, found)
        print(f"{what}: {found.get('not run') or ('passed' if passed else f'FAILED: {found}')}", flush=True)
    return failed
