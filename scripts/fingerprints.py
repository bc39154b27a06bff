"""Fingerprints of the installed mlx-lm: name, fingerprint, and whether it is the one a replacement was written for.

    python scripts/fingerprints.py                                           # all that are replaced or relied on
    python scripts/fingerprints.py mlx_lm.models.llama.Attention.__call__    # one, e.g. for a new replacement

Exits with 1 if a symbol is missing or differs from the known one.
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_paged.patches import registry, samplers
from mlx_paged.patches.patch import fingerprint
from mlx_paged.server import loaded_models


def known_fingerprints() -> dict[str, str]:
    """Return the fingerprints that symbols of mlx-lm must have, by name."""
    known = {patch.target: patch.fingerprint for patch in registry.all_patches()}
    known |= {f"mlx_lm.server.{name}": value for name, value in loaded_models.KNOWN.items()}
    return known | {f"mlx_lm.sample_utils.{name}": value for name, value in samplers.KNOWN.items()}


def installed_fingerprint(target: str) -> str | None:
    """Return the fingerprint of an installed symbol; None if there is none or its source cannot be read."""
    try:
        return fingerprint(pkgutil.resolve_name(target))
    except (ImportError, AttributeError, ValueError, OSError, TypeError):
        return None


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line per symbol."""
    parser = argparse.ArgumentParser(description="Print fingerprints of the installed mlx-lm.")
    parser.add_argument("name", nargs="?", help="a symbol, such as mlx_lm.models.llama.Attention.__call__")
    name = parser.parse_args(argv).name
    known, differs = known_fingerprints(), False
    for target in known if name is None else [name]:
        present = installed_fingerprint(target)
        verdict = "known" if present == known.get(target) else f"not the known one, {known.get(target)}"
        if target not in known:
            verdict = "not replaced by this package"
        differs = differs or present is None or (target in known and verdict != "known")
        print(f"{target}  {present or 'missing'}  {verdict}")
    sys.exit(int(differs))


if __name__ == "__main__":
    main()
