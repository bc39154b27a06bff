"""OpenAI's chats and completions: the bodies, the answers and the events of their streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from ..answer_reader import Delta, Token
from ..answers import Event, Head, Piece, Usage
from ..errors import RequestRefused, invalid
from ..request import ChatInput, ServerRequest
from .fields import (
    MAX_ANSWERS,
    MAX_CHOICES,
    MAX_TOKENS,
    TOKEN_ID_LIMIT,
    AnswerParameters,
    Body,
    Endpoint,
    ModelParameters,
    SamplingParameters,
    Several,
    StopField,
    StreamOptions,
    Tokens,
    ToolParameters,
    or_none,
)

_OPEN = ConfigDict(extra="allow", strict=True)  # other fields are left to the chat template


@with_config(_OPEN)
class Part(TypedDict):
    type: str
    text: NotRequired[Any]


def _check_text(part: Part) -> Part:
    """Check a part of type text. Clients send parts of other types with a text that is null."""
    if part["type"] == "text" and not isinstance(part.get("text"), str):
        raise ValueError("a part of type text must have a text")
    return part


@with_config(_OPEN)
class Message(TypedDict):
    """A message of a chat."""

    role: str
    content: NotRequired[str | Several[Annotated[Part, AfterValidator(_check_text)]] | None]
    tool_calls: NotRequired[Several[dict[str, Any]] | None]


Messages = Annotated[Several[Message], Field(min_length=1)]


class Thinking(Body):
    """Anthropic's parameter ``thinking``; chats and Responses accept it as well."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    display: Any = None


class TemplateParameters(Body):
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the chat template")
    thinking: Thinking | None = Field(
        None,
        description="sets the chat template's `enable_thinking` unless `adaptive`; `budget_tokens` limits thinking",
    )
    max_thinking_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(
        None, description="thinking is ended after this many tokens; overrides `budget_tokens`"
    )

    @property
    def thinking_budget(self) -> int | None:
        if self.max_thinking_tokens is not None or self.thinking is None:
            return self.max_thinking_tokens
        return self.thinking.budget_tokens


def template_kwargs(body: TemplateParameters, effort: str | None, thinks: bool | None = None) -> dict[str, Any]:
    """Return the variables of the chat template.

    Args:
        body: body of the request.
        effort: effort of reasoning; ``none`` switches thinking off.
        thinks: whether to think; None: as ``thinking`` or the template says.
    """
    kwargs: dict[str, Any] = {}
    if thinks is None and body.thinking is not None and body.thinking.type != "adaptive":
        thinks = body.thinking.type == "enabled"
    if effort == "none":
        thinks = False if thinks is None else thinks
    elif effort is not None:
        kwargs["reasoning_effort"] = effort
    if thinks is not None:
        kwargs["enable_thinking"] = thinks
    return kwargs | (body.chat_template_kwargs or {})


class ChatBody(TemplateParameters, ToolParameters, SamplingParameters, ModelParameters):
    """The body of ``/v1/chat/completions``."""

    messages: Messages
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = Field(None, description="overrides `max_tokens`")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="`include_usage`; no effect without `stream`")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="the prompt is computed once")
    stop: StopField = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=20)] | None = Field(None, description="mlx-lm allows up to 11")
    reasoning_effort: str | None = Field(
        None, description="variable of the chat template, else a limit on thinking; `none`: no thinking"
    )
    enable_thinking: bool | None = Field(None, description="variable of the chat template; no effect if it is not read")
    role_mapping: dict[str, Any] | None = Field(None, description="as in mlx-lm, for models without a chat template")
    prompt_cache_key: str | None = Field(None, description="prompts with a key are evicted after those without")
    continue_final_message: bool | None = Field(
        None, description="continue the last message, which must be an assistant's"
    )


