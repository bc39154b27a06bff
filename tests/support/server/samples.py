"""Messages, schemas and tools of the requests in these tests."""

from __future__ import annotations

from typing import Any

HI: list[Any] = [{"role": "user", "content": "Hi."}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
CLOCK = {"name": "clock", "description": "Tells the time", "parameters": SCHEMA}
OF_CHAT, OF_RESPONSE = {"type": "function", "function": CLOCK}, {"type": "function", **CLOCK}
OF_MESSAGE = {"name": "clock", "description": "Tells the time", "input_schema": SCHEMA}
WHITE = {str(token): -100 for token in (216, 197, 198, 201, 202, 220, 222)}  # white space of the tokenizer
