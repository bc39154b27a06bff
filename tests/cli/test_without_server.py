"""Commands where only mlx-lm and its packages are installed: generate works, and what needs more says what."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged.cli.terminal import SERVER_PACKAGES

PROGRAM = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
from mlx_paged.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process without the packages of the server and of grammars."""
    program = PROGRAM.format(missing=[*SERVER_PACKAGES, "llguidance"])
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_generate_needs_no_package_of_the_server(demo_model_folder: Path) -> None:
    ended = run("generate", "--model", str(demo_model_folder), "--prompt", "Hello", "--max-tokens", "3")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "Generation: 3 tokens" in ended.stdout


def test_doctor_needs_no_package_of_the_server() -> None:
    assert run("doctor", "--help").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (["server"], 78, "the server needs starlette, uvicorn, pydantic, prometheus_client: pip install"),
        (["generate", "--prompts-file", "x"], 1, "--prompts-file needs starlette, "),
        (["generate", "--json-schema", "x"], 1, "--json-schema: constrained answers need the package llguidance"),
    ],
)
def test_what_needs_more_packages_names_them(arguments: list[str], status: int, error: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == status and error in ended.stderr, ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr
