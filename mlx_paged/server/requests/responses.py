"""OpenAI's Responses: the body, translated to a chat, the answer and the events of its stream."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field
from pydantic_core import from_json, to_json

from ..agents import INPUT, CallableTool, callable_tools, function_name, ignored_of, result_text
from ..answer_reader import Delta, Token
from ..answers import Event, Head, Piece, Usage
from ..errors import RequestRefused, invalid, not_found
from ..request import ChatInput, ServerRequest
from .chat import TemplateParameters, content_logprobs, engine_options, template_kwargs
from .fields import (
    MAX_REFERENCES,
    MAX_TOOLS,
    AllowedChoice,
    AllowedTools,
    Body,
    Endpoint,
    FlatSchemaFormat,
    ModelParameters,
    NamedFunction,
    NamedTool,
    ObjectFormat,
    SamplingParameters,
    SchemaFormat,
    Several,
    StreamOptions,
    StructuredOutputs,
    TextFormat,
    Tokens,
    ToolList,
    ToolParameters,
    check_not_empty,
)

ITEMS = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("local_shell_call", "local_shell_call_output", "item_reference"),
)
TEXTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
# All but LOGPROBS have no effect: reasoning is not encrypted, and tools of OpenAI do not run here.
INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
    *("web_search_call.results", "web_search_call.action.sources", "file_search_call.results"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url"),
)


class ResponseTool(Body):
    """A tool; other fields depend on its type."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = None
    tools: Several[dict[str, Any]] | None = None

    def unused(self) -> list[str]:
        return ignored_of([{"type": self.type, "format": self.format}, *(self.tools or ())])


class TextOptions(Body):
    format: Annotated[TextFormat | ObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Any = None


class ChosenTool(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedChoices(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Several[ChosenTool], Field(min_length=1)]


class ReasoningOptions(Body):
    effort: str | None = None
    summary: Any = None


def _check_tools(tools: list[ResponseTool]) -> list[ResponseTool]:
    if len(callable_tools([tool.model_dump() for tool in tools])) > MAX_TOOLS:
        raise ValueError(f"must be at most {MAX_TOOLS} with those of namespaces")
    return tools


class ResponseBody(TemplateParameters, SamplingParameters, ModelParameters):
    """The body of ``/v1/responses``."""

    input: Annotated[str | Several[dict[str, Any]], AfterValidator(check_not_empty)] = Field(
        description="a text, or a list of messages, function calls, their outputs and reasoning"
    )
    instructions: str | None = Field(None, description="a system message before all others")
    previous_response_id: str | None = Field(None, description="continue its conversation; 404 if it is not stored")
    store: bool | None = Field(
        None,
        description="`false`: do not store the answer for `previous_response_id` and `GET`; see `--no-response-store`",
    )
    max_output_tokens: Tokens = None
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="no effect")
    text: TextOptions | None = Field(None, description="`format`: `text`, `json_object` or `json_schema`")
    tools: Annotated[ToolList[ResponseTool], AfterValidator(_check_tools)] | None = Field(
        None, description="of type `function`, `custom` or `namespace`; tools that OpenAI runs are ignored"
    )
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[ChosenTool | AllowedChoices, Field(discriminator="type")] | None
    ) = None
    structured_outputs: StructuredOutputs | None = Field(None, description="as in vLLM")
    parallel_tool_calls: bool | None = Field(None, description="`false`: only the first call is returned")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description=f"requires `{LOGPROBS}` in `include`"
    )
    include: Several[str] | None = Field(
        None, description=f"`{LOGPROBS}`; OpenAI's other values have no effect: reasoning is not encrypted"
    )
    prompt_cache_key: str | None = Field(None, description="prompts with a key are evicted after those without")
    reasoning: ReasoningOptions | None = Field(
        None,
        description="`effort`, like `reasoning_effort` in chats; `summary` has no effect: reasoning is returned whole",
    )


def response_request(body: ResponseBody, defaults: Mapping[str, Any]) -> ServerRequest:
    """Return the request of a Responses body.

    Raises:
        RequestRefused: 400, naming the parameter.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            _add(messages, f"input[{index}]", item)
    if not messages:
        raise invalid("input must contain a message", "input")
    for name in body.include or ():
        if name not in INCLUDED:
            raise invalid(f"include: {name[:80]!r} is not supported; allowed are {', '.join(INCLUDED)}", "include")
    wants_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wants_logprobs:
        raise invalid(f"top_logprobs requires {LOGPROBS} in include", "top_logprobs")
    form = None if body.text is None else body.text.format
    asked = ToolParameters(
        response_format=SchemaFormat(json_schema=form) if isinstance(form, FlatSchemaFormat) else form,
        structured_outputs=body.structured_outputs,
        tools=[tool.function for tool in callable_tools([tool.model_dump() for tool in body.tools or ()])],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
    )
    kwargs = template_kwargs(body, body.reasoning.effort if body.reasoning else None)
    return ServerRequest(
        inputs=[ChatInput(messages, asked.shown_tools, kwargs)],
        max_tokens=body.max_output_tokens,
        top_logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        calls_once=body.parallel_tool_calls is False,
        constraint=asked.constraint(),
        **engine_options(body, defaults),
    )


def _add(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Add an input item to the messages of a chat; calls become parts of the assistant's message."""
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise invalid(f"{where}.role must be user, assistant, system or developer", "input")
        message = {"role": "system" if role == "developer" else role, "content": _content(where, item.get("content"))}
        if role == "assistant" and last is not None and not last["content"] and "tool_calls" not in last:
            last["content"] = message["content"]  # joins the reasoning before it
        else:
            messages.append(message)
    elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
        name, arguments = item.get("name"), item.get("arguments")
        if kind != "function_call":
            given = {INPUT: str(item.get("input", ""))} if kind == "custom_tool_call" else item.get("action")
            name, arguments = name or "local_shell", json.dumps(given, ensure_ascii=False)
        if not isinstance(name, str):
            raise invalid(f"{where}: name must be a string", "input")
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        function = {"name": function_name(name, item.get("namespace")), "arguments": arguments}
        last.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        output = item.get("output")
        parts = output if isinstance(output, list) and all(isinstance(part, dict) for part in output) else None
        content = _content(where, output) if parts is None else result_text(parts)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise invalid(f"{where}.content must be a list of objects", "input")
        text = "".join(str(part.get("text", "")) for part in parts)
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    else:
        raise invalid(f"{where}.type must be one of {', '.join(ITEMS)}, got {str(kind)[:80]!r}", "input")


def _content(where: str, given: Any) -> Any:
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise invalid(f"{where} must be a string or a list of parts", "input")
    parts: list[dict[str, Any]] = []
    for part in given:
        kind = part.get("type")
        if kind in TEXTS and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise invalid(f"{where}: a part of type {str(kind)[:80]!r} is malformed or not supported", "input")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _tool_choice(given: Any) -> Any:
    """Return ``tool_choice`` in the form of chats."""
    if isinstance(given, AllowedChoices):
        return AllowedChoice(allowed_tools=AllowedTools(mode=given.mode, tools=[_chosen(each) for each in given.tools]))
    return _chosen(given) if isinstance(given, ChosenTool) else given


def _chosen(given: ChosenTool) -> NamedTool:
    return NamedTool(function=NamedFunction(name=function_name(given.name, given.namespace)))


# The answer -------------------------------------------------------------------------------------------------------

# Parameters of the request that the response repeats, with their defaults.
REPEATED_PARAMETERS: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


class _Item:
    """An output item, open or complete.

    Args:
        kind: ``reasoning``, ``message``, ``function_call`` or ``custom_tool_call``.
        place: its id without the kind's prefix.
        call: fields of the call, under the client's name of the tool, if the item is one.
    """

    PREFIXES: ClassVar = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
    EVENTS: ClassVar = {
        "reasoning": "reasoning_text",
        "message": "output_text",
        "function_call": "function_call_arguments",
        "custom_tool_call": "custom_tool_call_input",
    }

    def __init__(self, kind: str, place: str, call: Mapping[str, Any] | None = None) -> None:
        self.kind, self.event, self.call = kind, self.EVENTS[kind], call or {}
        self.id = f"{self.PREFIXES[kind]}_{place}"
        self._texts: list[str] = []
        self._tokens: list[Token] = []

    def add(self, text: str, tokens: Sequence[Token] = ()) -> None:
        self._texts.append(text)
        self._tokens += tokens

    def part(self) -> dict[str, Any]:
        """Return the content: a field of the item for calls, else its only part."""
        text = "".join(self._texts)
        if self.kind == "function_call":
            return {"arguments": text}
        if self.kind == "custom_tool_call":
            return {"input": _input_of(text)}
        part = {"type": self.event, "text": text}
        return part if self.kind == "reasoning" else {**part, "annotations": [], "logprobs": _logprobs(self._tokens)}

    def as_dict(self, status: str = "completed") -> dict[str, Any]:
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.call:
            return {**head, **self.part(), **self.call}
        more: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {**head, **more, "content": [self.part()]}


