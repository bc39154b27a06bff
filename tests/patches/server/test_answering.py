"""When a stream begins, and what it begins with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm import server as upstream

from mlx_paged.patches.server.answer_queue import ClientSide
from mlx_paged.patches.server.answers import answering
from mlx_paged.patches.server.answers.answering import Answering
from mlx_paged.patches.server.answers.arguments import generation_arguments
from mlx_paged.patches.server.answers.order import Order
from mlx_paged.serve.api.chat import ChatForm
from mlx_paged.serve.api.pieces import Head
from mlx_paged.serve.extras import RequestExtras
from mlx_paged.serve.http import event_stream
from mlx_paged.serve.http.event_stream import EventStream
from mlx_paged.serve.refusal import RequestRefused

BEAT = 0.05  # seconds


class Connection:
    """Of a client that stays."""

    def __init__(self) -> None:
        self.beat: Callable[[], None] | None = None

    def client_is_gone(self) -> bool:
        if self.beat is not None:
            self.beat()
        return False


class Busy:
    """Stands in for the response generator: others are computed for a while, and then comes a refusal."""

    model_provider = SimpleNamespace(is_distributed=False)

    def __init__(self, *, accepts: bool) -> None:
        self.accepts = accepts

    def generate(
        self,
        request: Any,
        args: Any,
        on_progress: Any,
        client_is_gone: Callable[[], bool],
        extras: Any,
        client: ClientSide,
    ) -> tuple[Any, Iterator[Any]]:
        if self.accepts:
            client.accept()
        end = time.monotonic() + 5 * BEAT
        while time.monotonic() < end:
            client_is_gone()
            time.sleep(BEAT / 10)
        raise RequestRefused(503, "the server is shutting down")


@pytest.mark.parametrize("accepts, num_answers", [(True, 1), (True, 3), (False, 1)])
def test_a_stream_begins_when_only_time_stands_before_it(
    monkeypatch: pytest.MonkeyPatch, accepts: bool, num_answers: int
) -> None:
    monkeypatch.setattr(answering, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(event_stream, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr("mlx_paged.patches.server.answers.choices.POLL_SECONDS", BEAT / 5)
    written: list[bytes] = []
    begun = []

    def begin() -> EventStream:
        begun.append(EventStream(written.append, is_chunked=False))
        return begun[0]

    request = upstream.CompletionRequest("text", "x", [], None, None)
    defaults = SimpleNamespace(temp=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=1, num_draft_tokens=0)
    args = generation_arguments({}, defaults)
    order = Order([request], args, [RequestExtras()], num_answers, num_answers)
    connection: Any = Connection()
    generator: Any = Busy(accepts=accepts)
    if num_answers > 1:
        monkeypatch.setattr(Answering, "_make_prompts", lambda self: None)
    told = Answering(generator, connection, order, lambda echoes: ChatForm(Head("", "", 0, "")))
    with pytest.raises(RequestRefused):
        told.stream(begin)
    assert len(begun) == accepts and connection.beat is None
    assert written[:1] == [b": keepalive\n\n"] * accepts
    assert (len(written) > 1) == accepts
    if accepts:
        assert begun[0].form is not None
