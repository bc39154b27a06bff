"""template_variables(): what of a request's ``chat_template_kwargs`` reaches the model's chat template."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jinja2.meta
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from ...serve.refusal import invalid

# Arguments of apply_chat_template that templates read as variables, too, and that mlx-lm does not give itself.
VARIABLES_AMONG_ARGUMENTS = frozenset({"documents"})
# mlx-lm's wrapper of tokenizers renames it for templates that call it otherwise.
THINKING = "enable_thinking"


def template_variables(
    tokenizer: Any, given: Mapping[str, Any], tools: Any = None, *, allow_template: bool = False
) -> dict[str, Any]:
    """The part of ``given`` that may be handed on to ``apply_chat_template``.

    Allowed is what the template's own source reads without setting it (for a renderer in Python: what its signature
    names), but for the arguments of ``apply_chat_template`` (messages, tools, padding, ...) and the special tokens.
    What the template does not read would change nothing and is left out: clients send what other models know.

    Args:
        tokenizer: mlx-lm's wrapper.
        given: ``chat_template_kwargs``.
        tools: of the request; some models have a template of their own for them.
        allow_template: ``chat_template`` may be among them.

    Raises:
        RequestRefused: with status 400: an argument of ``apply_chat_template`` that is not a variable.
    """
    template = given.get("chat_template") if allow_template else None
    if template is not None and not isinstance(template, str):
        raise invalid("chat_template_kwargs: chat_template must be a string", "chat_template_kwargs")
    arguments = _arguments() - VARIABLES_AMONG_ARGUMENTS
    known = _read_by(tokenizer, template, tools)
    result = {}
    for name, value in given.items():
        if name == "chat_template" and allow_template:
            result[name] = value
        elif name in arguments:
            raise invalid(f"chat_template_kwargs: {name} is not a variable of a chat template", "chat_template_kwargs")
        elif name in known or name == THINKING:
            result[name] = value
    return result


@functools.cache
def _arguments() -> frozenset[str]:
    names = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}
    return frozenset(names | {"messages"})


def _read_by(tokenizer: Any, template: str | None, tools: Any) -> frozenset[str]:
    inner = unwrapped(tokenizer)
    renderer = getattr(tokenizer, "_chat_template", None)
    if renderer is None and not renders_jinja(tokenizer):
        renderer = type(inner).apply_chat_template
    if renderer is not None and template is None:
        return frozenset(inspect.signature(renderer).parameters) - _arguments() - {"self", "kwargs"}
    read = _undeclared(inner.get_chat_template(template, tools))
    return read - (_arguments() - VARIABLES_AMONG_ARGUMENTS) - frozenset(inner.special_tokens_map)


def unwrapped(tokenizer: Any) -> Any:
    """The tokenizer of transformers that mlx-lm's wrapper holds."""
    return tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer


def renders_jinja(tokenizer: Any) -> bool:
    """Whether ``apply_chat_template`` renders a Jinja template and then encodes the text, and no more."""
    inner = unwrapped(tokenizer)
    own = getattr(type(inner), "apply_chat_template", None)
    return getattr(tokenizer, "_chat_template", None) is None and own is PreTrainedTokenizerBase.apply_chat_template


@functools.lru_cache(maxsize=16)
def _undeclared(template: str) -> frozenset[str]:
    # Parsed as it is going to be rendered: with the tags that chat templates have beyond Jinja's.
    environment = chat_template_utils._compile_jinja_template(template).environment
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
