"""ResponseForm: an answer to a chat as one of OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..refusal import RequestRefused
from .chat import content_logprobs
from .form import Event
from .pieces import Head, Piece, Usage

# Of the request, told again with the answer, and what they are if it does not say.
TOLD: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
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


class ResponseForm:
    """A response.

    Args:
        head: of the answer.
        body: of the request.
    """

    def __init__(self, head: Head, body: Mapping[str, Any]) -> None:
        self._head = head
        self._told = {name: body.get(name, default) for name, default in TOLD.items()}
        self._items: list[dict[str, Any]] = []  # those that are complete
        self._open: Piece | None = None  # what is being said: reasoning or text
        self._last = Piece()
        self._number = -1

    # A stream -------------------------------------------------------------------------------------------------

    def begin(self, usage: Usage) -> list[Event]:
        response = self._response("in_progress", [], None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def piece(self, piece: Piece) -> list[Event]:
        self._last = piece
        events = []
        if piece.reasoning:
            events += self._say(Piece(reasoning=piece.reasoning))
        if piece.text:
            events += self._say(Piece(text=piece.text, tokens=piece.tokens))
        for call in piece.calls:
            events += self._close()
            item = self._call(call)
            place = {"output_index": len(self._items), "item_id": item["id"]}
            arguments = item["arguments"]
            events += [
                self._added({**item, "arguments": "", "status": "in_progress"}),
                self._event("response.function_call_arguments.delta", **place, delta=arguments),
                self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments),
                self._done(item),
            ]
        return events

    def end(self, usage: Usage) -> list[Event]:
        events = self._close()
        response = self._response(_status(self._last), self._items, usage)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failed(self, refusal: RequestRefused) -> list[Event]:
        error = refusal.body()["error"]
        said = {"code": error["type"], "message": error["message"], "param": error["param"]}
        return [self._event("error", **said)]

    def _event(self, kind: str, **values: Any) -> Event:
        self._number += 1
        return Event({"type": kind, "sequence_number": self._number, **values}, kind)

    def _added(self, item: dict[str, Any]) -> Event:
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _done(self, item: dict[str, Any]) -> Event:
        event = self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        return event

    def _say(self, piece: Piece) -> list[Event]:
        """More of the reasoning or the text; an item begins where the one before was of another kind."""
        events = []
        kind = "reasoning_text" if piece.reasoning else "output_text"
        if self._open is not None and bool(self._open.reasoning) != bool(piece.reasoning):
            events += self._close()
        if self._open is None:
            item = self._item(piece, "in_progress")
            events.append(self._added({**item, "content": []}))
            part = {**item["content"][0], "text": ""}
            events.append(self._event("response.content_part.added", **self._place(piece), part=part))
            self._open = Piece()
        self._open = Piece.joined([self._open, piece])
        delta: dict[str, Any] = {"delta": piece.reasoning or piece.text}
        if kind == "output_text":
            delta["logprobs"] = _logprobs(piece)
        events.append(self._event(f"response.{kind}.delta", **self._place(piece), **delta))
        return events

    def _close(self) -> list[Event]:
        said, self._open = self._open, None
        if said is None:
            return []
        item = self._item(said, "completed")
        kind, place = item["content"][0]["type"], self._place(said)
        done: dict[str, Any] = {"text": item["content"][0]["text"]}
        if kind == "output_text":
            done["logprobs"] = _logprobs(said)
        return [
            self._event(f"response.{kind}.done", **place, **done),
            self._event("response.content_part.done", **place, part=item["content"][0]),
            self._done(item),
        ]

    def _place(self, piece: Piece) -> dict[str, Any]:
        item_id = self._item(piece, "in_progress")["id"]
        return {"item_id": item_id, "output_index": len(self._items), "content_index": 0}

    # The whole ------------------------------------------------------------------------------------------------

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        if answer.reasoning:
            self._items.append(self._item(Piece(reasoning=answer.reasoning), "completed"))
        if answer.text or not answer.calls:
            self._items.append(self._item(Piece(text=answer.text, tokens=answer.tokens), "completed"))
        for call in answer.calls:
            self._items.append(self._call(call))
        return self._response(_status(answer), self._items, usage)

    def _item(self, said: Piece, status: str) -> dict[str, Any]:
        number = len(self._items)
        if said.reasoning:
            content = [{"type": "reasoning_text", "text": said.reasoning}]
            return {
                "id": f"rs_{self._head.id}_{number}",
                "type": "reasoning",
                "summary": [],
                "content": content,
                "status": status,
            }
        part = {"type": "output_text", "text": said.text, "annotations": [], "logprobs": _logprobs(said)}
        return {
            "id": f"msg_{self._head.id}_{number}",
            "type": "message",
            "role": "assistant",
            "content": [part],
            "status": status,
        }

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"fc_{self._head.id}_{len(self._items)}",
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }

    def _response(self, status: str, items: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"resp_{head.id}",
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(items),
            "previous_response_id": None,
            "store": False,
            **self._told,
            "usage": None
            if usage is None
            else {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            },
        }


def _status(answer: Piece) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _logprobs(piece: Piece) -> list[dict[str, Any]]:
    return [
        {**token, "bytes": [], "top_logprobs": [{**other, "bytes": []} for other in token["top_logprobs"]]}
        for token in content_logprobs(piece.tokens)["content"]
    ]
