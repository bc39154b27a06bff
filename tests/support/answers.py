"""What a client finds in its queue."""

from __future__ import annotations

from queue import Empty
from typing import Any

from mlx_paged.patches.server.answer_queue import AnswerQueue


def answers(queue: AnswerQueue) -> list[Any]:
    """All that there is at present, which is taken out."""
    found = []
    try:
        while True:
            found.append(queue.get_nowait())
    except Empty:
        return found
