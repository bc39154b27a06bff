"""KeptResponses: responses that later ones may follow, in memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import RequestRefused, invalid, not_found
from .responses import ResponseBody

MAX_KEPT_BYTES = 64 << 20  # of JSON, a conversation's earlier items counted again with each of its responses


class Kept(NamedTuple):
    """A response and the conversation up to its end."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    num_bytes: int


class KeptResponses:
    """Responses by API key and id; the least recently used go first. For the event loop.

    Args:
        max_bytes: that are kept; 0: nothing is.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[tuple[str | None, str], Kept] = OrderedDict()

    def open(self, body: ResponseBody, key: str | None, num_bytes: int) -> Callable[[dict[str, Any]], None] | None:
        """Put the conversation that a request goes on before its input.

        Args:
            body: of the request; its input becomes the whole conversation.
            key: API key of the client.
            num_bytes: of the body.

        Returns:
            what keeps the response; None: it is not to be kept.

        Raises:
            RequestRefused: 404, what goes before is not kept, or 400, the response cannot be.
        """
        items: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            previous = self._find(key, body.previous_response_id, "previous_response_id")
            items, num_bytes = previous.items, num_bytes + previous.num_bytes
        given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
        body.input = items = [*items, *(self._referenced(key, item) for item in given)]
        if body.store and not self._max_bytes:
            raise invalid("store: this server keeps no responses (--no-response-store)", "store")
        if body.store is False or not self._max_bytes:
            return None
        return lambda response: self._keep(key, response, items, num_bytes)

    def get(self, key: str | None, name: str) -> dict[str, Any]:
        """Return a response. Raises RequestRefused: 404."""
        return self._find(key, name).response

    def delete(self, key: str | None, name: str) -> dict[str, Any]:
        """Forget a response; those that follow it stay. Raises RequestRefused: 404."""
        self._num_bytes -= self._find(key, name).num_bytes
        del self._kept[key, name]
        return {"id": name, "object": "response", "deleted": True}

    def _find(self, key: str | None, name: str, param: str | None = None) -> Kept:
        found = self._kept.get((key, name))
        if found is None:
            raise _unknown("response", name, param)
        self._kept.move_to_end((key, name))
        return found

    def _referenced(self, key: str | None, item: dict[str, Any]) -> dict[str, Any]:
        """Return an item, looked up if it is only named."""
        if item.get("type") != "item_reference":
            return item
        for (owner, _), kept in reversed(self._kept.items()):
            for each in kept.response["output"] if owner == key else ():
                if each["id"] == item.get("id"):
                    return dict(each)
        raise _unknown("item", str(item.get("id")), "input")

    def _keep(self, key: str | None, response: dict[str, Any], items: list[dict[str, Any]], num_bytes: int) -> None:
        num_bytes += len(json.dumps(response))
        self._kept[key, response["id"]] = Kept(response, [*items, *response["output"]], num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes


def _unknown(what: str, name: str, param: str | None) -> RequestRefused:
    why = "it was never kept, or others have taken its place: send what was said before"
    return not_found(f"there is no {what} {name[:200]!r} here: {why}", param=param)