def engine_options(body: SamplingParameters, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that all APIs share, as attributes of a request."""
    return {
        "sampling": body.sampling(defaults),
        "prompt_lookup": body.prompt_lookup,
        "priority": body.priority or 0,
        "keeps": "prompt" if getattr(body, "prompt_cache_key", None) else "",
        "thinking_budget": getattr(body, "thinking_budget", None),
        "num_draft_tokens": 0 if getattr(body, "draft", None) is False else getattr(body, "num_draft_tokens", None),
    }


def chat_request(body: ChatBody, defaults: Mapping[str, Any]) -> ServerRequest:
    """Return the request of a chat body.

    Raises:
        RequestRefused: 400, naming the parameter.
    """
    kwargs = template_kwargs(body, body.reasoning_effort, body.enable_thinking)
    if body.continue_final_message and body.messages[-1]["role"] != "assistant":
        raise invalid("continue_final_message requires the last message to be an assistant's", "continue_final_message")
    messages = [{**m, "role": "system"} if m["role"] == "developer" else dict(m) for m in body.messages]
    for message in messages:  # answers call it `reasoning`, chat templates `reasoning_content`
        if isinstance(message.get("reasoning"), str):
            message.setdefault("reasoning_content", message["reasoning"])
    n, top = body.n or 1, body.top_logprobs or 0
    return ServerRequest(
        inputs=[
            ChatInput(
                messages, body.shown_tools, kwargs, body.role_mapping, continues=bool(body.continue_final_message)
            )
        ],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        n=n,
        top_logprobs=max(0, top) if body.logprobs or top > 0 else None,
        calls_once=body.parallel_tool_calls is False,
        stops=tuple(body.stop or ()),
        constraint=body.constraint(),
        **engine_options(body, defaults),
    )


# The answer -------------------------------------------------------------------------------------------------------


class ChatForm:
    """The form of answers to a chat.

    Args:
        head: fields that every object of the answer begins with.
        body: body of the request, a chat or a completion.
    """

    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl-"
    repeats_body = False

    def __init__(self, head: Head, body: Any) -> None:
        self._head = head
        self._includes_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._includes_logprobs = bool(body.logprobs) or (body.top_logprobs or 0) > 0
        self._begun: set[int] = set()  # answers whose role was sent: clients concatenate the fields of deltas

    def begin(self, usage: Usage) -> list[Event]:
        return []

    def piece(self, piece: Piece) -> list[Event]:
        """Return an event for each kind of delta, in the answer's order."""
        deltas = [each for each in piece.folded() if each.text or each.is_first or self._includes_logprobs]
        parts = [Piece(piece.index, [each]) for each in deltas]
        if piece.finish is not None:
            parts = parts or [Piece(piece.index)]
            parts[-1].finish = piece.finish
        return [Event(self._with_choices(self.stream_object, [self._choice(part, "delta")])) for part in parts]

    def end(self, usage: Usage) -> list[Event]:
        events = [Event("[DONE]")]
        if self._includes_usage:
            events.insert(0, Event({**self._with_choices(self.stream_object, []), "usage": usage.openai()}))
        return events

    def failed(self, refusal: RequestRefused) -> list[Event]:
        return [Event(refusal.body())]

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        choices = [self._choice(answer, "message") for answer in answers]
        return {**self._with_choices(self.whole_object, choices), "usage": usage.openai()}

    def _with_choices(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"{self.id_prefix}{head.id}",
            "system_fingerprint": head.fingerprint,
            "object": kind,
            "model": head.model,
            "created": head.created,
            "choices": choices,
        }

    def _choice(self, piece: Piece, key: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish}
        if self._includes_logprobs:
            choice["logprobs"] = content_logprobs(piece.tokens)
        message: dict[str, Any] = {} if piece.index in self._begun else {"role": "assistant"}
        self._begun.add(piece.index)
        text, reasoning = piece.text, piece.reasoning
        calls = [_call(each, is_whole=key == "message") for each in piece.folded() if each.call is not None]
        if text or (key == "message" and not calls):  # the field is required
            message["content"] = text
        elif key == "message":
            message["content"] = None
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice[key] = message
        return choice


def _call(delta: Delta, *, is_whole: bool) -> dict[str, Any]:
    """Return a call, or the arguments of one that has begun."""
    call = delta.call
    assert call is not None
    place: dict[str, Any] = {} if is_whole else {"index": call.index}
    if not delta.is_first:
        return {**place, "function": {"arguments": delta.text}}
    return {**place, "function": {"name": call.name, "arguments": delta.text}, "type": "function", "id": call.id}


FORBIDDEN_LOGPROB = float("-inf")  # of tokens that the grammar does not allow; JSON cannot express it


def content_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return log-probabilities in the format of OpenAI's chats, plus token ids as in mlx-lm."""
    return {
        "content": [
            {
                **_logprob_entry(token),
                "top_logprobs": [_logprob_entry(other) for other in token.top if other.logprob != FORBIDDEN_LOGPROB],
            }
            for token in tokens
        ]
    }


def _logprob_entry(token: Token) -> dict[str, Any]:
    return {"id": token.id, "token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


# Completions ----------------------------------------------------------------------------------------------------------

TokenIds = Annotated[Several[Annotated[int, Field(ge=0, lt=TOKEN_ID_LIMIT)]], Field(min_length=1)]
OnePrompt = Annotated[str, Field(min_length=1)] | TokenIds


def prompts_of(value: Any) -> list[str | list[int]]:
    """Return the parameter ``prompt`` as a list of prompts."""
    return [value] if isinstance(value, str) or isinstance(value[0], int) else list(value)


class CompletionBody(AnswerParameters, SamplingParameters, ModelParameters):
    """The body of ``/v1/completions``."""

    prompt: OnePrompt | Annotated[Several[OnePrompt], Field(min_length=1)] = Field(
        description=f"a text, token ids, or a list of either; at most {MAX_ANSWERS} answers in all"
    )
    max_tokens: Annotated[Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None, BeforeValidator(or_none)] = Field(
        None, description="0 requires `echo`"
    )
    max_completion_tokens: Tokens = Field(None, description="overrides `max_tokens`")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="`include_usage`; no effect without `stream`")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="the prompt is computed once")
    echo: bool | None = Field(
        None, description="start with the prompt; with `logprobs: N`, include its log-probabilities"
    )
    stop: StopField = None
    logprobs: bool | Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="a number as in OpenAI's API, or `true` as in mlx-lm"
    )
    top_logprobs: Annotated[int, Field(ge=-1, le=20)] | None = Field(
        None, description="as in mlx-lm, with `logprobs: true`"
    )


