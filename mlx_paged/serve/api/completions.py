"""CompletionForm: texts that go on from prompts, as OpenAI's and mlx-lm's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .chat import LEAST, ChatForm, content_logprobs
from .form import Event
from .pieces import Head, Piece, Token, Usage


class Echo(NamedTuple):
    """A prompt, which its answers begin with; ``tokens`` have log-probabilities if these are wanted."""

    text: str
    tokens: Sequence[Token] = ()


class CompletionForm(ChatForm):
    """Answers to prompts.

    Args:
        head: of the answer.
        includes_usage, tells_logprobs: as in chats.
        num_top: OpenAI's ``logprobs``; None: log-probabilities are not wanted, or in mlx-lm's form.
        echoes: of each answer, what it begins with; empty: nothing.
    """

    stream_object = whole_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(
        self,
        head: Head,
        *,
        includes_usage: bool = False,
        tells_logprobs: bool = False,
        num_top: int | None = None,
        echoes: Sequence[Echo] = (),
    ) -> None:
        super().__init__(head, includes_usage=includes_usage, tells_logprobs=tells_logprobs)
        self._num_top = num_top
        self._echoes = list(echoes)
        self._offsets: dict[int, int] = {}  # of the texts so far, by index, in characters

    def begin(self, usage: Usage) -> list[Event]:
        return [
            event
            for index, echo in enumerate(self._echoes)
            for event in self.piece(Piece(index, echo.text, tokens=list(echo.tokens)))
        ]

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        if self._echoes:
            answers = [
                Piece.joined([Piece(answer.index, echo.text, tokens=list(echo.tokens)), answer])
                for echo, answer in zip(self._echoes, answers, strict=True)
            ]
        return super().whole(answers, usage)

    def _choice(self, piece: Piece, key: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish}
        if self._num_top is not None:
            choice["logprobs"] = self._logprobs(piece)
        elif self._tells_logprobs:
            choice["logprobs"] = content_logprobs(piece.tokens)
        choice["text"] = piece.text
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        """As OpenAI's: lists of the tokens' texts, of their log-probabilities, of the likeliest, of places."""
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
    """By text, the token itself among them, as in OpenAI's; None at the first token of a prompt."""
    if token.logprob is None:
        return None
    likeliest: dict[str, float] = {}
    for other in token.top:
        if other.logprob is not None and other.logprob != LEAST:
            likeliest.setdefault(other.text, other.logprob)
    likeliest.setdefault(token.text, token.logprob)
    return likeliest
