"""The variable that is set before MLX is imported: no CUDA graphs over NCCL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged.startup import GRAPHS

# Prints MLX's variables at the first import of MLX, on the given platform.
PROBE = """
import json, os, sys
sys.platform = {platform!r}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx" or name.startswith("mlx."):
            found = {{key: value for key, value in os.environ.items() if key.startswith("MLX_")}}
            print(json.dumps(found), file=sys.stderr, flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""


def at_import(tmp_path: Path, arguments: list[str], platform: str = sys.platform, **given: str) -> dict[str, str]:
    """Return MLX's variables at the first import of MLX in a process with these arguments and variables."""
    (tmp_path / "sitecustomize.py").write_text(PROBE.format(platform=platform))
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLX_")}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    run = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**env, **given},
        cwd=tmp_path,
        check=True,
    )
    found: dict[str, str] = json.loads(run.stderr.splitlines()[-1])
    return found


NCCL = {"NCCL_HOST_IP": "127.0.0.1"}
LONGER = {"MLX_MAX_MB_PER_BUFFER": "77"}
# The script that pip writes for an entry point.
SCRIPT = "import sys\nfrom mlx_paged.generate import main\nsys.exit(main())\n"


@pytest.mark.parametrize(
    ("arguments", "platform", "given", "found"),
    [
        (["-m", "mlx_paged", "doctor"], sys.platform, NCCL, {GRAPHS: "0"}),
        (["-m", "mlx_paged.server"], sys.platform, NCCL, {GRAPHS: "0"}),
        (["-mmlx_paged"], sys.platform, NCCL, {GRAPHS: "0"}),
        (["mlx_paged.generate"], sys.platform, NCCL, {GRAPHS: "0"}),
        (["-m", "mlx_paged", "doctor"], sys.platform, {}, {}),
        (["-m", "mlx_paged", "doctor"], sys.platform, {**NCCL, GRAPHS: "1"}, {GRAPHS: "1"}),
        # Longer command buffers may hold the GPU until macOS ends the process.
        (["-m", "mlx_paged.server"], "darwin", {}, {}),
        (["-m", "mlx_paged.server"], "darwin", LONGER, LONGER),
    ],
)
def test_only_graphs_over_nccl_are_disabled_before_mlx_is_imported(
    arguments: list[str], platform: str, given: dict[str, str], found: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "mlx_paged.generate").write_text(SCRIPT)
    assert at_import(tmp_path, arguments, platform, **given) == found