class ResponseForm:
    """The form of an answer in OpenAI's Responses.

    Args:
        head: id, model and time of the answer.
        body: body of the request.
    """

    repeats_body = True

    def __init__(self, head: Head, body: ResponseBody) -> None:
        self._head = head
        given = body.model_dump(include=set(REPEATED_PARAMETERS), exclude_none=True, by_alias=True)
        tools = callable_tools([tool.model_dump() for tool in body.tools or ()])
        self._tools = {tool.function["function"]["name"]: tool for tool in tools}
        self._repeated = {name: given.get(name, default) for name, default in REPEATED_PARAMETERS.items()}
        self.keep: Callable[[dict[str, Any]], None] | None = None  # called with the finished response
        self._items: list[dict[str, Any]] = []  # complete ones
        self._open: _Item | None = None
        self._finish: str | None = None
        self._is_cut = False  # an item was
        self._number = -1

    def begin(self, usage: Usage) -> list[Event]:
        response = self._response("in_progress", [], None)
        return [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def piece(self, piece: Piece) -> list[Event]:
        self._finish = piece.finish
        events: list[Event] = []
        for delta in piece.folded():
            if delta.is_first:
                events += self._begin_call(delta)
            elif delta.text and delta.kind != "call":
                events += self._begin("message" if delta.kind == "text" else delta.kind)
            if delta.text:
                events += self._say(delta)
            if delta.is_last:
                events += self._close(is_whole=True)
        return events

    def end(self, usage: Usage) -> list[Event]:
        events = self._close(is_whole=False if self._finish == "length" else None)
        response = self._whole(usage)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failed(self, refusal: RequestRefused) -> list[Event]:
        said = {"code": refusal.code or refusal.kind, "message": str(refusal), "param": refusal.param}
        return [self._event("error", **said)]

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        self.piece(answer)
        self._close(is_whole=False if answer.finish == "length" else None)
        if all(item["type"] == "reasoning" for item in self._items):
            self._items.append(
                self._item("message").as_dict("incomplete" if answer.finish == "length" else "completed")
            )
        return self._whole(usage)

    # The items of an answer -----------------------------------------------------------------------------------

    def _item(self, kind: str, call: Mapping[str, Any] | None = None) -> _Item:
        return _Item(kind, f"{self._head.id}_{len(self._items)}", call)

    def _begin(self, kind: str) -> list[Event]:
        """Begin an item of reasoning or text unless one of that kind is open; return its events."""
        if self._open is not None and self._open.kind == kind:
            return []
        events, item = self._close(), self._item(kind)
        self._open = item
        added = {**item.as_dict("in_progress"), "content": []}
        part = {"item_id": item.id, "output_index": len(self._items), "content_index": 0, "part": item.part()}
        return [*events, self._added(added), self._event("response.content_part.added", **part)]

    def _begin_call(self, delta: Delta) -> list[Event]:
        assert delta.call is not None
        tool = self._tools.get(delta.call.name) or CallableTool({}, delta.call.name)
        named = {"call_id": delta.call.id, "name": tool.name}
        if tool.namespace is not None:
            named["namespace"] = tool.namespace
        events = self._close()
        self._open = self._item("custom_tool_call" if tool.is_custom else "function_call", named)
        return events if tool.is_custom else [*events, self._added(self._open.as_dict("in_progress"))]

    def _say(self, delta: Delta) -> list[Event]:
        """Add to the open item and return the events; a custom tool's input is sent when the item closes."""
        item = self._open
        if item is None:
            return []
        item.add(delta.text, delta.tokens)
        if item.kind == "custom_tool_call":
            return []
        said = {"delta": delta.text, **({"logprobs": _logprobs(delta.tokens)} if item.kind == "message" else {})}
        return [self._event(f"response.{item.event}.delta", **self._place(item), **said)]

    def _close(self, *, is_whole: bool | None = None) -> list[Event]:
        """Close the open item. One that was cut off is incomplete, and so is the response; a call that was cut off is
        never reported as done, since clients run what is. ``is_whole`` None: it is, unless it is a call."""
        item, self._open = self._open, None
        if item is None:
            return []
        is_whole = not item.call if is_whole is None else is_whole
        self._is_cut = self._is_cut or not is_whole
        whole = item.as_dict("completed" if is_whole else "incomplete")
        place, part, events = self._place(item), item.part(), []
        done: dict[str, Any] = {name: part[name] for name in ("text", "logprobs", "arguments", "input") if name in part}
        if item.kind == "custom_tool_call":
            events.append(self._added({**whole, "input": "", "status": "in_progress"}))
            events.append(self._event(f"response.{item.event}.delta", **place, delta=part["input"]))
        elif item.kind == "function_call":
            done["name"] = whole["name"]
        if is_whole or not item.call:
            events.append(self._event(f"response.{item.event}.done", **place, **done))
            if not item.call:
                events.append(self._event("response.content_part.done", **place, part=part))
            events.append(self._event("response.output_item.done", output_index=len(self._items), item=whole))
        self._items.append(whole)
        return events

    def _place(self, item: _Item) -> dict[str, Any]:
        place = {"item_id": item.id, "output_index": len(self._items)}
        return place if item.call else {**place, "content_index": 0}

    def _event(self, kind: str, **values: Any) -> Event:
        self._number += 1
        return Event({"type": kind, "sequence_number": self._number, **values}, kind)

    def _added(self, item: dict[str, Any]) -> Event:
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _whole(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._is_cut or self._finish == "length"
        response = self._response("incomplete" if is_cut else "completed", self._items, usage)
        if self.keep is not None:
            self.keep(response)
        return response

    def _response(self, status: str, items: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"resp_{head.id}",
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._finish == "length" else None,
            "output": list(items),
            "store": self.keep is not None,
            **self._repeated,
            "usage": None if usage is None else usage.responses(),
        }


def _input_of(arguments: str) -> str:
    """Return the input of a custom tool; the arguments as they are if the call was cut off."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    text = given.get(INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def _logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = content_logprobs(tokens)["content"]
    return entries


RESPONSES = Endpoint("/v1/responses", "Responses, as in OpenAI's API", ResponseBody, response_request, ResponseForm)


# What is kept -------------------------------------------------------------------------------------------------------

MAX_KEPT_BYTES = 64 << 20  # of JSON; earlier items of a conversation are kept again for each response


class Kept(NamedTuple):
    """A response, and the conversation before it, as JSON text: objects would take up to 20 times its bytes.

    Attributes:
        response: the response.
        before: the items before it.
    """

    response: bytes
    before: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.before)

    @property
    def output(self) -> list[dict[str, Any]]:
        return from_json(self.response)["output"]  # type: ignore[no-any-return]


class KeptResponses:
    """Stored responses by API key and id; the least recently used are dropped first. For any thread.

    Args:
        max_bytes: most bytes of JSON to keep; 0: keep nothing.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str | None, str], Kept] = OrderedDict()

    def open(self, body: ResponseBody, key: str | None) -> Callable[[dict[str, Any]], None] | None:
        """Put the conversation that a request continues before its input. Call it in a worker thread.

        Args:
            body: body of the request; its input becomes the whole conversation.
            key: API key of the client.

        Returns:
            A function that stores the response; None: it is not to be stored.

        Raises:
            RequestRefused: 404, an earlier response or item is not stored; 400, this server stores no responses.
        """
        if body.store and not self._max_bytes:
            raise invalid("store must not be true: this server stores no responses (--no-response-store)", "store")
        items: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            earlier = self._find(key, body.previous_response_id, "previous_response_id")
            items = [*from_json(earlier.before), *earlier.output]
        given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
        body.input = items = [*items, *self._resolved(key, given)]
        if body.store is False or not self._max_bytes:
            return None
        before = to_json(items)
        return lambda response: self._keep((key, response["id"]), Kept(to_json(response), before))

    def get(self, key: str | None, name: str) -> bytes:
        """Return a response as JSON. Raises RequestRefused: 404."""
        return self._find(key, name).response

    def delete(self, key: str | None, name: str) -> dict[str, Any]:
        """Delete a response; those that continue it stay. Raises RequestRefused: 404."""
        self._find(key, name)
        with self._lock:
            self._drop((key, name))
        return {"id": name, "object": "response", "deleted": True}

    def _find(self, key: str | None, name: str, param: str | None = None) -> Kept:
        with self._lock:
            found = self._kept.get((key, name))
            if found is None:
                raise _unknown("response", name, param)
            self._kept.move_to_end((key, name))
            return found

    def _resolved(self, key: str | None, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the items, with stored ones in place of those of type ``item_reference``."""
        names = [str(item.get("id")) for item in given if item.get("type") == "item_reference"]
        if len(names) > MAX_REFERENCES:
            raise invalid(f"input must have at most {MAX_REFERENCES:,} references, got {len(names):,}", "input")
        stored: dict[str, dict[str, Any]] = {}
        for name in names:
            response = f"resp_{name.partition('_')[2].rpartition('_')[0]}"  # see _Item.id
            if name not in stored and (kept := self._kept.get((key, response))) is not None:
                stored |= {each["id"]: each for each in kept.output}
            if name not in stored:
                raise _unknown("item", name, "input")
        return [stored[str(item.get("id"))] if item.get("type") == "item_reference" else item for item in given]

    def _keep(self, place: tuple[str | None, str], kept: Kept) -> None:
        with self._lock:
            self._kept[place] = kept
            self._num_bytes += kept.num_bytes
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def _drop(self, place: tuple[str | None, str]) -> None:
        if (kept := self._kept.pop(place, None)) is not None:
            self._num_bytes -= kept.num_bytes


def _unknown(what: str, name: str, param: str | None) -> RequestRefused:
    why = "it was never stored or has been evicted; send the conversation itself"
    return not_found(f"no such {what}: {name[:200]!r}; {why}", param=param)
