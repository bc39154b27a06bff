"""Grammars for mlx-lm's tokenizers: tool calls in the format of a model's family, and answers after reasoning."""

from __future__ import annotations

import functools
import json
import keyword
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import GrammarError
from ..grammar.compiler import GrammarCompiler, GrammarSource, json_in_lark, text_in_lark
from ..grammar.grammar import CompiledGrammar, ThinkingBudget
from .call_formats import HARMONY_TOKENS, CallForm, call_form, local_schema, types_of
from .errors import RequestRefused, invalid
from .request import Constraint, Tool, Tools

SCALARS = {"integer", "number", "boolean", "null"}
MAX_THINK_TOKENS = 16  # at a prompt's end, that begin reasoning
ANY_SCALAR = {"type": sorted(SCALARS)}


class ToolFormat(NamedTuple):
    """The format of a model's calls and of the marks around them.

    Attributes:
        start, end: the marks, as terms of a Lark grammar.
        trigger: token ids of ``start``; empty if it is plain text, which tokens may contain together with other text.
        form: format of a call; None: OpenAI's Harmony.
        special: ids of special tokens by their text.
        texts: ``start`` and ``end`` as the model writes them.
        stop: any token that ends an answer, as a term.
    """

    start: str
    end: str
    trigger: tuple[int, ...]
    form: CallForm | None
    special: Mapping[str, int]
    texts: tuple[str, str] = ("", "")
    stop: str = ""

    def terms(self, text: str, name: str = "", type_: str = "string") -> str:
        """Return a text of :class:`CallForm` as terms of a Lark grammar; without a name, KEY becomes a terminal."""
        found = []
        marks = sorted(self.special, key=len, reverse=True)
        for part in re.split("(" + "|".join([*map(re.escape, marks), "NAME", "KEY", "TYPE", "[~#]"]) + ")", text):
            if part in self.special:
                found.append(f"<[{self.special[part]}]>")
            elif part in ("~", "#", "KEY") and not (part == "KEY" and name):
                found.append({"~": r'"\n"?', "#": "/[0-9]+/", "KEY": "KEY"}[part])
            elif part:
                found.append(text_in_lark({"NAME": name, "KEY": name, "TYPE": type_}.get(part, part)))
        return " ".join(found)


def tool_format(tokenizer: Any, inner: Any) -> ToolFormat | None:
    """Return the format of a model's tool calls, or None if it is not known.

    Args:
        tokenizer: mlx-lm's wrapper.
        inner: the transformers tokenizer in it.
    """
    known = getattr(inner, "added_tokens_decoder", {})
    texts = {str(token.content): (number, token.special) for number, token in known.items()}
    # llguidance treats added tokens in angle brackets as special, whatever the tokenizer says.
    special = {
        text: number for text, (number, is_special) in texts.items() if is_special or text[:1] + text[-1:] == "<>"
    }
    if special.keys() >= HARMONY_TOKENS:
        return ToolFormat("", "", (), None, special)
    form = call_form(tokenizer)
    if form is None:
        return None
    stop = f"<[{','.join(map(str, sorted(tokenizer.eos_token_ids)))}]>"
    plain = ToolFormat("", "", (), form, special, (tokenizer.tool_call_start, tokenizer.tool_call_end), stop)
    tokens, ends = tokenizer.tool_call_start_tokens, tokenizer.tool_call_end_tokens
    numbers = set(special.values())
    return plain._replace(
        start=f"<[{tokens[0]}]>" if len(tokens) == 1 else plain.terms(tokenizer.tool_call_start),
        end=f"<[{ends[0]}]>" if len(ends) == 1 else plain.terms(tokenizer.tool_call_end),
        trigger=tokens if len(tokens) == 1 or {tokens[0], tokens[-1]} <= numbers else (),
    )


