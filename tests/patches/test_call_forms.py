"""Grammars of tool calls in the form of each of mlx-lm's parsers: random answers are parsed, and match the schema."""

import copy
import importlib
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken

from mlx_paged.errors import GrammarError
from mlx_paged.grammar.grammar import CompiledGrammar, Grammar, Part
from mlx_paged.server.answer_reader import AnswerReader
from mlx_paged.server.call_formats import FORMS, HARMONY_TOKENS, argument, text_marks, types_of
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.grammars import TokenizerGrammars
from tests.support.call_texts import PARSERS, WRITERS, parser_options
from tests.support.cases import quick
from tests.support.constraints import constraint_of
from tests.support.models.tokenizers import EOS, EOT, byte_tokenizer

HARMONY_MARKS = [*sorted(HARMONY_TOKENS), "<|end|>", "<|constrain|>"]
FLAT = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer", "minimum": 1, "maximum": 99},
        "mode": {"type": "string", "enum": ["insert", "replace"]},
        "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "force": {"const": "yes, always"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["line", "mode", "share"],
    "additionalProperties": False,
}
INNER = {"type": "object", "properties": {"to": {"type": "string"}, "at": {"type": "integer"}}, "required": ["to"]}
DEEP = {
    **FLAT,
    "properties": {
        **FLAT["properties"],  # type: ignore[dict-item]
        "marks": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "move": {"$ref": "#/$defs/move"},
    },
    "$defs": {"move": {**INNER, "additionalProperties": False}},
    "required": [*FLAT["required"], "marks", "move"],
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "strict": True, "parameters": {"type": "object", "additionalProperties": False}},
}


def tool(schema: Any, name: str = "edit_file") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}


def marks_and_ends_of(name: str) -> tuple[list[str], list[str]]:
    """Return the texts of a form that may be tokens, and what ends the parts of a call."""
    if name == "harmony":
        return HARMONY_MARKS, HARMONY_MARKS
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    form = FORMS[parser.parse_tool_call.__module__.rpartition(".")[2]]
    texts = [parser.tool_call_start, parser.tool_call_end, form.begin, form.end, form.key, form.value_end, form.quote]
    marks = [mark for text in texts for mark in re.findall(r"<[^<>\s]+>|\[ARGS\]|\[TOOL_CALLS\]", text)]
    ends = [form.value_end.removesuffix("~"), form.quote, form.end, parser.tool_call_end, parser.tool_call_start]
    return list(dict.fromkeys(marks)), ends


def tokenizer_of(name: str, *, is_special: bool) -> TokenizerWrapper:
    """Return a tokenizer of bytes; the marks of the form are special tokens if ``is_special``."""
    plain = byte_tokenizer()
    if is_special:
        marks = [mark for mark in marks_and_ends_of(name)[0] if not re.search("NAME|KEY|TYPE", mark)]
        plain._tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return TokenizerWrapper(plain._tokenizer, eos_token_ids=[EOS, EOT], **parser_options(name))


def compiled(tokenizer: TokenizerWrapper, tools: list[Any], **body: Any) -> CompiledGrammar:
    constraint = constraint_of({"tools": tools, **body})
    assert constraint is not None
    grammar = TokenizerGrammars(tokenizer).compile(constraint)
    assert grammar is not None
    return grammar


