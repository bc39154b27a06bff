"""AnswerReader: reads an answer as text, reasoning and tool calls, while it is generated.

A call ends where its own grammar ends: JSON by its brackets and strings, calls in tags where the last argument ends,
calls in Python by their brackets and quotes. A mark within an argument ends nothing. What is no call, or has not ended
when the answer ends, is text as the model wrote it.
"""

from __future__ import annotations

import functools
import html
import json
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import regex

from .call_formats import (
    FORMS,
    NAME,
    SPACE,
    CallForm,
    TextMarks,
    argument,
    checked_arguments,
    members,
    object_of,
    python_arguments,
    types_of,
)

BARE_CALL = "<function="  # Qwen3-Coder's calls often lack the mark before them
Reading = Generator[None, None, Any]  # yields when it needs more text
Types = Callable[[str], set[str] | None]

_INSIDE, _OUTSIDE = regex.compile(r'[^"\\\x00-\x1f]*'), regex.compile(r"[\s,:0-9.eE+\-truefalsn]*")  # of JSON strings
_ALONE = regex.compile(rf'{SPACE}(?=\{{\s{{0,40}}"name"\s{{0,40}}:\s{{0,40}}"(?P<name>{NAME})")')
_BRACKET = regex.compile(rf"{SPACE}(?=[{{\[])")
_OBJECT, _KEY = regex.compile(rf"{SPACE}(?=\{{)"), regex.compile(r"((?:^|[{,])\s*)([\w-]+)\s*:")
_LITERAL = regex.compile(r"\b(?:true|false|null)\b")
_LITERALS = {"true": "True", "false": "False", "null": "None"}
# gpt-oss: a header names the role, channel, recipient and type of a message; the prompt may contain its beginning.
_HEADER = regex.compile(
    r"(?:<\|start\|>[^<]{0,200})?(?: to=[^\s<]{1,200})?(?:<\|channel\|>[^<]{1,300})?"
    r"(?:<\|constrain\|>[^<]{0,50})?<\|message\|>"
)
_ENDS, _BEGINS = r"<\|(?:end|return|call)\|>", r"<\|(?:start|channel)\|>"
_MARKS, _END = regex.compile(rf"{_ENDS}|{_BEGINS}"), regex.compile(SPACE + _ENDS)
_BOUNDARY = regex.compile(rf"{_ENDS}{SPACE}(?={_BEGINS}| to=)|(?={_BEGINS})(?={_HEADER.pattern})")
_RECIPIENT = regex.compile(r"to=(?:functions\.)?([^\s<]+)")
_NOT_READABLE = (ValueError, TypeError, SyntaxError, LookupError, AttributeError, RecursionError, MemoryError)


class Token(NamedTuple):
    """A token with its log-probability.

    Attributes:
        id: index in the vocabulary.
        text: the token decoded by itself.
        bytes: its UTF-8 bytes, which may be part of a character.
        logprob: None for the first token of a prompt.
        top: the most likely tokens at its position, most likely first; their own ``top`` is empty.
    """

    id: int
    text: str
    bytes: bytes
    logprob: float | None
    top: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Call:
    """A tool call; ``index`` is its place among the answer's calls, ``id`` names it for the tool's result."""

    index: int
    name: str
    id: str


@dataclass
class Delta:
    """The next part of an answer: some text, some reasoning, or some of a call's arguments.

    Attributes:
        kind: ``text``, ``reasoning`` or ``call``.
        text: the text, or the arguments as JSON; may be empty.
        call: the call that the arguments are of.
        is_first, is_last: the call begins, or ends; one that does not end is not whole.
        tokens: tokens with log-probabilities, if requested.
    """

    kind: str
    text: str = ""
    call: Call | None = None
    is_first: bool = False
    is_last: bool = False
    tokens: list[Token] = field(default_factory=list)


class _NoCall(Exception):
    """What was read is no call, or a call that has not ended."""


class _Style(NamedTuple):
    """A format of calls, compiled.

    Attributes:
        form: the format; None: JSON with its members in any order, or a name alone.
        head: begins a call.
        key: begins an argument.
        follows: the end of an argument, before another or the end of the call.
        tail: ends a call.
    """

    form: CallForm | None
    head: Any
    key: Any = None
    follows: Any = None
    tail: Any = None


class _Styles(NamedTuple):
    """The formats in which calls of a model are recognised, its own first, and the pattern of what ends its calls."""

    known: tuple[_Style, ...]
    end: Any


