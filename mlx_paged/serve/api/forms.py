"""Which chat a body means, and which form its answer has, by endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import messages, responses
from .chat import ChatForm
from .completions import CompletionForm, Echo
from .form import Form
from .messages import MessageForm
from .parameters import COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES, Endpoint
from .pieces import Head
from .response_form import ResponseForm


def translated(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat that a checked body means; one of a chat or a completion is what it is.

    Raises:
        RequestRefused: with status 400, naming the parameter.
    """
    if endpoint is RESPONSES:
        return responses.chat_of(body)
    if endpoint in (MESSAGES, COUNT_TOKENS):
        return messages.chat_of(body)
    return dict(body)


def form_of(
    endpoint: Endpoint, head: Head, body: Mapping[str, Any], num_top: int | None, echoes: Sequence[Echo] = ()
) -> Form:
    """The form of the answers.

    Args:
        endpoint: that was asked.
        head: of the answers.
        body: as it was sent, checked.
        num_top: see CompletionForm.
        echoes: see CompletionForm.
    """
    if endpoint is RESPONSES:
        return ResponseForm(head, body)
    if endpoint is MESSAGES:
        return MessageForm(head)
    options: dict[str, Any] = {
        "includes_usage": bool(body.get("stream_options", {}).get("include_usage")),
        "tells_logprobs": bool(body.get("logprobs")) or body.get("top_logprobs", 0) > 0,
    }
    if endpoint is COMPLETIONS:
        return CompletionForm(head, **options, num_top=num_top, echoes=echoes)
    return ChatForm(head, **options)
