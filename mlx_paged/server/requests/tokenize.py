"""/tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import invalid
from ..request import ChatInput, Input
from .chat import Messages, TemplateParameters
from .completions import TokenIds
from .fields import Body, ToolList

if TYPE_CHECKING:
    from ..prompting import PromptMaker
    from ..texts import LoadedTexts


class TokenizeBody(TemplateParameters):
    """The body of ``/tokenize``."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: ToolList[dict[str, Any]] | None = None
    model: str | None = None


class DetokenizeBody(Body):
    """The body of ``/detokenize``."""

    tokens: TokenIds
    model: str | None = None


def _input(body: TokenizeBody) -> Input:
    """Return the text or chat to tokenize. Raises RequestRefused unless exactly one is given."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("exactly one of prompt and messages is required", "prompt")
    if body.prompt is not None:
        return body.prompt
    return ChatInput([dict(m) for m in body.messages or ()], body.tools, dict(body.chat_template_kwargs or {}))


def tokenize(body: TokenizeBody, prompts: PromptMaker, texts: LoadedTexts) -> dict[str, Any]:
    """Return the answer of ``/tokenize``."""
    tokens = prompts.made(_input(body), texts).tokens
    return {"count": len(tokens), "tokens": tokens}


def detokenize(body: DetokenizeBody, prompts: PromptMaker, texts: LoadedTexts) -> dict[str, Any]:
    """Return the answer of ``/detokenize``."""
    if max(body.tokens) >= texts.vocab_size:
        raise invalid(f"tokens: token ids must be from 0 to {texts.vocab_size - 1}", "tokens")
    return {"prompt": texts.decode(body.tokens)}