_PLACES = {"NAME": f"(?P<name>{NAME}+)", "KEY": f"(?P<key>{NAME}+)", "TYPE": r'(?P<type>[^"]{0,40})'}
_BREAKS = "~\n"
_PLACES |= {"#": r"\d{1,999}", "~": SPACE, "\n": SPACE}


def _pattern(template: str) -> str:
    """Return a template of a :class:`CallForm` as a regular expression."""
    parts = regex.split("(NAME|KEY|TYPE|[~#\n])", template)
    return "".join(_PLACES.get(part) or regex.escape(part, special_only=True) for part in parts)


def _style(form: CallForm, call_end: str) -> _Style:
    first = rf"[\s,]{{0,40}}(?:{regex.escape(form.around[0])}{SPACE})?"
    head = form.read_begin or _pattern(form.begin.rstrip("~\n")) + ("" if form.quote else rf"{SPACE}(?=\S)")
    tail = form.read_end or regex.escape(form.end or call_end) or "(?!)"
    key = _pattern(form.key.rstrip("\n"))
    follows = rf"{SPACE}{regex.escape(form.value_end.strip(_BREAKS))}{SPACE}(?=(?:{key})|(?:{tail}))"
    return _Style(form, *(regex.compile(each) for each in (first + head, SPACE + key, follows, SPACE + tail)))


@functools.lru_cache(maxsize=32)
def _styles(form: CallForm, call_end: str) -> _Styles:
    forms = dict.fromkeys((form, FORMS["json_tools"], FORMS["qwen3_coder"]))
    known = [_style(each, call_end) for each in forms]
    known.append(_Style(None, regex.compile(r"[\s,]{0,40}(?=\{)")))
    if call_end:
        name = rf"{SPACE}(?P<name>{NAME}+)\s{{0,9}}(?:\(\s{{0,9}}\))?{SPACE}(?={regex.escape(call_end)})"
        known.append(_Style(None, regex.compile(name)))
    around = regex.escape(form.around[1])
    end = rf"(?:{SPACE}{around})?{SPACE}{regex.escape(call_end)}" if call_end else SPACE + (around or "(?!)")
    return _Styles(tuple(known), regex.compile(end))


@functools.lru_cache(maxsize=64)
def _any_of(marks: tuple[str, ...]) -> Any:
    return regex.compile("|".join(map(regex.escape, sorted(marks, key=len, reverse=True))) or "(?!)")


@functools.lru_cache(maxsize=64)
def _header(marks: Any) -> Any:
    """Return the pattern of a message's header (Muse Spark's), of which one of the marks is the end."""
    begin = r"(?:<\|start\|>)?\s{0,9}(?:assistant)?\s{0,9}(?:to=[^\s<]{1,200}<\|message\|>\s{0,9})??"
    return regex.compile(f"{begin}(?P<mark>{marks.pattern})")


