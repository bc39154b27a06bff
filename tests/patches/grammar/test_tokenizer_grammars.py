"""TokenizerGrammars: tool calls in a model's own form, and answers behind its reasoning."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from mlx_lm.generate import make_text_state_machine
from mlx_lm.tool_parsers import glm47, json_tools, qwen3_coder

from mlx_paged.engine.grammar import check
from mlx_paged.engine.grammar.grammar import CompiledGrammar, Grammar, Part
from mlx_paged.patches.grammar.tokenizer_grammars import TokenizerGrammars, behind_reasoning, reasons_first, tool_format
from mlx_paged.server.constraint import constraint_of
from mlx_paged.server.errors import RequestRefused
from tests.support.models.tokenizers import CALL, CALL_END, EOS, EOT, THINK, THINK_END, byte_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"name": {"enum": ["Rome", "Oslo"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": 'the "clock"'}}


def compiled(body: dict[str, Any], **options: Any) -> CompiledGrammar | None:
    constraint = constraint_of(body, chat=True)
    assert constraint is not None
    return TokenizerGrammars(byte_tokenizer(calls_tools=True, **options)).compile(constraint)


def allowed(grammar: Grammar) -> list[int]:
    words = np.zeros(9, np.uint32)
    grammar.mask(words)
    return [token for token in range(262) if words[token // 32] >> token % 32 & 1]


def random_answer(grammar: Grammar, seed: int, most: int = 2000) -> list[int]:
    """What a model without a preference says, but that it does not indent, and ends soon."""
    rng, answer = random.Random(seed), []
    while len(answer) < most:
        tokens = [token for token in allowed(grammar) if token not in set(b" \n\t\r")] or allowed(grammar)
        ends = [token for token in tokens if token in (EOS, EOT)]
        if ends and (len(tokens) == len(ends) or rng.random() < 0.5):
            return answer
        tokens = [token for token in tokens if token not in ends] or tokens
        quotes = [token for token in tokens if token in set(b'"}]')]
        answer.append(rng.choice(quotes) if quotes and rng.random() < 0.5 else rng.choice(tokens))
        grammar.accept(answer[-1])
    raise AssertionError("it does not end")


def parsed(answer: list[int]) -> list[dict[str, Any]]:
    """The calls that mlx-lm's server finds in an answer."""
    tokenizer = byte_tokenizer(calls_tools=True)
    machine = make_text_state_machine(tokenizer)
    _, segments = machine.split(machine.make_state("normal"), tokenizer.decode(answer))
    assert not "".join(text for name, text in segments if name == "normal").strip()
    return [json_tools.parse_tool_call(text) for name, text in segments if name == "tool" and text]


@pytest.mark.parametrize("seed", range(6))
def test_a_call_that_is_required_is_made(seed: int) -> None:
    grammar = compiled({"tools": [WEATHER, CLOCK], "tool_choice": "required"})
    assert grammar is not None
    state = grammar.start()
    assert allowed(state) == [CALL]
    calls = parsed(random_answer(state, seed))
    assert calls
    for call in calls:
        assert set(call) == {"name", "arguments"}
        schemas = {"weather": CITY, 'the "clock"': {"type": "object"}}
        jsonschema.validate(call["arguments"], schemas[call["name"]])


@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_is_named_is_made_once(seed: int) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    grammar = compiled({"tools": [CLOCK, WEATHER], "tool_choice": choice})
    assert grammar is not None
    (call,) = parsed(random_answer(grammar.start(), seed))
    assert call["name"] == "weather"
    jsonschema.validate(call["arguments"], CITY)


