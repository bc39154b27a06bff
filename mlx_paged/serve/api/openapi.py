"""description(): what the server answers, as OpenAPI has it, from the table of parameters."""

from __future__ import annotations

from typing import Any

from .parameters import ALIASES, ENDPOINTS, Endpoint, Parameter, Support

ERRORS = {
    "400": "a parameter that cannot be used, or is not known",
    "401": "no API key, or a wrong one",
    "404": "there is no such model",
    "408": "the body did not come",
    "411": "the body has no length",
    "413": "the body, or the prompt, is too large",
    "429": "too little memory, or too many requests, at present",
    "500": "an error of the server",
    "501": "what several ranks do not do",
    "503": "the server is loading, shutting down or has failed",
}
PAGES = {
    "/health": ("Whether the server is ready", "application/json", ("503",)),
    "/version": ("Versions", "application/json", ("401",)),
    "/v1/models": ("The models", "application/json", ("401",)),
    "/v1/cache/stats": ("What the pool holds", "application/json", ("401",)),
    "/metrics": ("The same for Prometheus", "text/plain", ("401", "501")),
    "/cache": ("A page that draws the pool", "text/html", ()),
    "/openapi.json": ("This description", "application/json", ()),
}


def description(version: str, *, has_keys: bool = False) -> dict[str, Any]:
    """The server's OpenAPI description.

    Args:
        version: of the server.
        has_keys: whether clients need an API key.
    """
    paths: dict[str, Any] = {endpoint.path: {"post": _post(endpoint)} for endpoint in ENDPOINTS.values()}
    paths |= {alias: paths[path] for alias, path in ALIASES.items()}
    for path, (summary, kind, errors) in PAGES.items():
        paths[path] = {"get": {"summary": summary, "responses": _answers(kind, errors)}}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "mlx_paged.server", "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": {"type": "object", "required": ["error"]}}},
    }
    if has_keys:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _post(endpoint: Endpoint) -> dict[str, Any]:
    answers = _answers("application/json", tuple(ERRORS))
    if "stream" in endpoint.parameters:
        answers["200"]["content"]["text/event-stream"] = {"schema": {}}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _property(parameter) for name, parameter in endpoint.parameters.items()},
        "required": endpoint.required,
        "additionalProperties": False,
    }
    if "stream_options" in endpoint.parameters:
        schema["anyOf"] = [
            {"properties": {"stream": {"const": True}}, "required": ["stream"]},
            {"properties": {"stream_options": {"type": "null"}}},
        ]
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": endpoint.summary, "requestBody": body, "responses": answers}


def _property(parameter: Parameter) -> dict[str, Any]:
    words = {Support.SUPPORTED: "", Support.NO_EFFECT: "No effect: ", Support.REFUSED: "Refused: "}
    text = f"{words[parameter.support]}{parameter.note}"
    schema = dict(parameter.check.schema)
    if not parameter.is_required and schema.get("type") != "null":
        schema = {"anyOf": [schema, {"type": "null"}]}
    return {**schema, **({"description": text} if text else {})}


def _answers(kind: str, errors: tuple[str, ...]) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": "The answer", "content": {kind: {"schema": {}}}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status in errors:
        answers[status] = {"description": ERRORS[status], "content": error}
    return answers
