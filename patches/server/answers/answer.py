"""Answer: what one sequence of the batch says, parted into text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm import server as upstream
from mlx_lm.generate import TextStateMachine

from ....serve.api.pieces import Piece, Token
from ....serve.stops.stopped_answer import LastText


class Names:
    """Tokens with their names, for whoever asks for log-probabilities.

    Args:
        tokenizer: mlx-lm's wrapper.
        with_texts: what each token stands for alone is wanted, too.
    """

    def __init__(self, tokenizer: Any, *, with_texts: bool) -> None:
        self._tokenizer = tokenizer
        self._with_texts = with_texts

    def token(self, token_id: int, logprob: float | None, top: Sequence[dict[str, Any]] = ()) -> Token:
        """A token; ``top`` is as mlx-lm gives it, the likeliest first."""
        likeliest = tuple(Token(each["id"], each["token"], self._text(each["id"]), each["logprob"]) for each in top)
        return Token(token_id, self._name(token_id), self._text(token_id), logprob, likeliest)

    def described(self, top: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        """Ids and log-probabilities, as mlx-lm gives the likeliest."""
        return [{"id": token_id, "token": self._name(token_id), "logprob": logprob} for token_id, logprob in top]

    def _name(self, token_id: int) -> str:
        (name,) = self._tokenizer.convert_ids_to_tokens([token_id])
        return str(name)

    def _text(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id])) if self._with_texts else ""


class Answer:
    """Parts an answer as mlx-lm's handler does, and tells what can be told by now.

    Args:
        index: among the answers to the request.
        ctx: of the sequence.
        tools: of the request.
        names: of its tokens, if log-probabilities are wanted.
        shows_end: whether the token that ends an answer is told as well, as in mlx-lm.
        is_hidden: nothing of it is told but that it ends.
        decode: of a token, where the answer follows its prompt: mlx-lm drops the space that an answer begins with.
        calls_once: of its tool calls, the first alone is told.

    Attributes:
        num_tokens: generated so far.
        num_reasoning: of these, reasoning.
        sum_logprobs: of the tokens, if mlx-lm's arguments ask for log-probabilities.
    """

    def __init__(
        self,
        index: int,
        ctx: upstream.GenerationContext,
        tools: Any,
        names: Names | None,
        *,
        shows_end: bool = True,
        is_hidden: bool = False,
        decode: Callable[[list[int]], str] | None = None,
        calls_once: bool = False,
    ) -> None:
        self.index = index
        self.ctx = ctx
        self.num_tokens = self.num_reasoning = 0
        self.sum_logprobs = 0.0
        self._names = names
        self._decode = decode
        self._shows_end, self._is_hidden, self._calls_once = shows_end, is_hidden, calls_once
        self._format_calls = upstream.ToolCallFormatter(ctx.tool_parser, tools, True)
        self._machine = ctx.text_sm.make_state(ctx.initial_state)
        self._state = ctx.initial_state
        self._reason = "stop"
        self._has_called = False
        self._call = ""
        self._calls: list[str] = []
        self._text = self._reasoning = ""
        self._tokens: list[Token] = []
        self._num_told = 0  # tokens

    @property
    def mean_logprob(self) -> float:
        return self.sum_logprobs / max(1, self.num_tokens)

    def take(self, said: upstream.Response) -> Piece | None:
        """What can be told when the next token is there, if anything can."""
        if self._is_hidden:
            return None
        if self._decode is not None and self.num_tokens == 0 and said.finish_reason != "stop":
            self._text = " " if self._decode([said.token]).startswith(" ") else ""
        if said.finish_reason == "stop":
            self._machine, state = TextStateMachine.discard(self._machine)
            segments = [(state, "")]
        else:
            self._machine, segments = TextStateMachine.split(self._machine, said.text)
            if said.finish_reason == "length" or isinstance(said.text, LastText):
                self._machine, rest, state = TextStateMachine.flush(self._machine)
                segments.append((state, rest))
        for state, text in segments:
            self._add(state, text)
        self.num_tokens += 1
        self.num_reasoning += self._state == "reasoning"
        self.sum_logprobs += said.logprob
        if self._names is not None and (self._shows_end or said.finish_reason != "stop"):
            self._tokens.append(self._names.token(said.token, said.logprob, said.top_tokens))
        if said.finish_reason is not None:
            self._reason = said.finish_reason
        if self._state == "tool" or not (self._text or self._reasoning or self._calls):
            return None
        return self._piece()

    def finish(self) -> Piece:
        """The last piece."""
        if self._is_hidden:
            return Piece(self.index, finish="length")
        if self._state == "tool" and self._call:
            self._add_call()
        num_shown = getattr(self.ctx, "num_shown", None)  # tokens; set where a stop string has ended the answer
        if num_shown is not None:
            del self._tokens[max(0, num_shown - self._num_told) :]
        piece = self._piece()
        piece.finish = "tool_calls" if self._reason == "stop" and self._has_called else self._reason
        piece.stop = getattr(self.ctx, "stop_string", None)
        return piece

    def _add(self, state: str, text: str) -> None:
        if state == "reasoning":
            self._reasoning += text
        elif state == "tool":
            self._call += text
        elif state == "normal":
            if self._state == "tool":
                self._add_call()
            self._text += text
        self._state = state

    def _add_call(self) -> None:
        if not (self._calls_once and self._has_called):
            self._calls.append(self._call)
        self._call = ""
        self._has_called = True

    def _piece(self) -> Piece:
        piece = Piece(self.index, self._text, self._reasoning, self._format_calls(self._calls), self._tokens)
        self._num_told += len(self._tokens)
        self._text = self._reasoning = ""
        self._calls, self._tokens = [], []
        return piece
