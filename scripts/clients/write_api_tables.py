"""Write the tables of parameters in docs/api.md from the models that validate request bodies.

python scripts/clients/write_api_tables.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from mlx_paged.server.requests.endpoints import ENDPOINTS
from mlx_paged.server.requests.fields import NO_EFFECT, REFUSED, Computation, Endpoint

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
BEGIN, END = "<!-- tables: scripts/clients/write_api_tables.py -->\n", "<!-- end of tables -->\n"


def values_of(schema: dict[str, Any]) -> str:
    """Return the values that a schema allows, in a few words."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    kind = kinds[0] if len(kinds) == 1 else {}
    for name in ("const", "enum"):
        if name in kind:
            values = [kind[name]] if name == "const" else [value for value in kind[name] if value is not None]
            return " or ".join(f"`{json.dumps(value)}`" for value in values)
    if "minimum" in kind:
        low, high = kind["minimum"], kind["maximum"]
        return f"{low:g} to {high:g}" if high < 1e6 else "any whole number" if low < 0 else f"from {low:g}"
    return str(kind.get("type", "object" if {"$ref", "oneOf"} & kind.keys() else ""))


def table_of(endpoint: Endpoint | Computation) -> str:
    lines = [f"### `{endpoint.path}`\n", f"{endpoint.summary}.\n", "| Parameter | Values | |", "|---|---|---|"]
    schemas = endpoint.body.model_json_schema()["properties"]
    for name, field in endpoint.body.model_fields.items():
        required = "required; " if field.is_required() else ""
        lines.append(f"| `{name}` | {required}{values_of(schemas[name])} | {field.description or ''} |")
    return "\n".join(lines) + "\n"


def known_table() -> str:
    """Return the table of parameters that are known, and supported by no API or by others only."""
    lines = ["### Other parameters\n", "What an API has no row for above:\n", "| Parameter | | |", "|---|---|---|"]
    lines += [f"| `{name}` | no effect | {why} |" for name, why in NO_EFFECT.items()]
    for name, (why, *allowed) in REFUSED.items():
        unless = "".join(f" unless `{json.dumps(value)}`" for value in allowed)
        lines.append(f"| `{name}` | 400{unless} | {why} |")
    return "\n".join(lines) + "\n"


def tables() -> str:
    return "\n".join([*map(table_of, ENDPOINTS.values()), known_table()])


def updated(page: str) -> str:
    """Return the page with the tables as they are now."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
