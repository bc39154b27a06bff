"""make_prompt(): from a request to its tokens, with bounds. Runs in a process of its own; see serve/prompt_maker.py."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import Any

from mlx_lm import server as upstream
from transformers import PreTrainedTokenizerFast

from ...serve.prompt_messages import MadePrompt, PromptJob
from ...serve.refusal import RequestRefused, invalid, too_many_tokens
from .template_variables import renders_jinja, template_variables, unwrapped

PROCESS = f"{__package__}.prompt_process"  # the module that a process for prompts runs
# What may stand between a text and a tokenizer's model without deleting any of it. The forms of Unicode can join up to
# four characters to one.
FORMS = ("NFC", "NFD", "NFKC", "NFKD")
KEEP_TEXT = {"ByteLevel", "Digits", "Metaspace", "Prepend", "Punctuation", "Sequence", "Split", *FORMS}


def make_prompt(tokenizer: Any, chat_template_args: dict[str, Any], job: PromptJob) -> MadePrompt:
    """Render and tokenize, as mlx-lm's server does.

    Args:
        tokenizer: mlx-lm's wrapper.
        chat_template_args: of the command line.
        job: the request.

    Raises:
        RequestRefused: 400, the prompt cannot be made; 413, it has more tokens than allowed.
    """
    param = "messages" if job.request.request_type == "chat" else "prompt"
    try:
        kwargs = template_variables(
            tokenizer, job.template_kwargs or {}, job.request.tools, allow_template=job.allow_template
        )
        cli_args = SimpleNamespace(chat_template_args=chat_template_args)
        provider = SimpleNamespace(processor=True if job.text_only else None, cli_args=cli_args)
        bounded = BoundedTokenizer(tokenizer, job.most_tokens, text_only=job.text_only)
        owner, args = SimpleNamespace(model_provider=provider), SimpleNamespace(chat_template_kwargs=kwargs)
        tokens, segments, types, state, _ = upstream.ResponseGenerator._tokenize(owner, bounded, job.request, args)
    except Rendered as rendered:
        return MadePrompt([], [], [], "normal", rendered.text)
    except RequestRefused:
        raise
    except Exception as error:
        raise invalid(f"the prompt cannot be made: {type(error).__name__}: {error}", param) from error
    if not tokens:
        raise invalid("the prompt has no tokens", param)
    return MadePrompt(tokens, segments, types, state)


class Rendered(BaseException):
    """Ends mlx-lm's code once the text is there."""

    def __init__(self, text: str) -> None:
        self.text = text


class BoundedTokenizer:
    """A tokenizer that counts before it works: no text is encoded that must have more than ``most`` tokens."""

    def __init__(self, tokenizer: Any, most: int | None, *, text_only: bool = False) -> None:
        self._wrapped, self._most, self._text_only = tokenizer, most, text_only

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __len__(self) -> int:
        return len(self._wrapped)

    def encode(self, text: str, **options: Any) -> list[int]:
        if self._most is not None and (least := least_tokens(self._wrapped, text)) > self._most:
            raise too_many_tokens(least, self._most, at_least=True)
        return self._counted(self._wrapped.encode(text, **options))

    def apply_chat_template(self, messages: Any, *, tokenize: bool = True, **options: Any) -> Any:
        if self._text_only:
            raise Rendered(self._wrapped.apply_chat_template(messages, tokenize=False, **options))
        if not tokenize or not renders_jinja(self._wrapped):
            result = self._wrapped.apply_chat_template(messages, tokenize=tokenize, **options)
            return self._counted(result) if tokenize else result
        text = self._wrapped.apply_chat_template(messages, tokenize=False, **options)
        return self.encode(text, add_special_tokens=False)

    def _counted(self, tokens: list[int]) -> list[int]:
        if self._most is not None and len(tokens) > self._most:
            raise too_many_tokens(len(tokens), self._most)
        return tokens


def least_tokens(tokenizer: Any, text: str) -> int:
    """A number of tokens that ``text`` has at least, found without encoding it; 0 where nothing can be said."""
    longest = longest_token(tokenizer)
    if longest is None:
        return 0
    num_characters, swallows_space = len(text), longest < 0
    if swallows_space:
        num_characters -= sum(map(text.count, " \t\n\r"))
    return num_characters // abs(longest)


def longest_token(tokenizer: Any) -> int | None:
    """Most characters of a text that one token stands for; negative if white space beside a token does not count.
    None if there is no such number: the tokenizer deletes text, or has one token for any length of unknown text.
    """
    return _longest_token(unwrapped(tokenizer))


@functools.lru_cache(maxsize=1)
def _longest_token(inner: Any) -> int | None:
    if not isinstance(inner, PreTrainedTokenizerFast):
        return None
    described = json.loads(inner.backend_tokenizer.to_str())
    model = described["model"]
    parts = [*_parts(described["normalizer"]), *_parts(described["pre_tokenizer"])]
    names = {part["type"] for part in parts}
    deletes = any(part.get("behavior") == "Removed" for part in parts)
    replaces = [part for part in parts if part["type"] == "Replace"]
    if any(part["pattern"] != {"String": " "} or not part["content"] for part in replaces):
        return None
    keeps_all_bytes = "ByteLevel" in names or model.get("byte_fallback")
    if model.get("type") not in ("BPE", "Unigram") or not keeps_all_bytes or deletes or names - KEEP_TEXT - {"Replace"}:
        return None
    vocabulary = model["vocab"]
    entries = vocabulary if isinstance(vocabulary, dict) else (entry[0] for entry in vocabulary)
    added = described["added_tokens"]
    longest = max([1, *map(len, entries), *(len(token["content"]) for token in added)])
    if names & set(FORMS):
        longest *= 4
    return -longest if any(token["lstrip"] or token["rstrip"] for token in added) else longest


def _parts(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer and what it is made of."""
    if step is None:
        return []
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return [step, *(part for each in inner for part in _parts(each))]
