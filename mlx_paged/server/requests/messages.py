"""Anthropic's Messages: the body, translated to a chat, the answer and the events of its stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ..agents import result_text
from ..answer_reader import Delta
from ..answers import Event, Head, Piece, Usage
from ..errors import RequestRefused, invalid
from ..request import ChatInput, ServerRequest
from .chat import TemplateParameters, engine_options, template_kwargs
from .fields import (
    Body,
    Computation,
    Endpoint,
    FlatSchemaFormat,
    ModelParameters,
    NamedFunction,
    NamedTool,
    SamplingParameters,
    SchemaFormat,
    Several,
    Stops,
    StructuredOutputs,
    Tokens,
    ToolList,
    ToolParameters,
    check_not_empty,
    check_stops,
)

if TYPE_CHECKING:
    from ..texts import LoadedTexts

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Several[dict[str, Any]]


# Types of tools that clients run and whose schemas only Anthropic's models know.
TRAINED_TOOLS = ("bash_", "text_editor_", "computer_", "memory_")


class MessageTool(Body):
    """A tool. The client runs those of type ``custom`` or without a type; those that run on Anthropic's servers are
    ignored."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None

    @property
    def is_own(self) -> bool:
        return self.type in (None, "custom")

    @model_validator(mode="after")
    def _has_schema(self) -> MessageTool:
        if self.is_own and self.input_schema is None:
            raise ValueError("input_schema is required for a client tool")
        if str(self.type).startswith(TRAINED_TOOLS):
            raise ValueError(f"tools of type {str(self.type)[:80]} are not supported; describe the tool as type custom")
        return self

    def unused(self) -> list[str]:
        return [] if self.is_own else [str(self.type)[:80]]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    format: FlatSchemaFormat | None = None
    effort: str | None = None


class CountBody(TemplateParameters, SamplingParameters, ModelParameters):
    """The body of ``/v1/messages/count_tokens``: that of ``/v1/messages`` without ``max_tokens`` and ``stream``."""

    messages: Annotated[Several[MessageParam], AfterValidator(check_not_empty)] = Field(
        description="texts, images, tool uses and results, thinking"
    )
    system: Annotated[str | Several[dict[str, Any]], AfterValidator(check_not_empty)] | None = None
    stop_sequences: Annotated[Stops | None, AfterValidator(check_stops)] = None
    tools: ToolList[MessageTool] | None = Field(
        None, description="of type `custom`; tools that run on Anthropic's servers are ignored"
    )
    tool_choice: ToolChoice | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="as in vLLM")
    output_config: OutputConfig | None = Field(
        None, description="`format` of type `json_schema`; `effort`, like `reasoning_effort` in chats"
    )
    cache_control: dict[str, Any] | None = Field(
        None,
        description="the prompt is evicted after others; in `tools` or `system`: only its system messages",
    )


class MessageBody(CountBody):
    """The body of ``/v1/messages``."""

    max_tokens: Tokens
    stream: bool | None = None


def message_request(body: CountBody, defaults: Mapping[str, Any]) -> ServerRequest:
    """Return the request of a Messages body.

    Raises:
        RequestRefused: 400, naming the parameter.
    """
    messages = [*_system(body.system), *(m for given in body.messages for m in _messages(given))]
    if not messages:
        raise invalid("messages: the content must not be empty", "messages")
    config = body.output_config or OutputConfig()
    asked = ToolParameters(
        response_format=None if config.format is None else SchemaFormat(json_schema=config.format),
        structured_outputs=body.structured_outputs,
        tools=[_tool(tool) for tool in body.tools or () if tool.is_own],
        **_tool_choice(body.tool_choice),
    )
    return ServerRequest(
        inputs=[
            ChatInput(
                messages,
                asked.shown_tools,
                template_kwargs(body, config.effort),
                continues=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
            )
        ],
        max_tokens=getattr(body, "max_tokens", None),
        calls_once=asked.parallel_tool_calls is False,
        stops=tuple(body.stop_sequences or ()),
        constraint=asked.constraint(),
        **{**engine_options(body, defaults), "keeps": _kept_part(body)},
    )


def count_tokens(body: CountBody, texts: LoadedTexts) -> dict[str, Any]:
    """Return the answer of ``/v1/messages/count_tokens``."""
    return {"input_tokens": len(texts.make_prompt(message_request(body, {}).inputs[0]).tokens)}


def _kept_part(body: CountBody) -> str:
    """Return the part of the prompt that ``cache_control`` marks (see ``ServerRequest.keeps``)."""

    def is_marked(content: Any) -> bool:
        return isinstance(content, list) and any(
            isinstance(each, dict) and each.get("cache_control") for each in content
        )

    if body.cache_control or any(is_marked(message.content) for message in body.messages):
        return "prompt"
    return "system" if is_marked(body.system) or any(tool.cache_control for tool in body.tools or ()) else ""


