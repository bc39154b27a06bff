"""A script that is one of several ranks: plays the given scenarios and writes their outcomes to a file.

python worker.py FOLDER SCENARIO...
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from mlx_paged.ranks.world import ranks_of
from tests.support.ranks import faults, scenarios


def main() -> None:
    folder, *names = sys.argv[1:]
    rank = int(os.environ["MLX_RANK"])
    if names[0].startswith("fault:"):
        faults.play(names[0].removeprefix("fault:"), Path(folder))
        return
    found = scenarios.play(names)
    world = scenarios.World()
    ranks = ranks_of(world.model)
    assert ranks is not None
    found["checksum"] = ranks.checksum
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
