"""Tool calls as models write them, in the format of each of mlx-lm's parsers and of gpt-oss."""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import mlx_lm.tool_parsers
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.server.call_formats import TextMarks, text_marks
from tests.support.models.tokenizers import EOS, byte_tokenizer

PARSERS = sorted(module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__))
Calls = Sequence[tuple[str, dict[str, Any]]]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    """Return a value between tags: a string as it is, others as JSON."""
    return value if isinstance(value, str) else as_json(value)


def in_gemma(value: Any, quote: str = '<|"|>') -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_gemma(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(in_gemma(each, quote) for each in value) + "]"
    return as_json(value)


def in_cdata(value: Any) -> str:
    return f"<![CDATA[{value}]]>" if isinstance(value, str) and any(c in value for c in "<&\n") else plain(value)


def tagged(calls: Calls, begin: str, key: str, value_end: str, end: str, write: Any = plain) -> str:
    """Return calls between tags: N stands for a name, K for a key."""
    parts = []
    for name, arguments in calls:
        said = "".join(key.replace("$K", each) + write(value) + value_end for each, value in arguments.items())
        parts.append(begin.replace("$N", name) + said + end)
    return "".join(parts)


def in_kimi_k3(calls: Calls) -> str:
    parts = []
    for number, (name, arguments) in enumerate(calls, 1):
        parts.append(f'<|open|>call tool="{name}" index="{number}"<|sep|>\n')
        for key, value in arguments.items():
            kind = "string" if isinstance(value, str) else "number"
            parts.append(f'<|open|>argument key="{key}" type="{kind}"<|sep|>{plain(value)}<|close|>argument<|sep|>\n')
        parts.append("<|close|>call<|sep|>\n")
    return "<|open|>tools<|sep|>\n" + "".join(parts) + "<|close|>tools<|sep|>"


def in_glm(calls: Calls) -> str:
    key = "<arg_key>$K</arg_key>\n<arg_value>"
    return tagged(calls, "<tool_call>$N\n", key, "</arg_value>\n", "</tool_call>")


def in_python(calls: Calls) -> str:
    said = []
    for name, arguments in calls:
        pairs = (f"{key}={as_json(v) if isinstance(v, str) else repr(v)}" for key, v in arguments.items())
        said.append(f"{name}({', '.join(pairs)})")
    return f"<|tool_call_start|>[{', '.join(said)}]<|tool_call_end|>"


def in_kimi_k2(calls: Calls) -> str:
    said = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{as_json(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(said)}<|tool_calls_section_end|>"


def in_channels(calls: Calls) -> str:
    said = [f"to=functions.{name} <|constrain|>json<|message|>{as_json(given)}<|call|>" for name, given in calls]
    return "<|start|>assistant".join(f"<|channel|>commentary {each}" for each in said)


WRITERS: dict[str, Callable[[Calls], str]] = {
    "json_tools": lambda calls: "\n".join(
        f"<tool_call>\n{as_json({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls
    ),
    "qwen3_coder": lambda calls: tagged(
        calls,
        *("<tool_call>\n<function=$N>\n", "<parameter=$K>\n", "\n</parameter>\n", "</function>\n</tool_call>\n"),
    ),
    "glm47": in_glm,
    "laguna": in_glm,
    "longcat": lambda calls: tagged(
        calls,
        "<longcat_tool_call>$N\n",
        "<longcat_arg_key>$K</longcat_arg_key>\n<longcat_arg_value>",
        "</longcat_arg_value>\n",
        "</longcat_tool_call>",
    ),
    "minimax_m2": lambda calls: (
        "<minimax:tool_call>\n"
        + tagged(calls, '<invoke name="$N">\n', '<parameter name="$K">', "</parameter>\n", "</invoke>\n")
        + "</minimax:tool_call>"
    ),
    "muse_spark": lambda calls: (
        "<atem:function_calls>\n"
        + tagged(
            calls, '<atem:invoke name="$N">\n', '<atem:parameter name="$K">', "</atem:parameter>\n", "</atem:invoke>\n"
        )
        + "</atem:function_calls>"
    ),
    "minicpm5": lambda calls: tagged(
        calls, '<function name="$N">', '<param name="$K">', "</param>", "</function>", in_cdata
    ),
    "kimi_k2": in_kimi_k2,
    "kimi_k3": in_kimi_k3,
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{as_json(given)}" for name, given in calls),
    "mistral_list": lambda calls: (
        f"[TOOL_CALLS] {as_json([{'name': name, 'arguments': given} for name, given in calls])}"
    ),
    "pythonic": in_python,
    "gemma4": lambda calls: "".join(f"<|tool_call>call:{name}{in_gemma(given)}<tool_call|>" for name, given in calls),
    "function_gemma": lambda calls: "".join(
        f"<start_function_call>call:{name}{in_gemma(given, '<escape>')}<end_function_call>" for name, given in calls
    ),
    "harmony": in_channels,
}


def parser_options(name: str) -> dict[str, Any]:
    """Return the arguments of mlx-lm's tokenizer for a parser."""
    if name == "harmony":
        return {}
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name.removesuffix('_list')}")
    options = {key: getattr(parser, key) for key in ("tool_call_start", "tool_call_end")}
    return {**options, "tool_parser": parser.parse_tool_call}


@functools.cache
def marks_of(name: str) -> TextMarks:
    """Return the marks of a model with thoughts and calls of one format."""
    if name == "harmony":
        return TextMarks({"normal": {}}, has_channels=True)
    inner = byte_tokenizer()._tokenizer
    inner.add_tokens(["<think>", "</think>", *(["[ARGS]"] if name == "mistral" else [])])
    return text_marks(TokenizerWrapper(inner, eos_token_ids=[EOS], **parser_options(name)))
