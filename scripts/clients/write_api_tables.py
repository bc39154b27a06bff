"""Write the tables of parameters in docs/api.md from the one that the server checks with.

python scripts/clients/write_api_tables.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mlx_paged.serve.api.parameters import ENDPOINTS, Endpoint, Parameter, Support

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
BEGIN, END = "<!-- tables: scripts/clients/write_api_tables.py -->\n", "<!-- end of tables -->\n"
WORDS = {Support.SUPPORTED: "yes", Support.NO_EFFECT: "no effect", Support.REFUSED: "400"}


def values_of(parameter: Parameter) -> str:
    """What passes, in few words."""
    schema = parameter.check.schema
    if "enum" in schema:
        return " or ".join(f"`{value}`".replace("'", '"') for value in schema["enum"])
    if "minimum" in schema:
        low, high = schema["minimum"], schema["maximum"]
        return f"{low:g} to {high:g}" if high < 1e6 else "any whole number" if low < 0 else f"from {low:g}"
    return "" if schema.get("type") == "null" else str(schema.get("type", ""))


def table_of(endpoint: Endpoint) -> str:
    lines = [f"### `{endpoint.path}`\n", f"{endpoint.summary}.\n", "| Parameter | | Values | |", "|---|---|---|---|"]
    for support in Support:
        for parameter in endpoint.parameters.values():
            if parameter.support is support:
                word = WORDS[support] + (", required" if parameter.is_required else "")
                lines.append(f"| `{parameter.name}` | {word} | {values_of(parameter)} | {parameter.note} |")
    return "\n".join(lines) + "\n"


def tables() -> str:
    return "\n".join(map(table_of, ENDPOINTS.values()))


def updated(page: str) -> str:
    """The page with the tables as they are now."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
