"""TokenizerGrammars: what requests say of their answers, as grammars of one model's tokens."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from ...engine.grammar.compiler import GrammarCompiler, GrammarSource, json_in_lark, text_in_lark
from ...engine.grammar.grammar import CompiledGrammar, ThinkingBudget
from ...engine.grammar.trial import IsCancelled
from ...errors import GrammarAbandoned, GrammarError
from ...server.constraint import Constraint, Tool, Tools
from ...server.errors import RequestRefused, invalid


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
            if wanted.trigger is None:
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
        if tools is not None and (tools.required or self._tokenizer.has_tool_calling):
            return self._of_tools(constraint, tools)
        if tools is not None and tools.strict:
            logging.warning("tools: strict: this model's tool calls are not known here and are left as they are")
        return None if constraint.answer is None else _Wanted(constraint.answer, constraint.param)

    def _of_tools(self, constraint: Constraint, tools: Tools) -> _Wanted | None:
        form = tool_format(self._tokenizer)
        what = "tool_choice" if tools.required else "tools"
        if not tools.required and constraint.answer is None and (form is None or form.trigger is None):
            logging.warning("tools: strict: this model's tool calls cannot be constrained and are left as they are")
            return None
        if form is None:
            raise invalid(
                f"{what}: this model writes tool calls in a form that cannot be constrained"
                if self._tokenizer.has_tool_calling
                else f"{what}: this model cannot call tools",
                what,
            )
        parts = [(_source_of(tool), tool.param) for tool in tools.callable]
        if tools.required:
            return _Wanted(calls(tools, form), what, parts=parts)
        if constraint.answer is not None:
            if constraint.schema is None:
                raise invalid(f"{constraint.param}: only JSON can be asked for beside tools", "structured_outputs")
            parts.append((constraint.answer, constraint.param))
            return _Wanted(calls(tools, form, answer=constraint.schema), constraint.param, parts=parts)
        return _Wanted(calls(tools, form, is_triggered=True), what, form.trigger, parts)


class _Wanted(NamedTuple):
    """What is compiled for a constraint.

    Attributes:
        source, trigger: see :meth:`GrammarCompiler.compile`.
        param: the parameter of the request that it comes from.
        parts: schemas that the source is made of and their parameters, which are checked one by one before, so that an
            error names the one at fault.
    """

    source: GrammarSource
    param: str
    trigger: int | None = None
    parts: Sequence[tuple[GrammarSource, str]] = ()


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


# The grammar of calls ----------------------------------------------------------------------------------------------


class CallForm(NamedTuple):
    """How a model writes a call, as text in which NAME is the function's name, ``~`` a line break that may lack, and
    ``#`` a number.

    Attributes:
        begin, end: around the arguments.
        key: before an argument, whose name is KEY; empty: the arguments are one JSON object.
        value_end: behind an argument. A string is written as it is, what has another type in JSON.
        repeats: several calls may stand between the marks of one.
    """

    begin: str
    end: str
    key: str = ""
    value_end: str = ""
    repeats: bool = False


_KIMI = "<|tool_call_begin|>functions.NAME:#<|tool_call_argument_begin|>"
FORMS = {  # by the module of mlx-lm's parser
    "json_tools": CallForm('{"name": "NAME", "arguments": ', "}"),
    "qwen3_coder": CallForm("<function=NAME>\n", "</function>", "<parameter=KEY>\n", "\n</parameter>\n"),
    "glm47": CallForm("NAME~", "", "<arg_key>KEY</arg_key>~<arg_value>", "</arg_value>~"),
    "longcat": CallForm(
        "NAME~", "", "<longcat_arg_key>KEY</longcat_arg_key>~<longcat_arg_value>", "</longcat_arg_value>~"
    ),
    "minimax_m2": CallForm('<invoke name="NAME">~', "</invoke>", '<parameter name="KEY">', "</parameter>~", True),
    "kimi_k2": CallForm(_KIMI, "<|tool_call_end|>", repeats=True),
    "mistral": CallForm("NAME[ARGS]", ""),
}


class ToolFormat(NamedTuple):
    """How a model marks and writes calls.

    Attributes:
        start, end: what stands around them, as terms of a Lark grammar.
        trigger: the token that ``start`` is, or None if it is text.
        form: of a call.
        special: texts that are special tokens, and not what their characters say, with their numbers.
    """

    start: str
    end: str
    trigger: int | None
    form: CallForm
    special: Mapping[str, int]

    def terms(self, text: str, name: str = "") -> str:
        """Return a text of the form as terms of a Lark grammar; without a name, KEY is a terminal."""
        found = []
        marks = sorted(self.special, key=len, reverse=True)
        for part in re.split("(" + "|".join([*map(re.escape, marks), "NAME", "KEY", "[~#]"]) + ")", text):
            if part in self.special:
                found.append(f"<[{self.special[part]}]>")
            elif part in ("~", "#", "KEY") and not (part == "KEY" and name):
                found.append({"~": r'"\n"?', "#": "/[0-9]+/", "KEY": "KEY"}[part])
            elif part:
                found.append(text_in_lark(name if part in ("NAME", "KEY") else part))
        return " ".join(found)


def calls(tools: Tools, form: ToolFormat, *, answer: Any = None, is_triggered: bool = False) -> GrammarSource:
    """Return a grammar of the calls.

    Args:
        tools: what may be called.
        form: how the model writes a call.
        answer: a JSON schema: the answer may be of that instead; None: it has to be a call.
        is_triggered: the grammar begins behind the token that begins a call, and ends with that call.
    """
    lines = []
    again = ' ("\\n"? call)*' if form.form.repeats and tools.parallel else ""
    body = f'"\\n"? call{again} "\\n"? {form.end}'
    if is_triggered:
        lines.append(f"start: {body}")
    else:
        several = ' ("\\n"? one)*' if tools.parallel else ""
        lines.append(f"start: one{several}" + ("" if answer is None else " | answer"))
        lines.append(f"one: {form.start} {body}")
        if answer is not None:
            lines.append(f"answer: {json_in_lark(answer)}")
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools.callable))))
    if form.form.key:
        lines += [f"free: {form.terms(form.form.key)} text"]
        lines += [r"KEY: /[^<>\s\"]+/", _free_text(form)]
    for index, tool in enumerate(tools.callable):
        if form.form.key:
            lines += _tagged(index, tool, form)
            continue
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
        begin, end = form.terms(form.form.begin, name), form.terms(form.form.end)
        lines.append(f"call_{index}: {begin} arguments_{index} {end}")
        lines.append(f"arguments_{index}: {json_in_lark(tool.schema)}")
    return GrammarSource("tools", "\n".join(lines))


def _free_text(form: ToolFormat) -> str:
    """Return the lines of a text that ends where an argument does."""
    end = form.form.value_end.removesuffix("~")
    behind = form.terms("~") if form.form.value_end.endswith("~") else ""
    if end in form.special:
        return f"text: /(?s:.*)/ {form.terms(end)} {behind}"
    pattern = re.escape(end).replace("\\\n", r"\n").replace("/", r"\/")
    return f"text: rest {behind}\nrest[lazy]: /(?s:.*){pattern}/"


def _tagged(index: int, tool: Tool, form: ToolFormat) -> list[str]:
    """Return the lines of a call with a tag for each argument, in the schema's order."""
    schema, (begin, end, key, *_) = tool.schema, form.form
    properties = schema.get("properties")
    terms, lines = [], []
    for number, (name, given) in enumerate(properties.items() if isinstance(properties, dict) else ()):
        lines.append(f"value_{index}_{number}: {_value(given, schema, form)}")
        is_required = name in (schema.get("required") or ())
        terms.append(f"({form.terms(key, name)} value_{index}_{number}){'' if is_required else '?'}")
    if not terms and schema.get("additionalProperties") is not False:
        terms.append("free*")
    return [f"call_{index}: {form.terms(begin, tool.name)} {' '.join(terms)} {form.terms(end)}", *lines]


