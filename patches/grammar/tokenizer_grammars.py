"""TokenizerGrammars: what requests say of their answers, as grammars of one model's tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ...engine.grammar.compiler import GrammarCompiler, GrammarSource
from ...engine.grammar.grammar import CompiledGrammar
from ...engine.grammar.trial import IsCancelled
from ...errors import GrammarAbandoned, GrammarError
from ...serve.constraints.constraint import Constraint
from ...serve.constraints.tools import ToolFormat, Tools, calls
from ...serve.refusal import invalid

JSON_TOOLS = "mlx_lm.tool_parsers.json_tools"  # the parser of calls that are a JSON object of name and arguments


class TokenizerGrammars:
    """Compiles constraints, for any thread. llguidance reads the tokenizer when the first one comes.

    Args:
        tokenizer: mlx-lm's wrapper.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def compile(
        self, constraint: Constraint, *, is_cancelled: IsCancelled = lambda: False, is_checked: bool = False
    ) -> CompiledGrammar | None:
        """Return the grammar of an answer; None: any answer will do. Blocks while it is tried and compiled.

        Args:
            constraint: what the client says.
            is_cancelled, is_checked: see :meth:`GrammarCompiler.compile`.

        Raises:
            RequestRefused: 400, it cannot be used; the message says where.
            ConnectionAbortedError: it was cancelled.
        """
        return _Compilation(self._compiler_of, self._tokenizer, is_cancelled, is_checked).grammar(constraint)

    def _compiler_of(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(inner_of(self._tokenizer), self._tokenizer.eos_token_ids)
            return self._compiler


class _Compilation(NamedTuple):
    """One call of :meth:`TokenizerGrammars.compile`."""

    compiler: Callable[[], GrammarCompiler]
    tokenizer: Any
    is_cancelled: IsCancelled
    is_checked: bool

    def grammar(self, constraint: Constraint) -> CompiledGrammar | None:
        tools = constraint.tools
        if tools is not None and (tools.required or self.tokenizer.has_tool_calling):
            return self._of_tools(constraint, tools)
        return None if constraint.answer is None else self._compile(constraint.answer, constraint.param)

    def _of_tools(self, constraint: Constraint, tools: Tools) -> CompiledGrammar:
        form = tool_format(self.tokenizer)
        what = "tool_choice" if tools.required else "tools"
        if form is None:
            raise invalid(
                f"{what}: this model writes tool calls in a form that cannot be constrained"
                if self.tokenizer.has_tool_calling
                else f"{what}: this model cannot call tools",
                what,
            )
        for tool in tools.callable:  # what is wrong with one is said of that one
            try:
                source = GrammarSource.json(tool.schema)
            except RecursionError:
                raise invalid(f"{tool.param} is nested too deeply", "tools") from None
            self._check(source, tool.param)
        if tools.required:
            return self._compile(calls(tools, form), what)
        if constraint.answer is not None:
            if constraint.schema is None:
                raise invalid(f"{constraint.param}: only JSON can be asked for beside tools", "structured_outputs")
            self._check(constraint.answer, constraint.param)
            return self._compile(calls(tools, form, answer=constraint.schema), constraint.param)
        if form.trigger is None:
            raise invalid(f"{what}: strict: no token of this model begins a call, which could be watched for", what)
        return self._compile(calls(tools, form, is_triggered=True), what, trigger=form.trigger)

    def _compile(self, source: GrammarSource, param: str, *, trigger: int | None = None) -> CompiledGrammar:
        with _refusing(param):
            return self.compiler().compile(
                source, trigger=trigger, is_cancelled=self.is_cancelled, is_checked=self.is_checked
            )

    def _check(self, source: GrammarSource, param: str) -> None:
        with _refusing(param):
            if not self.is_checked:
                self.compiler().check(source, is_cancelled=self.is_cancelled)


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    try:
        yield
    except GrammarAbandoned:
        raise ConnectionAbortedError("the client has gone") from None
    except GrammarError as error:
        raise invalid(f"{param}: {error}", param.partition(".")[0].partition("[")[0]) from error


def inner_of(tokenizer: Any) -> Any:
    """The tokenizer of transformers in mlx-lm's wrapper."""
    return getattr(tokenizer, "_tokenizer", tokenizer)


def tool_format(tokenizer: Any) -> ToolFormat | None:
    """How a model writes tool calls, if a grammar can say it."""
    if getattr(tokenizer.tool_parser, "__module__", None) != JSON_TOOLS:
        return None
    (start, trigger), (end, _) = (
        _marker(text, tokens)
        for text, tokens in (
            (tokenizer.tool_call_start, tokenizer.tool_call_start_tokens),
            (tokenizer.tool_call_end, tokenizer.tool_call_end_tokens),
        )
    )
    return ToolFormat(start, end, trigger)


def _marker(text: str, tokens: tuple[int, ...]) -> tuple[str, int | None]:
    """As a term of a Lark grammar, and the token that it is, if it is one."""
    return (f"<[{tokens[0]}]>", tokens[0]) if len(tokens) == 1 else (f'"{text}"', None)


def reasons_first(tokenizer: Any, prompt: list[int]) -> bool:
    """Whether the prompt ends in reasoning that the answer has to end, as mlx-lm's server finds out."""
    if not tokenizer.has_thinking:
        return False
    if tokenizer.response_initial_state:
        return bool(tokenizer.response_initial_state == "reasoning")
    return bool(tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt))


def behind_reasoning(grammar: CompiledGrammar, tokenizer: Any) -> CompiledGrammar:
    """The grammar of an answer that begins with reasoning, which is free."""
    return grammar.begins_after(tokenizer.think_end_tokens)