def test_one_call_at_a_time() -> None:
    one = compiled({"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False})
    several = compiled({"tools": [CLOCK], "tool_choice": "required"})
    for grammar, goes_on in ((one, False), (several, True)):
        assert grammar is not None
        state = grammar.start()
        call = '\n{"name": "the \\"clock\\"", "arguments": {}}\n'
        for token in [CALL, *call.encode(), CALL_END]:
            state.accept(token)
        assert (CALL in allowed(state)) is goes_on and EOS in allowed(state)


def test_strict_arguments_are_right_whenever_a_call_is_made() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    grammar = compiled({"tools": [strict, CLOCK]})
    assert grammar is not None and grammar.trigger == CALL
    state = grammar.start()
    for token in b"let me see ":
        assert len(allowed(state)) == 262
        state.accept(token)
    state.accept(CALL)
    for token in b'{"name": "weather", "arguments": {"city":"':
        state.accept(token)
    assert allowed(state) == [ord("O"), ord("R")]
    for token in [*b'Rome","days":3}}', CALL_END]:
        state.accept(token)
    assert state.part is Part.BETWEEN and len(allowed(state)) == 262


EDIT = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer", "minimum": 1, "maximum": 99},
        "mode": {"type": "string", "enum": ["insert", "replace"]},
        "marks": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["path", "line", "mode"],
    "additionalProperties": False,
}


def tags(**arguments: str) -> str:
    given = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
    return f"\n<function=edit>\n{given}</function>\n"


def test_calls_in_tags_have_the_arguments_of_their_schema() -> None:
    edit = {"type": "function", "function": {"name": "edit", "strict": True, "parameters": EDIT}}
    tools = [edit, {"type": "function", "function": {"name": "clock"}}]
    body = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    grammar = compiled(body, parser=qwen3_coder.parse_tool_call)
    assert grammar is not None

    def fault(text: str) -> str | None:
        """Return the text up to the first byte that is not allowed."""
        state = grammar.start()
        for place, token in enumerate([CALL, *text.encode(), CALL_END]):
            if token not in allowed(state):
                return text[: max(0, place - 1)]
            state.accept(token)
        assert state.is_finished
        return None

    path = "a <b> </parameter \n.py"
    for given in ({"line": "12", "mode": "insert"}, {"line": "9", "mode": "replace", "marks": "[true, false]"}):
        text = tags(path=path, **given)
        assert fault(text) is None
        call = qwen3_coder.parse_tool_call(text, tools)
        jsonschema.validate(call["arguments"], EDIT)
        assert call["arguments"]["path"] == path
    assert fault("\n<function=clock>\n<parameter=x>\n1\n</parameter>\n</function>\n") is None
    for wrong in ({"line": "12x", "mode": "insert"}, {"line": "1", "mode": "undo"}, {"mode": "insert"}, {"line": "1"}):
        assert fault(tags(path=path, **wrong)) is not None
    assert fault("\n<function=fly>") == "\n<function="


def test_strict_holds_for_tags_and_is_logged_for_other_forms(caplog: pytest.LogCaptureFixture) -> None:
    strict = {"tools": [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]}
    tagged = compiled(strict, parser=qwen3_coder.parse_tool_call)
    assert tagged is not None and tagged.trigger == CALL and not caplog.records
    assert compiled(strict, parser=glm47.parse_tool_call) is None
    assert "cannot be constrained" in caplog.text
    bad = {"name": "f", "strict": True, "parameters": {"properties": {"x": {"not": {}}}}}
    assert compiled({"tools": [{"type": "function", "function": bad}]}) is None
    assert "tools[0].function.parameters: #/properties/x" in caplog.text


def test_json_or_a_call() -> None:
    body = {"tools": [WEATHER], "response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}}
    grammar = compiled(body)
    assert grammar is not None
    assert allowed(grammar.start()) == [ord("{"), CALL]
    for text in ('{"city":"Rome","days":1}',):
        state = grammar.start()
        for token in text.encode():
            state.accept(token)
        assert state.is_finished and set(allowed(state)) == {EOS, EOT}


def test_what_cannot_be_kept_is_refused() -> None:
    required = {"tools": [WEATHER], "tool_choice": "required"}
    with pytest.raises(RequestRefused, match="in a form that cannot be constrained") as caught:
        compiled(required, parser=glm47.parse_tool_call)
    assert caught.value.status == 400 and caught.value.param == "tool_choice"
    constraint = constraint_of(required, chat=True)
    assert constraint is not None
    with pytest.raises(RequestRefused, match="this model cannot call tools"):
        TokenizerGrammars(byte_tokenizer()).compile(constraint)
    bad = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}
    with pytest.raises(RequestRefused, match=r"tools\[1\].function.parameters: #/properties/x: Unimpl") as caught:
        compiled({"tools": [WEATHER, bad], "tool_choice": "required"})
    assert caught.value.param == "tools"
    with pytest.raises(RequestRefused, match="only JSON can be asked for beside tools"):
        compiled({"tools": [WEATHER], "structured_outputs": {"regex": "a"}})


ENDLESS = {"type": "object", "properties": {"x": {"type": "integer", "multipleOf": 16777216}}}


def test_a_tool_whose_schema_takes_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TRIAL_SECONDS", 0.5)
    slow = {"type": "function", "function": {"name": "f", "parameters": ENDLESS}}
    with pytest.raises(RequestRefused, match=r"tools\[1\]\.function\.parameters: it takes more than") as caught:
        compiled({"tools": [WEATHER, slow], "tool_choice": "required"})
    assert caught.value.param == "tools" and caught.value.status == 400


def test_a_client_that_has_gone_is_told_apart() -> None:
    constraint = constraint_of({"structured_outputs": {"json": ENDLESS}}, chat=True)
    assert constraint is not None
    with pytest.raises(ConnectionAbortedError):
        TokenizerGrammars(byte_tokenizer()).compile(constraint, is_cancelled=lambda: True)


def test_a_model_without_tools_makes_no_calls_to_be_strict_about() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    constraint = constraint_of({"tools": [strict]}, chat=True)
    assert constraint is not None
    assert TokenizerGrammars(byte_tokenizer()).compile(constraint) is None


def test_the_format_of_calls() -> None:
    assert tool_format(byte_tokenizer()) is None
    form = tool_format(byte_tokenizer(calls_tools=True))
    assert form == (f"<[{CALL}]>", f"<[{CALL_END}]>", CALL, False)


def test_reasoning_that_the_prompt_begins_is_free() -> None:
    tokenizer = byte_tokenizer()
    assert reasons_first(tokenizer, [5, THINK, 6]) and not reasons_first(tokenizer, [5, THINK, 6, THINK_END, 7])
    assert not reasons_first(tokenizer, [5])
    constraint = constraint_of({"structured_outputs": {"choice": ["no"]}}, chat=True)
    assert constraint is not None
    grammar = TokenizerGrammars(tokenizer).compile(constraint)
    assert grammar is not None
    state = behind_reasoning(grammar, tokenizer).start()
    for token in [*b"hm", THINK_END]:
        assert len(allowed(state)) == 260
        state.accept(token)
    assert allowed(state) == [ord("n")]
    assert json.loads('"no"') == "no"