def _schemas(tools: Iterable[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return the schemas of the tools' arguments by name."""
    functions = (tool.get("function") for tool in tools or () if isinstance(tool, Mapping))
    return {str(each.get("name")): each.get("parameters") for each in functions if isinstance(each, Mapping)}


class AnswerReader:
    """Reads one answer. In a stream, a call's arguments in JSON come while they are generated.

    Methods that yield wait for more text.

    Args:
        marks: the model's marks.
        state: state in which the answer begins.
        tools: tools that the model may call; without any, nothing is a call.
        is_free: the answer has no prescribed form; in one that has, only marked calls are calls.
        streams: whether calls may be given before they have ended.
        calls_once: whether only the first call is given.

    Attributes:
        state: ``normal``, ``reasoning``, or a state of mlx-lm's response formats.
        num_calls: calls that were given, whole or not.
        is_call_cut: the last call has not ended, be it given or text.
    """

    def __init__(
        self,
        marks: TextMarks,
        state: str = "normal",
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        is_free: bool = True,
        streams: bool = False,
        calls_once: bool = False,
    ) -> None:
        self.held, self.is_last = "", False  # text that was not read yet, and whether nothing follows it
        self.deltas: list[Delta] = []
        self.state = state
        self.num_calls = self.num_ended = 0
        self.is_cut = False  # a call has not ended
        self._marks, self._is_free, self._streams, self._calls_once = marks, is_free, streams, calls_once
        self._schemas = _schemas(tools)
        self._styles = _styles(marks.form or FORMS["json_tools"], marks.call_end)
        self._starts: tuple[str, ...] = ()
        if self._schemas:
            self._starts = tuple(filter(None, (marks.call_start, BARE_CALL if is_free else "")))
        self._finds_alone = bool(self._schemas) and is_free  # a call in JSON may be the whole answer
        self._taken: list[str] = []  # text read since the beginning of a call
        self._is_blank = True  # nothing but white space since the beginning, a call or reasoning
        self._steps = self.channels() if marks.has_channels and (is_free or tools) else self.states()

    def feed(self, text: str, *, is_last: bool = False) -> list[Delta]:
        """Add text of the answer. Return what is known now; with ``is_last`` all that is left."""
        self.held += text
        self.is_last = is_last
        next(self._steps, None)
        deltas, self.deltas = self.deltas, []
        return deltas

    @property
    def is_call_cut(self) -> bool:
        return self.is_cut or self.num_calls > self.num_ended

    # Text ---------------------------------------------------------------------------------------------------------

    def _say(self, length: int) -> None:
        """Add the next characters to the text or the reasoning."""
        text = self._cut(length)
        if text:
            self._is_blank = self._is_blank and not text.strip()
            self.deltas.append(Delta("reasoning" if self.state == "reasoning" else "text", text))

    def _enter(self, state: str) -> None:
        if "reasoning" in (state, self.state):  # log-probabilities of marks belong to the reasoning
            self.deltas.append(Delta("reasoning"))
        self.state, self._is_blank = state, True

    def _cut(self, length: int) -> str:
        text, self.held = self.held[:length], self.held[length:]
        return text

    def _take(self, length: int) -> str:
        text = self._cut(length)
        self._taken.append(text)
        return text

    def _give_back(self) -> None:
        self.held, self._taken = "".join(self._taken) + self.held, []

    def _need(self) -> Reading:
        """Wait for more text. Raises _NoCall if there is none."""
        if self.is_last:
            self.is_cut = True
            raise _NoCall
        yield

    def _match(self, pattern: Any) -> Reading:
        """Read what matches a pattern and return the match; None: nothing does."""
        while (found := pattern.match(self.held, partial=True)) is not None:
            if not found.partial:
                self._take(found.end())
                return found
            if self.is_last:
                break
            yield
        return None

    def states(self) -> Reading:
        """Read an answer whose states change at marks."""
        is_after_call = False
        while True:
            if is_after_call and self._may_be_between_calls():
                yield
                continue
            is_after_call = False
            if self._finds_alone and self.state == "normal" and (yield from self._call_alone()):
                return
            marks = self._marks.states.get(self.state, {})
            pattern, is_header = _any_of((*marks, *self._starts)), self.state not in ("normal", "reasoning")
            found = _header(pattern).match(self.held, partial=True) if is_header else self._find(pattern)
            is_whole = found is not None and not found.partial
            if is_header and not is_whole and (found is None or self.is_last):
                self._enter("normal")
                continue
            if is_header:
                self._cut(found.start("mark") if is_whole else 0)
            else:
                self._say(len(self.held) if found is None else found.start())
            if not is_whole:
                if self.is_last:
                    return
                yield
                continue
            mark = found["mark"] if is_header else found[0]
            is_start = mark in self._starts
            is_after_call = is_start and (yield from self._calls(mark))
            if is_after_call:
                self.state = "reasoning" if self.state == "reasoning" else "normal"
                self._is_blank = True
            elif is_start or (marks[mark] == "reasoning" and self._is_in_text()):
                self._say(len(mark))
            else:
                self._cut(len(mark))
                self._enter(marks[mark])

    def _is_in_text(self) -> bool:
        """Return whether a mark of reasoning is a part of the text: thoughts come before it."""
        return self.state == "normal" and not (self._is_blank and self._is_free)

    def _find(self, pattern: Any) -> Any:
        """Return the first match of the marks ahead, at the end of the text held also of a beginning of one."""
        found = pattern.search(self.held, partial=True)
        return None if found is not None and found.partial and self.is_last else found

    def _may_be_between_calls(self) -> bool:
        """Drop white space between calls and after the last one. Return whether text is needed to know."""
        rest = self.held.lstrip()
        found = _any_of(self._starts).match(rest, partial=True)
        if found is None or (found.partial and (len(self.held) > len(rest) + 40 or (self.is_last and rest))):
            return False
        if not found.partial or self.is_last:
            self.held = rest
        return bool(found.partial and not self.is_last)

    # Calls --------------------------------------------------------------------------------------------------------

    def _calls(self, mark: str) -> Reading:
        """Read the calls that begin with a mark. Return whether there are any; if not, all is held as before."""
        self._taken, num_read, needs_end = [], 0, True
        if not (is_bare := mark == BARE_CALL):
            self._take(len(mark))
        try:
            while (begun := (yield from self._head(is_bare=is_bare))) is not None:
                yield from self._call(*begun, is_bare=is_bare)
                self._taken, num_read, form = [], num_read + 1, begun[0].form
                needs_end = form is None or not form.key or bool(form.end)  # others end with the calls' own mark
        except _NoCall:
            if self.num_calls > self.num_ended:  # it was given: what follows is text
                return True
        self._give_back()
        if num_read and needs_end:
            yield from self._end()
        elif not num_read and self.is_last:  # the rest has been read to its end: no call in it has ended, either
            self._starts = ()
        return num_read > 0

    def _end(self) -> Reading:
        """Read the mark behind the calls, or what there is of it where the answer ends."""
        yield from self._match(self._styles.end)
        if self.is_last and self.held.strip() and self._styles.end.fullmatch(self.held, partial=True):
            self.held = ""

    def _head(self, *, is_bare: bool) -> Reading:
        """Read the beginning of a call. Return its style and the match; None: there is no call."""
        while True:
            for style in self._styles.known:
                if is_bare and style.form is not FORMS["qwen3_coder"]:
                    continue
                found = style.head.match(self.held, partial=True)
                if found is not None and not found.partial:
                    self._take(found.end())
                    return style, found
                if found is not None and not self.is_last:
                    break
            else:
                return None
            yield

    def _call(self, style: _Style, found: Any, *, is_bare: bool) -> Reading:
        """Read a call behind its beginning. Raises _NoCall if it is none."""
        groups, form = found.groupdict(), style.form
        name = groups.get("name")
        if is_bare and name not in self._schemas:
            raise _NoCall
        try:
            if form is None and name is None:
                self._give_object((yield from self._json()))
            elif form is None:
                self._give(name, "{}", is_known=True)
            elif not form.key:
                yield from self._json_call(name, groups.get("id"))
                yield from self._match(style.tail)
            else:
                types = self._types(name)
                arguments = yield from (self._quoted(form, types) if form.comma else self._tagged(style, types))
                self._give(name, arguments)
        except _NOT_READABLE:
            raise _NoCall from None

    def _give(self, name: Any, arguments: str | None, id_: str | None = None, *, is_known: bool = False) -> None:
        """Add a whole call. Raises _NoCall if it names no function, and ValueError for unusable arguments."""
        if not isinstance(name, str) or not name or (is_known and name not in self._schemas):
            raise _NoCall
        text = checked_arguments(arguments)
        if (call := self._begun(name, id_)) is not None:
            self.num_ended += 1
            self.deltas.append(Delta("call", text, call, is_first=True, is_last=True))

    def _begun(self, name: str, id_: str | None) -> Call | None:
        """Return a new call; None: only the first is wanted."""
        if self._calls_once and self.num_calls:
            return None
        self.num_calls += 1
        return Call(self.num_calls - 1, name, id_ or f"call_{uuid.uuid4().hex[:24]}")

    def _call_alone(self) -> Reading:
        """Read a call in JSON that is the whole answer. Return whether it is; if not, all is held as before."""
        while (found := _ALONE.match(self.held, partial=True)) is not None and found.partial and not self.is_last:
            if not self.held.strip():
                return False  # white space may be sent
            yield
        self._finds_alone, self._taken = False, []
        if found is None or found.partial or found["name"] not in self._schemas:
            return False
        try:
            self._take(found.end())
            text = yield from self._json()
            while not self.held.strip():
                if self.is_last:
                    self._give_object(text, is_known=True)
                    return True
                self._take(len(self.held))
                yield
        except (_NoCall, *_NOT_READABLE):
            pass
        self._give_back()
        return False

    def _give_object(self, text: str, *, is_known: bool = False) -> None:
        """Add a call in JSON whose members are in any order."""
        given = members(text)
        if "function" in given and given["function"].startswith("{"):
            given = members(given["function"])
        arguments = given.get("arguments", given.get("parameters"))
        self._give(json.loads(given.get("name", "null")), arguments, is_known=is_known)

    def _json_call(self, name: str, id_: str | None) -> Reading:
        """Read the arguments of a call in JSON; in a stream they are given as they come."""
        if not self._streams or name not in self._schemas or (call := self._begun(name, id_)) is None:
            self._give(name, (yield from self._json()), id_)
            return
        self.deltas.append(Delta("call", "", call, is_first=True))
        checked_arguments((yield from self._json(call)))
        self.num_ended += 1
        self.deltas.append(Delta("call", "", call, is_last=True))

    def _json(self, call: Call | None = None) -> Reading:
        """Read a JSON object or array and return its text. Control characters in strings, which JSON does not allow,
        are escaped.

        Args:
            call: the call whose arguments it is, if they are to be given as they come.
        """
        parts: list[str] = []
        closing: list[str] = []  # brackets that close the open ones
        is_string = is_over = False
        while True:
            text, place, begin, found = self.held, 0, 0, []
            while (place := (_INSIDE if is_string else _OUTSIDE).match(text, place).end()) < len(text):
                character = text[place]
                if character == '"':
                    is_string = not is_string
                elif is_string and character == "\\":
                    if place + 1 == len(text):
                        break
                    place += 1
                elif is_string:
                    found += [text[begin:place], json.dumps(character)[1:-1]]
                    begin = place + 1
                elif character in "{[":
                    closing.append("}" if character == "{" else "]")
                elif closing and character == closing[-1]:
                    closing.pop()
                else:
                    raise _NoCall
                place += 1
                if is_over := not closing:
                    break
            parts.append("".join([*found, text[begin:place]]))
            self._take(place)
            if call is not None and parts[-1]:
                self.deltas.append(Delta("call", parts[-1], call))
            if is_over:
                return "".join(parts)
            yield from self._need()

    def _types(self, name: Any) -> Types:
        """Return a function from an argument's name to the types that the tool's schema allows."""
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if not isinstance(schema, dict) or not isinstance(properties, dict):
            return lambda key: None
        return lambda key: types_of(properties.get(key), schema)

    def _tagged(self, style: _Style, types: Types) -> Reading:
        """Read arguments between tags, up to the end of the call."""
        form, found = style.form, {}
        assert form is not None
        if form.block[0] and (yield from self._match(regex.compile(SPACE + regex.escape(form.block[0])))):
            text = yield from self._json()
            if (yield from self._match(regex.compile(SPACE + regex.escape(form.block[1]) + style.tail.pattern))):
                return text
            raise _NoCall
        while not (yield from self._match(style.tail)):
            key = yield from self._match(style.key)
            if key is None:
                raise _NoCall
            groups = key.groupdict()
            kind = None if "type" not in groups else groups["type"] == "string"
            name = key["key"] if kind is None else html.unescape(key["key"])
            allowed = types(name)
            may_be_json = not kind and "string" not in (allowed or {"string"})
            written = (yield from self._json_value(style)) if may_be_json else None
            if written is None:
                written = yield from self._value(style, form)
            found[name] = argument(written, allowed, is_string=kind)
        return object_of(found)

    def _json_value(self, style: _Style) -> Reading:
        """Read a value that is an object or array in JSON, with the mark that ends it. None: it is none, and is held as
        before."""
        before, self._taken = self._taken, []
        try:
            if (yield from self._match(_BRACKET)) is not None:
                text = yield from self._json()
                if (yield from self._match(style.follows)) is not None:
                    self._taken = before + self._taken
                    return text
        except _NoCall:
            pass
        self._give_back()
        self._taken = before
        return None

    def _value(self, style: _Style, form: CallForm) -> Reading:
        """Read a value up to the mark that ends it: the first one with another argument or the call's end behind it."""
        mark, parts = form.value_end.strip("~\n"), []
        if form.cdata and (yield from self._match(regex.compile(rf"{SPACE}<!\[CDATA\["))):
            mark = "]]>"
        follows = style.follows if mark != "]]>" else regex.compile(rf"\]\]>{SPACE}{style.follows.pattern}")
        while True:
            begin = self.held.find(mark)
            if begin < 0:
                parts.append(self._take(max(0, len(self.held) - len(mark) + 1)))
                yield from self._need()
                continue
            parts.append(self._take(begin))
            if (yield from self._match(follows)) is not None:
                break
            parts.append(self._take(1))
            if self.is_last and mark not in self.held:
                raise _NoCall
        written = "".join(parts)
        if form.key.endswith("\n"):
            written = written.removeprefix("\n")
        return written.removesuffix("\n") if form.value_end.startswith("\n") else written

    def _quoted(self, form: CallForm, types: Types) -> Reading:
        """Read arguments whose strings have quotes, up to the bracket that closes the open one."""
        is_python = form.quote == '"'
        segments = yield from self._segments(form.quote, "'" if is_python else "" if '"' in form.quote else '"')
        parts = []
        for quote, text in segments:
            if quote == form.quote and not is_python:
                parts.append(json.dumps(text, ensure_ascii=False))
            elif quote:
                parts.append(f"{quote}{text}{quote}".replace("\n", r"\n").replace("\r", r"\r"))
            else:
                parts.append(
                    _LITERAL.sub(lambda found: _LITERALS[found[0]], text) if is_python else _KEY.sub(r'\1"\2":', text)
                )
        source = "".join(parts)
        found = python_arguments(source) if is_python else members(f"{{{source}}}")
        for key, value in found.items():
            is_string = value.startswith('"')
            found[key] = argument(json.loads(value) if is_string else value, types(key), is_string=is_string)
        return object_of(found)

    def _segments(self, *quotes: str) -> Reading:
        """Read up to the bracket that closes the open one, and behind it. Return the text in parts, each with its quote
        or an empty one. Between quotes of one character, a backslash escapes the next."""
        quotes = tuple(filter(None, quotes))
        stops = {
            quote: _any_of((quote,)) if len(quote) > 1 else regex.compile(rf"\\.|{quote}", regex.DOTALL)
            for quote in quotes
        }
        stops[""] = _any_of((*quotes, *"()[]{}"))
        found: list[tuple[str, str]] = []
        part: list[str] = []
        quote, depth = "", 1
        while True:
            stop = stops[quote].search(self.held, partial=True)
            if stop is None or stop.partial:
                part.append(self._take(len(self.held) if stop is None else stop.start()))
                yield from self._need()
                continue
            part.append(self._take(stop.start()))
            mark = self._take(len(stop[0]))
            if quote and mark != quote:
                part.append(mark)
                continue
            depth += 0 if quote or mark in quotes else 1 if mark in "([{" else -1
            if quote or mark in quotes or not depth:
                found.append((quote, "".join(part)))
                part, quote = [], "" if quote else mark
                if not depth:
                    return found
            else:
                part.append(mark)

    # gpt-oss's channels -------------------------------------------------------------------------------------------

    def channels(self) -> Reading:
        """Read an answer in the Harmony format: messages, each a header and a body. The channel ``analysis`` is
        reasoning, a body with a recipient is a call, and what has no header is text."""
        if self.state == "normal":
            yield from self._channel_header()
        while True:
            found = _MARKS.search(self.held, partial=True)
            if found is None or found.partial:
                self._say(len(self.held) if found is None or self.is_last else found.start())
                if self.is_last:
                    return
                yield
                continue
            self._say(found.start())
            if (yield from self._match(_BOUNDARY)) is not None:
                yield from self._channel_header()
            elif self.is_last and (_END.fullmatch(self.held.rstrip()) or _HEADER.fullmatch(self.held, partial=True)):
                return
            else:
                self._say(len(found[0]))  # a mark in the text

    def _channel_header(self) -> Reading:
        """Read the header of a message, and its calls and those behind it."""
        while True:
            self._taken = []
            found = yield from self._match(_HEADER)
            if found is None:
                if self.is_last and self.held.startswith("<|") and _HEADER.fullmatch(self.held, partial=True):
                    self.held = ""  # cut off
                self._enter("normal")
                return
            recipient = _RECIPIENT.search(found[0])
            if recipient is None:
                self._enter("reasoning" if "<|channel|>analysis" in found[0] else "normal")
                return
            self._enter("normal")
            if not self._schemas or not (yield from self._channel_call(recipient[1])):
                self._give_back()
                self._say(len(found[0]))
                return

    def _channel_call(self, name: str) -> Reading:
        """Read the body of a call. Return whether it is one."""
        try:
            if (yield from self._match(_OBJECT)) is not None:
                yield from self._json_call(name, None)
                yield from self._match(_END)
            elif (yield from self._match(_END)) is not None:
                self._give(name, "{}")
            else:
                return False
        except (_NoCall, *_NOT_READABLE):
            return self.num_calls > self.num_ended  # it was given: what follows is text
        return True