def completion_request(body: CompletionBody, defaults: Mapping[str, Any]) -> ServerRequest:
    """Return the request of a completion body.

    Raises:
        RequestRefused: 400, naming the parameter.
    """
    prompts, n = prompts_of(body.prompt), body.n or 1
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if len(prompts) * n > MAX_ANSWERS:
        name = "prompt" if len(prompts) > MAX_ANSWERS // MAX_CHOICES else "n"
        raise invalid(f"a request may have at most {MAX_ANSWERS} answers (prompts times n)", name)
    if most == 0 and not body.echo:
        raise invalid("max_tokens must be at least 1 without echo, got 0", "max_tokens")
    if body.echo and body.logprobs is True:
        raise invalid("echo requires logprobs to be a number", "logprobs")
    top = _num_top(body)
    if top is None:
        top = body.top_logprobs or 0
        top = max(0, top) if body.logprobs or top > 0 else None
    return ServerRequest(
        inputs=prompts,
        max_tokens=1 if most == 0 else most,  # its only token is not shown
        n=n,
        echo=bool(body.echo),
        top_logprobs=top,
        scores_prompt=bool(body.echo) and _num_top(body) is not None,
        has_no_answer=most == 0,
        stops=tuple(body.stop or ()),
        constraint=body.constraint(),
        **engine_options(body, defaults),
    )


def _num_top(body: CompletionBody) -> int | None:
    """Return ``logprobs`` if it is OpenAI's number; None if it is missing or mlx-lm's boolean."""
    return None if body.logprobs is None or isinstance(body.logprobs, bool) else body.logprobs


class CompletionForm(ChatForm):
    """The form of answers to prompts.

    Args:
        head: fields that every object of the answer begins with.
        body: body of the request.
    """

    stream_object = whole_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, head: Head, body: CompletionBody) -> None:
        super().__init__(head, body)
        self._num_top = _num_top(body)
        self._offsets: dict[int, int] = {}  # characters of each answer so far, by index

    def _choice(self, piece: Piece, key: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish}
        if self._num_top is not None:
            choice["logprobs"] = self._logprobs(piece)
        elif self._includes_logprobs:
            choice["logprobs"] = content_logprobs(piece.tokens)
        choice["text"] = piece.text
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        """Return OpenAI's lists: the tokens' texts and log-probabilities, the most likely tokens, and text offsets."""
        offset, offsets = self._offsets.get(piece.index), []
        if offset is None:  # mlx-lm drops the space that an answer begins with
            is_cut = piece.tokens and piece.tokens[0].text.startswith(" ") and not piece.text.startswith(" ")
            offset = -1 if is_cut else 0
        for token in piece.tokens:
            offsets.append(max(0, offset))
            offset += len(token.text)
        self._offsets[piece.index] = offset
        return {
            "tokens": [token.text for token in piece.tokens],
            "token_logprobs": [token.logprob for token in piece.tokens],
            "top_logprobs": [_likeliest(token) for token in piece.tokens] if self._num_top else None,
            "text_offset": offsets,
        }


def _likeliest(token: Token) -> dict[str, float] | None:
    """Return the most likely tokens by text, including the token itself; None for the first token of a prompt."""
    if token.logprob is None:
        return None
    likeliest: dict[str, float] = {}
    for other in token.top:
        if other.logprob is not None and other.logprob != FORBIDDEN_LOGPROB:
            likeliest.setdefault(other.text, other.logprob)
    likeliest.setdefault(token.text, token.logprob)
    return likeliest


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
