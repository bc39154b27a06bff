"""The POST endpoints, with those of vLLM, and the OpenAPI description of these and of the GET pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic.json_schema import models_json_schema

from ..errors import invalid
from ..request import ChatInput, Input, ServerRequest
from .chat import (
    ChatBody,
    ChatForm,
    CompletionBody,
    CompletionForm,
    Messages,
    TemplateParameters,
    TokenIds,
    chat_request,
    completion_request,
)
from .fields import Body, ToolList
from .messages import CountBody, MessageBody, MessageForm, count_tokens, message_request
from .pieces import Form, Head
from .responses import ResponseBody, ResponseForm, response_request

if TYPE_CHECKING:
    from ..texts import LoadedTexts


class Endpoint(NamedTuple):
    """A POST endpoint that generates.

    Attributes:
        path: path of its URL.
        summary: summary in the OpenAPI description.
        body: pydantic model of the body.
        request, form: make the request from a body, and the form of its answers.
        aliases: other paths.
    """

    path: str
    summary: str
    body: type[Body]
    request: Callable[[Any, Mapping[str, Any]], ServerRequest]
    form: Callable[[Head, Any], Form]
    aliases: tuple[str, ...] = ()


class Computation(NamedTuple):
    """A POST endpoint that generates nothing.

    Attributes:
        path, summary, body, aliases: as for an :class:`Endpoint`.
        answer: makes the answer from the body and the model's texts. It is called in a worker thread.
    """

    path: str
    summary: str
    body: type[Body]
    answer: Callable[[Any, LoadedTexts], dict[str, Any]]
    aliases: tuple[str, ...] = ()


class Page(NamedTuple):
    """A GET endpoint.

    Attributes:
        answer: makes the response to a request.
        summary: summary in the OpenAPI description; "": the page is left out there.
        kind: media type of the response.
        is_open: whether it is served without an API key.
    """

    answer: Callable[..., Any]
    summary: str = ""
    kind: str = "application/json"
    is_open: bool = False


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


CHAT = Endpoint(
    "/v1/chat/completions",
    "Chat completions, as in OpenAI's API",
    ChatBody,
    chat_request,
    ChatForm,
    ("/chat/completions",),  # as in mlx-lm
)
COMPLETIONS = Endpoint(
    "/v1/completions", "Completions of prompts, as in OpenAI's API", CompletionBody, completion_request, CompletionForm
)
RESPONSES = Endpoint(
    "/v1/responses",
    "Responses, as in OpenAI's API",
    ResponseBody,
    response_request,
    ResponseForm,
)
MESSAGES = Endpoint(
    "/v1/messages",
    "Messages, as in Anthropic's API",
    MessageBody,
    message_request,
    MessageForm,
)
COUNT_TOKENS = Computation(
    "/v1/messages/count_tokens",
    "Number of tokens in the prompt of a message, as in Anthropic's API",
    CountBody,
    count_tokens,
)
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
