"""The house stays one to live in: files that can be read in one go, folders that can be looked over."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("mlx_paged", "patches", "tests", "scripts")
SUFFIXES = {".py", ".cuh", ".metal", ".cpp", ".hpp"}
MOST_LINES, MOST_FILES = 400, 12


def files_of(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES and path.is_file()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_is_long(folder: str) -> None:
    files = files_of(folder)
    assert files
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_folder_is_full(folder: str) -> None:
    counts: dict[str, int] = {}
    for path in files_of(folder):
        if path.name != "__init__.py":
            parent = str(path.parent.relative_to(ROOT))
            counts[parent] = counts.get(parent, 0) + 1
    assert {parent: count for parent, count in counts.items() if count > MOST_FILES} == {}


# Modules that no test imports and that no test file is named after: where what they do is tested, from outside.
TESTED_IN = {
    "__main__": "cli/test_command_line.py",
    "backend_check": "cli/test_command_line.py",
    "cache.left_padding": "cache/test_batch_cache.py",
    "cli.over_ranks": "cli/ranks/test_generate_over_ranks.py",
    "cli.terminal": "cli/test_progress.py",
    "engine.grammar.schema_fault": "engine/grammar/test_compiler.py",
    "engine.ranks.agreement": "engine/ranks/test_ranks.py",
    "engine.ranks.pool_agreement": "cli/ranks/test_generate_over_ranks.py",
    "kv.storage.split": "kv/pool/test_pool_memory.py",
    "prefix.held_blocks": "prefix/test_radix.py",
    "prefix.insertion": "prefix/test_radix_properties.py",
    "prefix.radix_node": "prefix/test_radix_properties.py",
    "prefix.radix_path": "prefix/test_radix.py",
    "serve.api.checks": "serve/test_server_input.py",
    "serve.api.forms": "serve/api/test_translations.py",
    "serve.capacity": "serve/test_server_access.py",
    "serve.report.server_report": "serve/report/test_cache_page.py",
    "patches.cache.adoption": "patches/models/test_llama4.py",
    "patches.generate.steps": "patches/test_parity.py",
    "patches.models.switch_layers": "patches/nn/test_quantized.py",
    "patches.models.transformer_block": "engine/compiled/test_narrow_layers.py",
    "patches.server.computing.computing_loop": "serve/health/test_server_faults.py",
    "patches.server.computing.ranked_loop": "cli/ranks/test_server_over_ranks.py",
    "patches.server.computing.supervisor": "serve/health/test_server_faults.py",
    "patches.sharded_load": "cli/ranks/test_generate_over_ranks.py",
    "patches.server.handler": "serve/test_server.py",
    "patches.server.prompt_process": "patches/server/test_prompt_maker.py",
    "patches.server.wanted_logprobs": "serve/test_server_stops.py",
    "generate": "cli/test_command_line.py",
    "serve.api.completions": "serve/api/test_clients.py",
    "serve.api.messages": "serve/api/test_translations.py",
    "serve.api.response_form": "serve/api/test_translations.py",
    "kernels.cuda.nvrtc": "kernels/test_compiled_kernels.py",
    "kernels.sampling.self_check": "msl/sampling/test_draw_text.py",
    "cli.doctor.speed": "cli/test_doctor_report.py",
    "kv.stats": "kv/pool/test_pool_memory.py",
    "kv.memory": "kv/test_budget.py",
    "patches.replaced": "patches/test_registry.py",
    "patches.server.replacements": "serve/test_server.py",
    "patches.server.answers.tokens": "patches/server/test_stopped_answer.py",
    "patches.cache.probe": "patches/models/test_models.py",
    "patches.cache.pools": "patches/test_live_changes.py",
    "patches.models.llama": "patches/test_parity.py",
    "patches.models.attention": "patches/test_parity.py",
    "patches.models.qwen3": "patches/test_parity.py",
    "patches.models.gemma3": "patches/test_parity.py",
    "patches.models.gemma2": "patches/models/test_models.py",
}


def test_every_module_is_tested_somewhere() -> None:
    tests = ROOT / "tests"
    named = {path.stem for path in tests.rglob("test_*.py")}
    known = set().union(*(imported_by(path) for path in tests.rglob("*.py")))
    missing = set()
    for folder, prefix in (("mlx_paged", "mlx_paged"), ("patches", "mlx_paged.patches")):
        for path in (ROOT / folder).rglob("*.py"):
            module = ".".join((prefix, *path.relative_to(ROOT / folder).with_suffix("").parts))
            own = f"test_{path.stem}"
            if path.stem != "__init__" and module not in known and not {own, f"{own}s"} & named:
                missing.add(module.removeprefix("mlx_paged."))
    assert missing == set(TESTED_IN)
    assert all((tests / where).is_file() for where in TESTED_IN.values())


def imported_by(path: Path) -> set[str]:
    """Names that may be modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
