"""TokenizerGrammars: what requests say of their answers, as grammars of one model's tokens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from ...engine.grammar.compiler import GrammarCompiler, GrammarSource, IsCancelled
from ...engine.grammar.grammar import CompiledGrammar, ThinkingBudget
from ...errors import GrammarAbandoned, GrammarError
from ...server.constraint import Constraint, Tool, Tools
from ...server.errors import RequestRefused, invalid
from .call_forms import ToolFormat, calls, tool_format


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
        wanted = self._wanted(constraint)
        if wanted is None:
            return None
        try:
            for part, param in () if is_checked else wanted.parts:
                with _refusing(param):
                    self._known_compiler().check(part, is_cancelled=is_cancelled)
            with _refusing(wanted.param):
                return self._known_compiler().compile(
                    wanted.source, trigger=wanted.trigger, is_cancelled=is_cancelled, is_checked=is_checked
                )
        except RequestRefused as error:
            if not wanted.is_free:
                raise
            logging.warning("tools: strict does not hold: %.500s", error)  # clients say it of any schema
            return None

    def _known_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(inner_of(self._tokenizer), self._tokenizer.eos_token_ids)
            return self._compiler

    def _wanted(self, constraint: Constraint) -> _Wanted | None:
        tools = constraint.tools
        if tools is not None:
            form = tool_format(self._tokenizer, inner_of(self._tokenizer))
            if form is not None or tools.required or self._tokenizer.has_tool_calling:
                return self._of_tools(constraint, tools, form)
            if tools.strict:
                logging.warning("tools: strict: this model's tool calls are not known here and are left as they are")
        return None if constraint.answer is None else _Wanted(constraint.answer, constraint.param)

    def _of_tools(self, constraint: Constraint, tools: Tools, form: ToolFormat | None) -> _Wanted | None:
        what = "tool_choice" if tools.required else "tools"
        is_free = not tools.required and constraint.answer is None
        if form is None:
            if is_free:
                logging.warning("tools: strict: this model's tool calls cannot be constrained and are left as they are")
                return None
            raise invalid(
                f"{what}: this model writes tool calls in a form that cannot be constrained"
                if self._tokenizer.has_tool_calling
                else f"{what}: this model cannot call tools",
                what,
            )
        parts = [(_source_of(tool), tool.param) for tool in tools.callable]
        param = what
        if constraint.answer is not None and not tools.required:
            if constraint.schema is None:
                raise invalid(f"{constraint.param}: only JSON can be asked for beside tools", "structured_outputs")
            parts.append((constraint.answer, constraint.param))
            param = constraint.param
        try:
            source = calls(tools, form, answer=None if tools.required else constraint.schema, is_free=is_free)
        except GrammarError as error:
            if is_free:
                logging.warning("tools: strict does not hold: %s", error)
                return None
            raise invalid(f"{what}: {error}", what) from error
        return _Wanted(source, param, form.trigger if is_free else (), parts, is_free)


class _Wanted(NamedTuple):
    """What is compiled for a constraint.

    Attributes:
        source, trigger: see :meth:`GrammarCompiler.compile`.
        param: the parameter of the request that it comes from.
        parts: schemas that the source is made of and their parameters, which are checked one by one before, so that an
            error names the one at fault.
        is_free: the answer may be anything, but for its calls.
    """

    source: GrammarSource
    param: str
    trigger: tuple[int, ...] = ()
    parts: Sequence[tuple[GrammarSource, str]] = ()
    is_free: bool = False


def _source_of(tool: Tool) -> GrammarSource:
    try:
        return GrammarSource.json(tool.schema)
    except RecursionError:
        raise invalid(f"{tool.param} is nested too deeply", "tools") from None


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    """Turn what is wrong with a grammar into a refusal of the request that names the parameter."""
    try:
        yield
    except GrammarAbandoned:
        raise ConnectionAbortedError("the client has gone") from None
    except GrammarError as error:
        raise invalid(f"{param}: {error}", param.partition(".")[0].partition("[")[0]) from error


def inner_of(tokenizer: Any) -> Any:
    """Return the tokenizer of transformers in mlx-lm's wrapper."""
    return getattr(tokenizer, "_tokenizer", tokenizer)


def reasons_first(tokenizer: Any, prompt: list[int]) -> bool:
    """Return whether the prompt ends in reasoning that the answer has to end, as mlx-lm's server finds out."""
    if not tokenizer.has_thinking:
        return False
    if tokenizer.response_initial_state:
        return bool(tokenizer.response_initial_state == "reasoning")
    return bool(tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt))


def with_thinking_budget(
    grammar: CompiledGrammar | None, tokenizer: Any, num_tokens: int, *, is_open: bool
) -> CompiledGrammar:
    """Return a grammar that also ends reasoning after ``num_tokens``; ``is_open``: the prompt ends in it."""
    free = CompiledGrammar(None, 0, sorted(tokenizer.eos_token_ids))
    begin, end = (tuple(tokens) for tokens in (tokenizer.think_start_tokens, tokenizer.think_end_tokens))
    return replace(grammar or free, thinking=ThinkingBudget(num_tokens, begin, end, is_open))


def behind_reasoning(grammar: CompiledGrammar, tokenizer: Any) -> CompiledGrammar:
    """Return the grammar of an answer that begins with reasoning, which is free."""
    return grammar.begins_after(tokenizer.think_end_tokens)