def walk(tokenizer: TokenizerWrapper, state: Grammar, words: list[list[int]], dice: random.Random) -> None:
    """Extend an answer with random allowed bytes, and often with one of the words, until it or its call ends."""

    def allowed(state: Grammar) -> list[int]:
        out = np.zeros(-(-len(tokenizer) // 32), np.uint32)
        state.mask(out)
        bits = np.unpackbits(out.view(np.uint8), bitorder="little")[: len(tokenizer)]
        return np.flatnonzero(bits).tolist()  # type: ignore[no-any-return]

    def taken(state: Grammar, word: list[int], choice: list[int]) -> bool:
        if word[0] not in choice:
            return False
        trial = copy.copy(state)
        trial.tokens, trial._matcher = list(state.tokens), state._matcher.deep_copy()
        for token in word:
            if trial.part is not Part.WITHIN or token not in allowed(trial):
                return False
            trial.accept(token)
        return True

    while state.part is Part.WITHIN and not state._matcher.is_stopped():
        choice = allowed(state)
        if EOS in choice and dice.random() < 0.9:
            break
        assert len(state.tokens) < 6000, tokenizer.decode(state.tokens)
        letters = [token for token in choice if 33 <= token < 127 and not 48 <= token < 58]  # so that numbers end
        letters = letters or [token for token in choice if token not in (EOS, EOT)]
        word: list[int] | None = None
        is_json = 34 in choice and 10 not in choice  # few marks, so that strings end
        if dice.random() < (0.1 if is_json else 0.5):
            word = next((word for word in dice.sample(words, len(words)) if taken(state, word, choice)), None)
        for token in word or [dice.choice(letters)]:
            state.accept(token)


CASES = [(name, is_special) for name in [*PARSERS, "harmony"] for is_special in (True, False)]
CASES.remove(("harmony", False))  # recognised by its tokens


@pytest.mark.parametrize(
    ("name", "is_special", "is_required"),
    quick(
        [(*case, required) for case in CASES for required in (True, False)],
        *((*case, case[1]) for i, case in enumerate(CASES) if i % 4 in (0, 3)),  # each form once
    ),
)
def test_random_calls_are_parsed_and_match_their_schema(name: str, is_special: bool, is_required: bool) -> None:
    tokenizer = tokenizer_of(name, is_special=is_special)
    tools = [tool(DEEP), CLOCK]
    grammar = compiled(tokenizer, tools, **({"tool_choice": "required"} if is_required else {}))
    encode = lambda text: tokenizer._tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    words = [encode(text) for text in (*marks_and_ends_of(name)[1], "a", " é", "7a", "null", "true", "]", "}") if text]
    num_calls = 0
    for seed in range(3):
        dice = random.Random(f"{name} {is_special} {is_required} {seed}")
        state = grammar.start()
        if not is_required and name != "harmony":
            state.follow([*b"so: ", *encode(tokenizer.tool_call_start)])
        walk(tokenizer, state, words, dice)
        tokens = [token for token in state.tokens if token not in (EOS, EOT)]
        text = tokenizer.decode(tokens)
        reader = AnswerReader(text_marks(tokenizer), tools=tools)
        for call in (delta for delta in reader.feed(text, is_last=True) if delta.call is not None):
            num_calls += 1
            name_of_tool = call.call.name  # type: ignore[union-attr]
            jsonschema.validate(json.loads(call.text), DEEP if name_of_tool == "edit_file" else {"type": "object"})
    assert num_calls >= 3 or (name == "harmony" and not is_required)


ASIDE = "a <b> </parameter \n.py"  # looks like the end of a string in several forms


# Not "kimi_k3": its grammar asks for the type that the schema gives, where this text says "number" of an integer.
@pytest.mark.parametrize("name", sorted(WRITERS.keys() - {"mistral_list", "kimi_k3"}))
def test_calls_as_models_write_them_are_allowed_and_wrong_ones_are_not(name: str) -> None:
    tokenizer = tokenizer_of(name, is_special=True)
    grammar = compiled(tokenizer, [tool(FLAT), CLOCK], tool_choice="required")

    def is_allowed(name_of_tool: str, arguments: dict[str, Any]) -> bool:
        text = WRITERS[name]([(name_of_tool, arguments)])
        state = grammar.start()
        try:
            for token in tokenizer._tokenizer.encode(text.rstrip(), add_special_tokens=False):
                state.accept(token)
        except GrammarError:
            return False
        return True

    right = {"path": ASIDE, "line": 12, "mode": "insert", "share": 1.5}
    assert is_allowed("edit_file", right) and is_allowed("clock", {})
    for wrong in ({"line": 100}, {"mode": "undo"}, {"other": 1}):
        assert not is_allowed("edit_file", {**right, **wrong})
    assert not is_allowed("edit_file", {"path": ASIDE}) and not is_allowed("fly", {})


UNSAID: dict[str, tuple[str, dict[str, Any]]] = {  # schemas that a form cannot express
    "a name": ("pythonic", tool(FLAT, "edit-file")),
    "a keyword": ("pythonic", tool({"type": "object", "properties": {"from": {"type": "string"}}})),
    "a list of itself": (
        "gemma4",
        tool(
            {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/x"}},
                "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}},
            }
        ),
    ),
    "a key": ("gemma4", tool({"type": "object", "properties": {"x": {"properties": {"a b": {}}, "type": "object"}}})),
}


@pytest.mark.parametrize(("name", "given"), UNSAID.values(), ids=UNSAID)
def test_inexpressible_schema_is_logged_or_refused_if_a_call_is_required(
    name: str, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    grammars = TokenizerGrammars(tokenizer_of(name, is_special=True))
    constraint = constraint_of({"tools": [given]})
    assert constraint is not None and grammars.compile(constraint) is None
    assert "strict is not enforced: " in caplog.text
    required = constraint_of({"tools": [given], "tool_choice": "required"})
    assert required is not None
    with pytest.raises(RequestRefused, match="this model's call format") as caught:
        grammars.compile(required)
    assert caught.value.status == 400 and caught.value.param == "tool_choice"


def test_every_parser_of_mlx_lm_has_a_form() -> None:
    modules = [importlib.import_module(f"mlx_lm.tool_parsers.{name}") for name in PARSERS]
    assert {module.parse_tool_call.__module__.rpartition(".")[2] for module in modules} == set(FORMS)


ARGUMENTS: dict[str, tuple[Any, Any]] = {  # as the format says, and with the types of the schema
    "note": (12, "12"),
    "line": ("7", 7),
    "mode": ("other", "other"),
    "marks": ("none", "none"),  # fits none of its types
    "share": ("null", None),
    "path": (None, "null"),
    "force": (None, "null"),
    "move": ('{"to": "x"}', {"to": "x"}),
    "unknown": (1.5, 1.5),
}


@pytest.mark.parametrize("key", ARGUMENTS)
def test_arguments_are_read_by_the_types_of_their_schema(key: str) -> None:
    given, right = ARGUMENTS[key]
    types = types_of(DEEP["properties"].get(key), DEEP)
    is_string = isinstance(given, str)
    assert json.loads(argument(given if is_string else json.dumps(given), types, is_string=is_string)) == right
    if types is not None and is_string:
        assert json.loads(argument(given, types)) == right


@pytest.mark.parametrize(
    ("written", "types", "right"),
    [
        ("9007199254740993", {"integer"}, "9007199254740993"),
        (" 1.10\n", {"number"}, "1.10"),
        ("3.0", {"integer"}, "3.0"),
        ("1e400", {"number"}, '"1e400"'),
        ("True", {"boolean"}, "true"),
        ("{'a': None}", {"object"}, '{"a": null}'),
        ('[12345678901234567890, "x"]', None, '[12345678901234567890, "x"]'),
        ("null", {"string"}, '"null"'),
        ("null", {"string", "null"}, "null"),
        (" two words ", None, '" two words "'),
    ],
)
def test_values_are_what_the_model_wrote(written: str, types: set[str] | None, right: str) -> None:
    assert argument(written, types) == right


def test_circular_schemas_have_no_types() -> None:
    for circular in ({"$ref": "#/properties/line"}, {"anyOf": [{"$ref": "#/properties/line"}]}):
        assert types_of(circular, {"properties": {"line": circular}}) is None
