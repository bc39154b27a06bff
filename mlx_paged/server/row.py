"""Row: one answer that is computed: its text, its stop strings and the log-probabilities of its tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .request import ServerRequest
from .work import Generated, Work


class StopScanner:
    """Cuts the text of one answer before the first stop string, however the text is divided into pieces.

    The first stop string is the one that begins first. Text is held back only while a stop string may still begin in
    it. A step's time hardly depends on the number of stop strings.

    Args:
        stops: strings that are not empty.

    Attributes:
        found: the stop string that ended the answer; the longest of several that begin there.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._known = sorted(stops), frozenset(stops)
        self._lengths = sorted({len(stop) for stop in stops}, reverse=True) or [0]
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Add the next text, and return what can be shown now.

        Args:
            text: next text of the answer.
            is_last: nothing follows.
        """
        if self.found is not None:
            return ""
        held, place = self._held + text, 0
        while place < len(held):
            rest = held[place : place + self._lengths[0]]
            self.found = next((rest[:length] for length in self._lengths if rest[:length] in self._known), None)
            if self.found is not None or (not is_last and self._may_begin_with(rest)):
                break
            place += 1
        self._held = held[place:]
        return held[:place]

    def _may_begin_with(self, text: str) -> bool:
        """Return whether a stop string longer than ``text`` begins with it."""
        place = bisect_right(self._stops, text)
        return place < len(self._stops) and self._stops[place].startswith(text)


class Row:
    """One answer that is being computed: decodes its tokens and looks for stop strings."""

    def __init__(self, work: Work, index: int, detokenizer: Any) -> None:
        assert work.request is not None
        self.work, self.index = work, index
        self.request: ServerRequest = work.request
        self.num_tokens = 0
        self.has_started = False
        self.last_at: float | None = None  # time of its last token
        self._detokenizer = detokenizer
        self._scanner = StopScanner(work.request.stops) if work.request.stops else None
        self._starts: list[int] = []  # of the tokens' texts, in characters; only with log-probabilities
        self._length = self._num_characters = 0  # of the text, and of its part that was shown

    @property
    def name(self) -> str:
        """The request's number, followed by the answer's if there are several."""
        request = self.request
        return f"{request.number}.{self.index + 1}" if request.num_answers > 1 else str(request.number)

    def next(self, response: Any, logprob: float | None, top: tuple[tuple[int, float], ...]) -> Generated:
        """Add the next token. Return the item for the client.

        Args:
            response: token and finish reason, and its text if mlx-lm has decoded it.
        """
        finish, text = response.finish_reason, getattr(response, "text", None)
        self.num_tokens += 1
        if text is None:
            if finish != "stop":  # an end token has no text
                self._detokenizer.add_token(response.token)
            if finish is not None:
                self._detokenizer.finalize()
            text = self._detokenizer.last_segment
        stop, num_shown = None, self.num_tokens - 1 if finish == "stop" else None
        if self._scanner is not None:
            if self.request.wants_logprobs:
                self._starts.append(self._length)
            self._length += len(text)
            text = self._scanner.feed(text, is_last=finish is not None)
            self._num_characters += len(text)
            stop = self._scanner.found
            if stop is not None:
                finish, num_shown = "stop", bisect_left(self._starts, self._num_characters)
        return Generated(self.index, response.token, text, finish, stop, logprob, top, num_shown)


# Log-probabilities --------------------------------------------------------------------------------------------------


def fetch_logprobs(asking: list[tuple[Any, int]]) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
    """Return, by uid, the log-probability of each token and of the most likely ones.

    Args:
        asking: responses, each with its number of most likely tokens.
    """
    if not asking:
        return {}
    rows, tokens = mx.stack([response.logprobs for response, _ in asking]), [response.token for response, _ in asking]
    found = gather_logprobs(rows, tokens, max(top for _, top in asking))
    wanted = zip(asking, found, strict=True)
    return {response.uid: (logprob, likeliest[:top]) for (response, top), (logprob, likeliest) in wanted}


def gather_logprobs(
    rows: mx.array, tokens: list[int], num_top: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Return the log-probability of each row's token, and the row's ``num_top`` most likely tokens with theirs, in one
    transfer."""
    wanted, most = mx.array(tokens)[:, None], min(num_top, rows.shape[-1])
    if most:
        likeliest = mx.argpartition(-rows, kth=most - 1, axis=-1)[:, :most].astype(mx.int32)
        wanted = mx.concatenate([wanted, likeliest], axis=1)
    values = mx.take_along_axis(rows, wanted, axis=1).astype(mx.float32)
    # Ids and values in one array: float32 is exact for ids up to 2**24.
    fetched: Any = mx.stack([wanted.astype(mx.float32), values], axis=1).tolist()
    return [
        (logprobs[0], tuple(sorted(zip(map(int, ids[1:]), logprobs[1:], strict=True), key=lambda pair: -pair[1])))
        for ids, logprobs in fetched
    ]
