"""What goes to the process that makes prompts, and what comes back."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

LENGTH = struct.Struct(">Q")


@dataclass(frozen=True)
class PromptJob:
    """What a prompt is made from.

    Attributes:
        request: mlx-lm's CompletionRequest.
        template_kwargs: those of the request, as the client sent them.
        most_tokens: more than these are refused; None: any number.
        allow_template: whether the client may bring its own chat template.
        text_only: render the chat template, but leave the tokens to others: the prompt has images.
    """

    request: Any
    template_kwargs: dict[str, Any] | None
    most_tokens: int | None
    allow_template: bool = False
    text_only: bool = False


@dataclass(frozen=True)
class MadePrompt:
    """mlx-lm's result of ``_tokenize``, without images; or, for a prompt that has some, the rendered text alone."""

    tokens: list[int]
    segments: list[list[int]]
    segment_types: list[str]
    initial_state: str
    text: str | None = None


def send(stream: BinaryIO, payload: bytes) -> None:
    stream.write(LENGTH.pack(len(payload)))
    stream.write(payload)
    stream.flush()


def receive(stream: BinaryIO) -> bytes:
    """Raises EOFError: the other side has ended."""
    head = stream.read(LENGTH.size)
    payload = stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
    if not payload:
        raise EOFError
    return payload
