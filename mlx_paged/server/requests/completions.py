"""OpenAI's completions: the body, the answer and the events of its stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ..errors import invalid
from ..request import ServerRequest
from .chat import ChatForm, engine_options, stop_list
from .constraints import AnswerParameters
from .fields import (
    MAX_ANSWERS,
    MAX_CHOICES,
    MAX_TOKENS,
    TOKEN_ID_LIMIT,
    ModelParameters,
    SamplingParameters,
    Several,
    StopField,
    StreamOptions,
    Tokens,
    or_none,
)
from .pieces import FORBIDDEN_LOGPROB, Delta, Echo, Event, Head, Piece, Token, Usage, content_logprobs

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
        stops=stop_list(body.stop),
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
        self.repeats_body = bool(body.echo)
        self._offsets: dict[int, int] = {}  # characters of each answer so far, by index

    def begin(self, usage: Usage, echoes: Sequence[Echo] = ()) -> list[Event]:
        return [event for index, echo in enumerate(echoes) for event in self.piece(_echoed(index, echo))]

    def whole(self, answers: Sequence[Piece], usage: Usage, echoes: Sequence[Echo] = ()) -> dict[str, Any]:
        if echoes:
            answers = [
                Piece.joined([_echoed(answer.index, echo), answer])
                for echo, answer in zip(echoes, answers, strict=True)
            ]
        return super().whole(answers, usage)

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


def _echoed(index: int, echo: Echo) -> Piece:
    return Piece(index, [Delta("text", echo.text, tokens=list(echo.tokens))])


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