def _blocks(where: str, given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if not isinstance(given, list) or not all(isinstance(block, dict) for block in given):
        raise invalid(f"{where} must be a string or a list of blocks", where)
    return given


def _system(given: Any) -> list[dict[str, Any]]:
    blocks = [] if given is None else _blocks("system", given)
    if any(block.get("type") != "text" or not isinstance(block.get("text"), str) for block in blocks):
        raise invalid("system: each block must be of type text and have a text", "system")
    text = "\n".join(block["text"] for block in blocks)
    return [{"role": "system", "content": text}] if text else []


def _messages(given: MessageParam) -> list[dict[str, Any]]:
    """Return one of Anthropic's messages as messages of a chat, where tool results are messages of their own."""
    role = given.role
    parts: list[dict[str, Any]] = []
    calls, results, thoughts = [], [], []
    for block in _blocks("messages", given.content):
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and role == "user":
            parts.append({"type": "image_url", "image_url": {"url": _image(block.get("source"))}})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = result_text(_blocks("messages", block.get("content") or ""))
            text = f"Error: {text}" if block.get("is_error") else text
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # encrypted: only its author can read it
        else:
            what = f"a block of type {str(kind)[:80]!r} is malformed or not supported in a message of role {role!r}"
            raise invalid(f"messages: {what}", "messages")
    if not (parts or calls or thoughts):
        if role == "user" and not results:
            raise invalid("messages: the content of a user message must not be empty", "messages")
        return results
    message: dict[str, Any] = {"role": role, "content": parts}
    if all(part["type"] == "text" for part in parts):
        message["content"] = "\n".join(part["text"] for part in parts)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [*results, message]


def _image(source: Any) -> str:
    if isinstance(source, dict) and source.get("type") == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    if isinstance(source, dict) and source.get("type") == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type', 'image/png')};base64,{source['data']}"
    raise invalid("messages: an image must have a source of type base64 or url", "messages")


def _tool(tool: MessageTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(given: ToolChoice | None) -> dict[str, Any]:
    if given is None:
        return {}
    choice: Any = {"auto": "auto", "any": "required", "none": "none"}.get(given.type)
    if given.type == "tool":
        if given.name is None:
            raise invalid("tool_choice of type tool requires a name", "tool_choice")
        choice = NamedTool(function=NamedFunction(name=given.name))
    return {"tool_choice": choice, "parallel_tool_calls": not given.disable_parallel_tool_use}


# The answer -------------------------------------------------------------------------------------------------------


class MessageForm:
    """The form of an answer in Anthropic's Messages.

    Args:
        head: id, model and time of the answer.
        body: body of the request.
    """

    repeats_body = False

    def __init__(self, head: Head, body: CountBody) -> None:
        self._head = head
        self._num_blocks = 0
        self._open: str | None = None  # type of the open content block
        self._last = Piece()

    def begin(self, usage: Usage) -> list[Event]:
        message = {**self._message([], None, None), "usage": self._usage(usage)}
        return [self._event("message_start", message=message)]

    def piece(self, piece: Piece) -> list[Event]:
        self._last = piece
        events = []
        for delta in piece.folded():
            if delta.is_first:
                events += self._close()
            if not delta.text and not delta.is_first:
                continue
            events += self._to(_begun(delta))
            if delta.text:
                kind, field = _DELTAS[delta.kind]
                events.append(self._delta(kind, **{field: delta.text}))
        return events

    def end(self, usage: Usage) -> list[Event]:
        reason, stop = _reason(self._last)
        return [
            *self._close(),
            self._event(
                "message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=self._usage(usage)
            ),
            self._event("message_stop"),
        ]

    def failed(self, refusal: RequestRefused) -> list[Event]:
        return [Event(refusal.anthropic_body(), "error")]

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        blocks = [_block(each) for each in answer.folded() if each.text or each.call is not None]
        if not any(block["type"] != "thinking" for block in blocks):
            blocks.append({"type": "text", "text": ""})
        return {**self._message(blocks, *_reason(answer)), "usage": self._usage(usage)}

    def _message(self, content: list[Any], reason: str | None, stop: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
        }

    @staticmethod
    def _usage(usage: Usage) -> dict[str, int]:
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_read_input_tokens": usage.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion,
        }

    def _event(self, kind: str, **values: Any) -> Event:
        return Event({"type": kind, **values}, kind)

    def _delta(self, kind: str, **values: Any) -> Event:
        return self._event("content_block_delta", index=self._num_blocks - 1, delta={"type": kind, **values})

    def _to(self, block: dict[str, Any]) -> list[Event]:
        """Return the events that open a block; none if one of its type is open."""
        if self._open == block["type"]:
            return []
        events = self._close()
        self._open = block["type"]
        self._num_blocks += 1
        return [*events, self._event("content_block_start", index=self._num_blocks - 1, content_block=block)]

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        return [self._event("content_block_stop", index=self._num_blocks - 1)]


# By the kind of delta: its type and field in streams.
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _begun(delta: Delta) -> dict[str, Any]:
    """Return the content block that a delta begins, without its content."""
    if delta.call is not None:
        return {"type": "tool_use", "id": delta.call.id, "name": delta.call.name, "input": {}}
    if delta.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _block(delta: Delta) -> dict[str, Any]:
    if delta.call is not None:
        return {**_begun(delta), "input": json.loads(delta.text)}
    return {**_begun(delta), _DELTAS[delta.kind][1]: delta.text}


def _reason(answer: Piece) -> tuple[str, str | None]:
    if answer.stop is not None:
        return "stop_sequence", answer.stop
    return REASONS.get(answer.finish or "stop", "end_turn"), None


MESSAGES = Endpoint("/v1/messages", "Messages, as in Anthropic's API", MessageBody, message_request, MessageForm)
COUNT_TOKENS = Computation(
    "/v1/messages/count_tokens",
    "Number of tokens in the prompt of a message, as in Anthropic's API",
    CountBody,
    count_tokens,
)
