"""PreparedRequest: a request whose prompt has been made before it comes to the thread that computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm import server as upstream

from ...serve.prompt_messages import MadePrompt
from ...serve.refusal import invalid


@dataclass
class PreparedRequest(upstream.CompletionRequest):  # type: ignore[misc]
    """mlx-lm's request, and:

    Attributes:
        made: its prompt; None: it has not been made yet.
        salt: only requests with the same one share prefixes.
    """

    made: MadePrompt | None = None
    salt: str | None = None


class RenderedTokenizer:
    """A tokenizer for a prompt with images, whose chat template has been rendered before."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._wrapped, self._text = tokenizer, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __len__(self) -> int:
        return len(self._wrapped)

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        return self._text


def has_images(messages: list[Any] | None) -> bool:
    """Whether some part of a chat is an image."""
    return any(upstream._image_parts(messages))


def check_sampling(args: upstream.GenerationArguments, tokenizer: Any, model: nn.Module) -> None:
    """Check what mlx-lm takes for granted in a request's sampling options; ``top_k`` is cut to what there is.

    Args:
        args: mlx-lm's GenerationArguments.
        tokenizer: mlx-lm's wrapper.
        model: which has an answer's tokens to choose from.

    Raises:
        RequestRefused: 400, they cannot be used.
    """
    vocab = getattr(getattr(model, "args", None), "vocab_size", None) or len(tokenizer)
    if any(not 0 <= token < vocab for token in args.logits.logit_bias or ()):
        raise invalid(f"logit_bias: token ids go from 0 to {vocab - 1}", "logit_bias")
    args.sampling.top_k = min(args.sampling.top_k, vocab - 1)
    try:  # what follows would end the request with an error of the server's
        upstream._make_sampler(args, tokenizer)
        upstream._make_logits_processors(args)
    except Exception as error:
        raise invalid(f"these sampling parameters cannot be used: {error}") from error