def _value(given: Any, schema: Mapping[str, Any], form: ToolFormat) -> str:
    """Return an argument and its end as terms of a Lark grammar: text for strings, JSON for what has another type."""
    end = form.terms(form.form.value_end)
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        return "text"
    if given["type"] != "string":
        return f"{json_in_lark({**given, **({'$defs': schema['$defs']} if '$defs' in schema else {})})} {end}"
    choices = given.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        return f"({' | '.join(map(text_in_lark, choices))}) {end}"
    return "text"


def inner_of(tokenizer: Any) -> Any:
    """Return the tokenizer of transformers in mlx-lm's wrapper."""
    return getattr(tokenizer, "_tokenizer", tokenizer)


def tool_format(tokenizer: Any) -> ToolFormat | None:
    """Return how a model writes tool calls, if a grammar can say it."""
    package, _, name = (getattr(tokenizer.tool_parser, "__module__", None) or "").rpartition(".")
    form = FORMS.get(name) if package == "mlx_lm.tool_parsers" else None
    if form is None:
        return None
    known = getattr(inner_of(tokenizer), "added_tokens_decoder", {})
    texts = {str(token.content): (number, token.special) for number, token in known.items()}
    # llguidance takes added tokens in angle brackets for special ones, whatever the tokenizer says.
    special = {
        text: number for text, (number, is_special) in texts.items() if is_special or text[:1] + text[-1:] == "<>"
    }
    if name == "mistral" and "[ARGS]" not in tokenizer.get_vocab():  # the older ones write a list
        form = CallForm('[{"name": "NAME", "arguments": ', "}]")
    (start, trigger), (end, _) = (
        _marker(text, tokens)
        for text, tokens in (
            (tokenizer.tool_call_start, tokenizer.tool_call_start_tokens),
            (tokenizer.tool_call_end, tokenizer.tool_call_end_tokens),
        )
    )
    return ToolFormat(start, end if tokenizer.tool_call_end else "", trigger, form, special)


def _marker(text: str, tokens: tuple[int, ...]) -> tuple[str, int | None]:
    """Return it as a term of a Lark grammar, and the token that it is, if it is one."""
    return (f"<[{tokens[0]}]>", tokens[0]) if len(tokens) == 1 else (f'"{text}"', None)


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
