"""ChatForm: answers to chats, as OpenAI's and mlx-lm's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..refusal import RequestRefused
from .form import Event
from .pieces import Head, Piece, Token, Usage

LEAST = float("-inf")  # of tokens that the answer's grammar does not allow, and JSON has no word for


class ChatForm:
    """Answers to a chat.

    Args:
        head: of the answer.
        includes_usage: whether a stream ends with it.
        tells_logprobs: whether log-probabilities are wanted.
    """

    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl-"

    def __init__(self, head: Head, *, includes_usage: bool = False, tells_logprobs: bool = False) -> None:
        self._head = head
        self._includes_usage, self._tells_logprobs = includes_usage, tells_logprobs

    def begin(self, usage: Usage) -> list[Event]:
        return []

    def piece(self, piece: Piece) -> list[Event]:
        return [Event(self._with_choices(self.stream_object, [self._choice(piece, "delta")]))]

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
        if self._tells_logprobs:
            choice["logprobs"] = content_logprobs(piece.tokens)
        message: dict[str, Any] = {"role": "assistant"}
        calls = piece.calls
        if key == "message":
            message["content"] = piece.text or None  # which has to be there
            calls = [{name: value for name, value in call.items() if name != "index"} for call in calls]
        elif piece.text:
            message["content"] = piece.text
        if piece.reasoning:
            message["reasoning"] = piece.reasoning
        if calls:
            message["tool_calls"] = calls
        choice[key] = message
        return choice


def content_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Log-probabilities as mlx-lm's server has them: OpenAI's, with the tokens' ids, named as by the tokenizer."""
    return {
        "content": [
            {
                "id": token.id,
                "token": token.name,
                "logprob": token.logprob,
                "top_logprobs": [
                    {"id": other.id, "token": other.name, "logprob": other.logprob}
                    for other in token.top
                    if other.logprob != LEAST
                ],
            }
            for token in tokens
        ]
    }
