"""What /tokenize, /detokenize and /v1/messages/count_tokens answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ....serve.prompt_messages import MadePrompt
from ....serve.refusal import RequestRefused, invalid
from ..answer_queue import AnswerQueue
from ..prepared_request import PreparedRequest
from .arguments import generation_arguments

if TYPE_CHECKING:
    from ..response_generator import PagedResponseGenerator


class Tokens:
    """Prompts as tokens, made as those of requests are.

    Args:
        generator: of the server's answers.
        client_is_gone: asked while the model or the process for prompts is waited for.
    """

    def __init__(self, generator: PagedResponseGenerator, client_is_gone: Callable[[], bool]) -> None:
        self._generator = generator
        self._client_is_gone = client_is_gone

    def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RequestRefused: the prompt cannot be made."""
        if ("prompt" in body) == ("messages" in body):
            raise invalid("one of prompt and messages is needed, and not both", "prompt")
        tokens = self._tokens(body)
        return {"count": len(tokens), "tokens": tokens}

    def count(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """Of the chat that a message means. Raises RequestRefused: the prompt cannot be made."""
        return {"input_tokens": len(self._tokens(chat))}

    def detokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RequestRefused: they are not tokens of the model."""
        tokens = body["tokens"]
        try:
            self._made(body, "text", MadePrompt(tokens, [], [], "normal"))
        except RequestRefused as refusal:
            raise invalid(str(refusal).replace("prompt", "tokens", 1), "tokens") from None
        return {"prompt": self._generator.model_provider.tokenizer.decode(tokens)}

    def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        return self._made(body, "chat" if "messages" in body else "text").tokens

    def _made(self, body: Mapping[str, Any], kind: str, made: MadePrompt | None = None) -> MadePrompt:
        request = PreparedRequest(
            kind, body.get("prompt", ""), body.get("messages", []), body.get("tools"), None, made=made
        )
        args = generation_arguments(body, self._generator.cli_args)
        return self._generator.make_prompt(AnswerQueue(), request, args, self._client_is_gone)
