"""Grammars of tool calls in the form of each of mlx-lm's parsers: random answers are parsed, and match the schema."""

import copy
import importlib
import pkgutil
import random
import re
from typing import Any

import jsonschema
import mlx_lm.tool_parsers
import numpy as np
import pytest
from mlx_lm.generate import make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken

from mlx_paged.engine.grammar.grammar import CompiledGrammar, Grammar, Part
from mlx_paged.patches.grammar import FORMS, TokenizerGrammars
from mlx_paged.patches.harmony import HARMONY_TOKENS, HarmonyParts, harmony_call
from mlx_paged.patches.server_texts import LoadedParts
from mlx_paged.server.calls import loose_calls, names_of, openai_call, with_types
from mlx_paged.server.constraint import constraint_of
from mlx_paged.server.errors import RequestRefused
from tests.support.cases import quick
from tests.support.models.tokenizers import EOS, EOT, byte_tokenizer

PARSERS = sorted(module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__))
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


def schema_of(name: str) -> dict[str, Any]:
    return FLAT if name == "function_gemma" else DEEP


def marks_of(name: str) -> list[str]:
    """Return the texts of a form that may be tokens."""
    if name == "harmony":
        return HARMONY_MARKS
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    form = FORMS[parser.parse_tool_call.__module__.rpartition(".")[2]]
    texts = [parser.tool_call_start, parser.tool_call_end, form.begin, form.end, form.key, form.value_end, form.quote]
    return list(
        dict.fromkeys(mark for text in texts for mark in re.findall(r"<[^<>\s]+>|\[ARGS\]|\[TOOL_CALLS\]", text))
    )


def ends_of(name: str) -> list[str]:
    """Return what ends the parts of a call."""
    if name == "harmony":
        return HARMONY_MARKS
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    form = FORMS[parser.parse_tool_call.__module__.rpartition(".")[2]]
    return [form.value_end.removesuffix("~"), form.quote, form.end, parser.tool_call_end, parser.tool_call_start]


def tokenizer_of(name: str, *, is_special: bool) -> TokenizerWrapper:
    """Return a tokenizer of bytes; the marks of the form are special tokens if ``is_special``."""
    plain = byte_tokenizer()
    if is_special:
        marks = [mark for mark in marks_of(name) if not re.search("NAME|KEY|TYPE", mark)]
        plain._tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    options = {}
    if name != "harmony":
        parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        options = {key: getattr(parser, key) for key in ("tool_call_start", "tool_call_end")}
        options["tool_parser"] = parser.parse_tool_call
    return TokenizerWrapper(plain._tokenizer, eos_token_ids=[EOS, EOT], **options)


def compiled(tokenizer: TokenizerWrapper, tools: list[Any], **body: Any) -> CompiledGrammar:
    constraint = constraint_of({"tools": tools, **body}, chat=True)
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
        if dice.random() < 0.5:
            # A JSON string may hold a mark, at which parsers end the call; avoid that.
            is_json = 34 in choice and 10 not in choice
            some = [word for word in words if not (is_json and len(word) > 4)]
            word = next((word for word in dice.sample(some, len(some)) if taken(state, word, choice)), None)
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
    schema = schema_of(name)
    tools = [tool(schema), CLOCK]
    grammar = compiled(tokenizer, tools, **({"tool_choice": "required"} if is_required else {}))
    encode = lambda text: tokenizer._tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    words = [encode(text) for text in (*ends_of(name), "a", " é", "7a", "null", "true", "]", "}") if text]
    num_calls = 0
    for seed in range(3):
        dice = random.Random(f"{name} {is_special} {is_required} {seed}")
        state = grammar.start()
        if not is_required and name != "harmony":
            state.follow([*b"so: ", *encode(tokenizer.tool_call_start)])
        walk(tokenizer, state, words, dice)
        tokens = [token for token in state.tokens if token not in (EOS, EOT)]
        text = tokenizer.decode(tokens)
        for call in calls_of(tokenizer, name, text, tools):
            num_calls += 1
            jsonschema.validate(call["arguments"], schema if call["name"] == "edit_file" else {"type": "object"})
            openai_call(call)
    assert num_calls >= 3 or (name == "harmony" and not is_required)


ARRAY = {"type": "object", "properties": {"x": {"type": "array"}}, "required": ["x"]}
UNSAID: dict[str, tuple[str, dict[str, Any]]] = {  # schemas that a form cannot express
    "an array": ("function_gemma", tool(ARRAY)),
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
    constraint = constraint_of({"tools": [given]}, chat=True)
    assert constraint is not None and grammars.compile(constraint) is None
    assert "strict is not enforced: " in caplog.text
    required = constraint_of({"tools": [given], "tool_choice": "required"}, chat=True)
    assert required is not None
    with pytest.raises(RequestRefused, match="this model's call format") as caught:
        grammars.compile(required)
    assert caught.value.status == 400 and caught.value.param == "tool_choice"


def test_every_parser_of_mlx_lm_has_a_form() -> None:
    modules = [importlib.import_module(f"mlx_lm.tool_parsers.{name}") for name in PARSERS]
    assert {module.parse_tool_call.__module__.rpartition(".")[2] for module in modules} == set(FORMS)


ARGUMENTS: dict[str, tuple[Any, Any]] = {  # as a parser guessed them, and with the types of the schema
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


def test_with_types_converts_arguments_to_the_types_of_their_schema() -> None:
    call = {"name": "edit_file", "arguments": {key: given for key, (given, _) in ARGUMENTS.items()}}
    assert with_types(call, [tool(DEEP)])["arguments"] == {key: right for key, (_, right) in ARGUMENTS.items()}
    for tools in (None, [], [CLOCK], [{"type": "function"}]):
        assert with_types(call, tools) == call
    for circular in ({"$ref": "#/properties/line"}, {"anyOf": [{"$ref": "#/properties/line"}]}):
        assert with_types(call, [tool({"properties": {"line": circular}})]) == call


def calls_of(tokenizer: Any, name: str, text: str, tools: list[Any]) -> list[dict[str, Any]]:
    """Return the calls of an answer, as the server reads it."""
    parts: Any = (
        HarmonyParts("normal") if name == "harmony" else LoadedParts(make_text_state_machine(tokenizer), "normal")
    )
    found: list[str] = []
    before = ""
    for state, part in [*parts.feed(text), parts.flush()]:
        if state == "tool":
            found = found if before == "tool" and found else [*found, ""]
            found[-1] += part
        before = state
    read = (lambda call, _: harmony_call(call)) if name == "harmony" else tokenizer.tool_parser

    def read_all(text: str) -> list[dict[str, Any]]:
        parsed = read(text, tools)
        return parsed if isinstance(parsed, list) else [parsed]

    calls = []
    for each in filter(str.strip, found):
        try:
            calls += read_all(each)
        except Exception:  # parsers may raise any exception
            calls += loose_calls(each, names_of(tools), read_all)
    return [with_types(call, tools) for call in calls]
