"""The fields of a JSON line of a prompts file, named and checked as in the server's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ..config import MAX_PROMPT_LOOKUP
from ..server.constraint import constraint_of
from ..server.errors import invalid
from ..server.requests.chat import Messages
from ..server.requests.fields import Sampling, StopField, Tokens, validation_refusal


class PromptLine(Sampling):
    """A prompt or a chat, and what is asked of its answer."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Messages | None = None
    id: Any = None
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None
    n: Literal[1] | None = None
    stop: StopField = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_PROMPT_LOOKUP)] | None = None


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check a line and return its values that are not null. Raises RequestRefused, which names the unusable value."""
    values = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(set(values) - set(PromptLine.model_fields))
    if unknown:
        raise invalid(f"{', '.join(map(repr, unknown))}: not an option of a prompts file")
    if ("prompt" in values) == ("messages" in values):
        raise invalid("exactly one of 'prompt' and 'messages' is required")
    try:
        line = PromptLine.model_validate(values)
    except ValidationError as error:
        raise validation_refusal(error) from None
    values = {name: value for name in values if (value := getattr(line, name)) is not None}
    constraint_of(values, chat=False)
    if "seed" in values:
        values["seed"] %= 1 << 64
    return values