def calls(tools: Tools, form: ToolFormat, *, answer: Any = None, is_free: bool = False) -> GrammarSource:
    """Return a grammar of the calls.

    Args:
        tools: what may be called.
        form: format of the model's calls.
        answer: JSON schema of an answer that is allowed in place of calls; None: it must be a call.
        is_free: other text may surround the calls. If the format has a trigger, the grammar starts after the trigger
            and ends with that call.

    Raises:
        GrammarError: the format cannot express the arguments of one of the tools.
    """
    try:
        return GrammarSource("tools", "\n".join(_Calls(tools, form).lines(answer, is_free=is_free)))
    except RecursionError:
        raise GrammarError("recursive or deeply nested schemas are not supported in this model's call format") from None


def _pattern(text: str) -> str:
    """Return a text escaped for a regular expression in Lark."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")


class _Calls:
    """Builder of the lines of one grammar."""

    def __init__(self, tools: Tools, form: ToolFormat) -> None:
        self._tools, self._form = tools, form
        self._lines: list[str] = []
        self._style = form.form or CallForm("", "")

    def lines(self, answer: Any, *, is_free: bool) -> list[str]:
        if self._form.form is None:
            self._add_harmony(answer, is_free=is_free)
        else:
            self._add_marked(self._form.form, answer, is_free=is_free)
        return self._lines

    # A call between marks -------------------------------------------------------------------------------------

    def _add_marked(self, style: CallForm, answer: Any, *, is_free: bool) -> None:
        form, parallel = self._form, self._tools.parallel
        again = parallel and not (style.around[0] and not form.end)
        between = text_in_lark(style.comma) if style.comma else r'"\n"?'
        one = f"call ({between} call)*" if style.repeats and parallel else "call"
        begin, end = (text_in_lark(each) if each else r'"\n"?' for each in style.around)
        body = f"{begin} {one} {end} {form.end}"
        if is_free and not form.end:  # the parser would take what follows for a part of the call
            body += (f" ({form.start} {body})*" if again else "") + f" {form.stop}"
        if is_free and form.trigger:
            self._lines.append(f"start: {body}")
        elif is_free:
            numbers = ",".join(str(each) for each in sorted(form.special.values()))
            mark = _pattern(form.texts[0])
            self._lines += [
                f"start: (free before {body})* free",
                f"free: ({f'<[{numbers}]> | ' if numbers else ''}ANY)*",
            ]
            self._lines += ["ANY: /(?s:.+)/", f"before[lazy]: /(?s:.*){mark}/"]
        else:
            several = ' ("\\n"? one)*' if again else ""
            self._lines.append(f"start: one{several}" + ("" if answer is None else " | answer"))
            self._lines.append(f"one: {form.start} {body}")
            if answer is not None:
                self._lines.append(f"answer: {json_in_lark(answer)}")
        self._lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(self._tools.callable))))
        if style.key:
            self._add_texts(style)
        for index, tool in enumerate(self._tools.callable):
            if style.key:
                self._add_tagged(f"call_{index}", tool, style)
                continue
            name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
            begin, end = form.terms(style.begin, name), form.terms(style.end)
            self._lines.append(f"call_{index}: {begin} arguments_{index} {end}")
            self._lines.append(f"arguments_{index}: {json_in_lark(tool.schema)}")

    def _add_texts(self, style: CallForm) -> None:
        """Add the rules of strings and of arguments that no schema names."""
        terms = self._form.terms
        self._lines.append(r"KEY: /[^<>\s\"]+/" if not style.names else r"KEY: /\w+/")
        other = json_in_lark(ANY_SCALAR) if style.quote else ""
        behind = terms("~") if style.value_end.endswith("~") else ""
        self._lines += [f"any: text {behind}{f' | {other}' if other else ''}", f"free_argument: {terms(style.key)} any"]
        if style.quote == '"':
            self._lines.append(f'text: /"{style.strings}"/')
            return
        begin, end = terms(style.quote), style.quote or style.value_end.removesuffix("~")
        is_special = any(mark in end for mark in self._form.special)
        without = f" & ~/(?s:.*){_pattern(end)}(?s:.*)/" if is_special else ""
        if is_special:
            self._lines += [f"text: {begin} REST {terms(end.lstrip())}", f"REST: /{style.strings}/{without}"]
        else:
            self._lines += [f"text: {begin} rest", f"rest[lazy]: /{style.strings}{_pattern(end)}/"]

    def _add_tagged(self, rule: str, tool: Tool, style: CallForm) -> None:
        """Add a call whose arguments have keys, in the schema's order."""
        terms, schema = self._form.terms, tool.schema
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        names = [tool.name, *properties]
        if style.names and not all(re.fullmatch(style.names, each) and not keyword.iskeyword(each) for each in names):
            given = ", ".join(names)[:200]
            raise GrammarError(
                f"{tool.name}: names in this model's call format must match {style.names} and not be Python keywords, "
                f"got {given}"
            )
        items = []
        for number, (name, given) in enumerate(properties.items()):
            value = f"{rule}_{number}"
            type_ = next(iter(sorted(types_of(given, schema) or ())), "string")
            self._lines.append(f"{value}: {terms(style.key, name, type_)} {self._value(value, given, schema)}")
            items.append((value, name in (schema.get("required") or ())))
        if not items and schema.get("additionalProperties") is not False:
            comma = text_in_lark(style.comma) if style.comma else ""
            arguments = f"(free_argument ({comma} free_argument)*)?"
        else:
            arguments = self._list(rule, items)
        self._lines.append(f"{rule}: {terms(style.begin, tool.name)} {arguments} {terms(style.end)}")

    def _list(self, rule: str, items: Sequence[tuple[str, bool]]) -> str:
        """Return the items as terms, in order; those that are not required are optional."""
        if not self._style.comma:
            return " ".join(name if is_required else f"{name}?" for name, is_required in items)
        comma = text_in_lark(self._style.comma)
        for number, (name, is_required) in enumerate(items):  # _n: from here, after an item; _l: as the first
            behind, further = (
                ("", "") if number + 1 == len(items) else (f"{rule}_l{number + 1}", f"{rule}_n{number + 1}")
            )
            self._lines.append(f"{rule}_n{number}: {comma} {name} {further}" + ("" if is_required else f" | {further}"))
            self._lines.append(f"{rule}_l{number}: {name} {further}" + ("" if is_required else f" | {behind}"))
        return f"{rule}_l0" if items else ""

    def _value(self, rule: str, given: Any, schema: Mapping[str, Any]) -> str:
        """Return an argument's value and its end as terms: text for strings, JSON for other types."""
        style = self._style
        end = self._form.terms(style.value_end)
        given, types = local_schema(given, schema), types_of(given, schema)
        if types is None:
            return "any"
        choices = [given["const"]] if "const" in given else given.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
            texts = (each if style.quote != '"' else json.dumps(each, ensure_ascii=False)[1:-1] for each in choices)
            quote = self._form.terms(style.quote)
            return f"{quote} ({' | '.join(map(text_in_lark, texts))}) {quote} {end}"
        parts = ["any"] if "string" in types and not style.quote else []
        parts += ["text"] if "string" in types and style.quote else []
        if others := types - {"string"}:
            parts.append(f"{self._other(rule, given, others, schema)} {end}")
        return f"({' | '.join(parts)})"

    def _other(self, rule: str, given: Any, types: set[str], schema: Mapping[str, Any]) -> str:
        """Return a value of these types, other than strings, as terms."""
        containers = types - SCALARS
        if not containers or self._style.containers == "json":
            shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            kinds = {"type": sorted(types)} if "string" in (types_of(given, schema) or ()) else {}
            return json_in_lark({**given, **kinds, **shared})
        parts = [json_in_lark({"type": sorted(types & SCALARS)})] if types & SCALARS else []
        if "object" in containers:
            self._add_object(f"{rule}_o", given, schema)
            parts.append(f"{rule}_o")
        if "array" in containers:
            items = given.get("items") or {}
            self._lines.append(f"{rule}_i: {self._value(f'{rule}_i', items, schema)}")
            least, most = given.get("minItems") or 0, given.get("maxItems")
            more = f'("," {rule}_i){{{max(least - 1, 0)},{"" if most is None else max(most - 1, 0)}}}'
            inner = "" if most == 0 else f"({rule}_i {more})" + ("" if least else "?")
            self._lines.append(f'{rule}_a: "[" {inner} "]"')
            parts.append(f"{rule}_a")
        return f"({' | '.join(parts)})"

    def _add_object(self, rule: str, given: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
        properties = given.get("properties") or {}
        items = []
        for number, (name, inner) in enumerate(properties.items()):
            if re.fullmatch(r"\w+", name) is None:
                raise GrammarError(
                    "names in this model's call format must be made of letters, digits and underscores, "
                    f"got {name[:200]}"
                )
            item = f"{rule}_{number}"
            self._lines.append(f"{item}: {text_in_lark(name + ':')} {self._value(item, inner, schema)}")
            items.append((item, name in (given.get("required") or ())))
        free = items or given.get("additionalProperties") is False
        arguments = self._list(rule, items) if free else '(free_argument ("," free_argument)*)?'
        self._lines.append(f'{rule}: "{{" {arguments} "}}"')

    # Harmony --------------------------------------------------------------------------------------------------

    def _add_harmony(self, answer: Any, *, is_free: bool) -> None:
        """Add the rules of an answer's messages: reasoning, then a call or an answer; if it is free, in any order."""
        mark = {name: f"<[{number}]>" for name, number in self._form.special.items()}
        channel, message, begin = mark["<|channel|>"], mark["<|message|>"], mark["<|start|>"]
        ends = " | ".join(mark[name] for name in ("<|end|>", "<|call|>", "<|return|>") if name in mark)
        kind = f'(" "? {mark["<|constrain|>"]} "json" | " json")?' if "<|constrain|>" in mark else '" json"?'
        again = "(next call)*" if self._tools.parallel else ""
        last = "call" if answer is None else "(call | answer)"
        names = f'"analysis" | "commentary"{" | " + chr(34) + "final" + chr(34) if is_free else ""}'
        self._lines += [
            "start: said (next said)*" if is_free else f"start: (free next)* {last} {again}",
            "said: free | call",
            f"free: {channel} ({names}) {message} ANY?",
            "ANY: /(?s:.+)/",
            f'next: ({ends}) {begin} "assistant"',
            "call: " + " | ".join(f"call_{index}" for index in range(len(self._tools.callable))),
        ]
        if answer is not None:
            self._lines += [f'answer: {channel} "final" {kind} {message} {json_in_lark(answer)}']
        for index, tool in enumerate(self._tools.callable):
            to = text_in_lark(f" to=functions.{tool.name}")
            head = f'({channel} "commentary" {to} {kind} | {to} {channel} "commentary" {kind})'
            self._lines += [f"call_{index}: {head} {message} arguments_{index}"]
            self._lines += [f"arguments_{index}: {json_in_lark(tool.schema)}"]


class TokenizerGrammars:
    """Compiler of constraints for one tokenizer, which llguidance reads at the first constraint. Thread-safe.

    Args:
        tokenizer: mlx-lm's wrapper.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> CompiledGrammar | None:
        """Return the compiled grammar of an answer; None if any answer is allowed. Blocks while it is built.

        Raises:
            RequestRefused: 400, the constraint cannot be used; the message says why.
        """
        plan = self._plan(constraint)
        if plan is None:
            return None
        try:
            with _refusing(plan.param):
                with self._lock:  # one thread makes it; from Python 3.12 on a cached property has no lock of its own
                    compiler = self._compiler
                try:
                    return compiler.compile(plan.source, trigger=plan.trigger)
                except GrammarError:
                    for part, param in plan.parts:  # the one at fault is named
                        with _refusing(param):
                            compiler.compile(part)
                    raise
        except RequestRefused as error:
            if not plan.is_free:
                raise
            logging.warning("tools: strict is not enforced: %.500s", error)  # clients set it for any schema
            return None

    @functools.cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(unwrapped(self._tokenizer), self._tokenizer.eos_token_ids)

    def _plan(self, constraint: Constraint) -> _GrammarPlan | None:
        tools = constraint.tools
        if tools is not None:
            form = tool_format(self._tokenizer, unwrapped(self._tokenizer))
            if form is not None or tools.required or self._tokenizer.has_tool_calling:
                return self._plan_tools(constraint, tools, form)
            if tools.strict:
                logging.warning("tools: strict is not enforced: the format of this model's tool calls is not known")
        return None if constraint.answer is None else _GrammarPlan(constraint.answer, constraint.param)

    def _plan_tools(self, constraint: Constraint, tools: Tools, form: ToolFormat | None) -> _GrammarPlan | None:
        what = "tool_choice" if tools.required else "tools"
        is_free = not tools.required and constraint.answer is None
        if form is None:
            if is_free:
                logging.warning("tools: strict is not enforced: this model's tool calls cannot be constrained")
                return None
            raise invalid(
                f"{what}: this model writes tool calls in a format that cannot be constrained"
                if self._tokenizer.has_tool_calling
                else f"{what}: this model cannot call tools",
                what,
            )
        parts = [(_source_of(tool), tool.param) for tool in tools.callable]
        param = what
        if constraint.answer is not None and not tools.required:
            if constraint.schema is None:
                raise invalid(f"{constraint.param}: with tools, only JSON is supported", "structured_outputs")
            parts.append((constraint.answer, constraint.param))
            param = constraint.param
        try:
            source = calls(tools, form, answer=None if tools.required else constraint.schema, is_free=is_free)
        except GrammarError as error:
            if is_free:
                logging.warning("tools: strict is not enforced: %s", error)
                return None
            raise invalid(f"{what}: {error}", what) from error
        return _GrammarPlan(source, param, form.trigger if is_free else (), parts, is_free)


class _GrammarPlan(NamedTuple):
    """The grammar to compile for a constraint.

    Attributes:
        source, trigger: see :meth:`GrammarCompiler.compile`.
        param: the request parameter that the grammar comes from.
        parts: schemas within the source, with their parameters; compiled one by one if the source cannot be, so
            that an error names the one at fault.
        is_free: only the calls in the answer are constrained.
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
    """Turn errors of a grammar into a refusal of the request that names the parameter."""
    try:
        yield
    except GrammarError as error:
        raise invalid(f"{param}: {error}", param.partition(".")[0].partition("[")[0]) from error


def unwrapped(tokenizer: Any) -> Any:
    """Return the transformers tokenizer in mlx-lm's wrapper."""
    return tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer


def ends_in_reasoning(tokenizer: Any, prompt: list[int]) -> bool:
    """Return whether the prompt ends with the mark that begins reasoning, and white space. An earlier mark is a part of
    some message."""
    if not tokenizer.has_thinking:
        return False
    if tokenizer.response_initial_state:
        return bool(tokenizer.response_initial_state == "reasoning")
    place = tokenizer.rfind_think_start(prompt, start=len(prompt) - MAX_THINK_TOKENS)
    return place >= 0 and not tokenizer.decode(prompt[place + len(tokenizer.think_start_tokens) :]).strip()


def with_thinking_budget(
    grammar: CompiledGrammar | None, tokenizer: Any, num_tokens: int, *, is_open: bool
) -> CompiledGrammar:
    """Return a grammar that also ends reasoning after ``num_tokens``. ``is_open``: the prompt ends within reasoning."""
    free = CompiledGrammar(None, 0, sorted(tokenizer.eos_token_ids))
    begin, end = (tuple(tokens) for tokens in (tokenizer.think_start_tokens, tokenizer.think_end_tokens))
    return replace(grammar or free, thinking=ThinkingBudget(num_tokens, begin, end, is_open))
