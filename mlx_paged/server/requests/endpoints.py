"""The list of POST endpoints, vLLM's /tokenize and /detokenize, and the OpenAPI description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic.json_schema import models_json_schema

from ..errors import invalid
from ..request import ChatInput, Input
from .chat import CHAT, COMPLETIONS, Messages, TemplateParameters, TokenIds
from .fields import Body, Computation, Endpoint, ToolList
from .messages import COUNT_TOKENS, MESSAGES
from .responses import RESPONSES

if TYPE_CHECKING:
    from ..texts import LoadedTexts


class Page(NamedTuple):
    """A GET endpoint.

    Attributes:
        answer: makes the response to a request.
        summary: summary in the OpenAPI description; "": the page is left out there.
        kind: media type of the response.
    """

    answer: Callable[..., Any]
    summary: str = ""
    kind: str = "application/json"


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


def tokenize(body: TokenizeBody, texts: LoadedTexts) -> dict[str, Any]:
    """Return the answer of ``/tokenize``."""
    tokens = texts.make_prompt(_input(body)).tokens
    return {"count": len(tokens), "tokens": tokens}


def detokenize(body: DetokenizeBody, texts: LoadedTexts) -> dict[str, Any]:
    """Return the answer of ``/detokenize``."""
    if max(body.tokens) >= texts.vocab_size:
        raise invalid(f"tokens: token ids must be from 0 to {texts.vocab_size - 1}", "tokens")
    return {"prompt": texts.decode(body.tokens)}


TOKENIZE = Computation("/tokenize", "Tokens of a text or of messages, as in vLLM", TokenizeBody, tokenize)
DETOKENIZE = Computation("/detokenize", "Text of tokens, as in vLLM", DetokenizeBody, detokenize)
_ALL: tuple[Endpoint | Computation, ...] = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE)
ENDPOINTS = {each.path: each for each in _ALL}


def description(version: str, pages: Mapping[str, Page], *, has_keys: bool = False) -> dict[str, Any]:
    """Return the server's OpenAPI description.

    Args:
        version: version of the server.
        pages: GET endpoints by path.
        has_keys: whether clients need an API key.
    """
    models = [(endpoint.body, "validation") for endpoint in ENDPOINTS.values()]
    names, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS.values():
        answers = _answers("application/json")
        if "stream" in endpoint.body.model_fields:
            answers["200"]["content"]["text/event-stream"] = {"schema": {}}
        body = {"required": True, "content": {"application/json": {"schema": names[endpoint.body, "validation"]}}}
        for path in (endpoint.path, *endpoint.aliases):
            paths[path] = {"post": {"summary": endpoint.summary, "requestBody": body, "responses": answers}}
    for path, page in pages.items():
        if page.summary:
            paths[path] = {"get": {"summary": page.summary, "responses": _answers(page.kind)}}
    components = {"schemas": {**schemas["$defs"], "Error": {"type": "object", "required": ["error"]}}}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "mlx_paged.server", "version": version},
        "paths": paths,
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _answers(kind: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "The answer", "content": {kind: {"schema": {}}}},
        "default": {"description": "An error, in the form of the API", "content": error},
    }
