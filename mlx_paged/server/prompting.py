"""PromptMaker: does the work that grows with a request's body in worker threads, and makes prompts there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from .agents import steady_messages
from .errors import invalid
from .request import ChatInput, Input, Prompt, PromptLimits, ServerRequest

if TYPE_CHECKING:
    from .texts import LoadedTexts

T = TypeVar("T")
THREADS = 4  # more would take the interpreter from the thread that computes
MAX_DEFAULT_TOKENS = 1 << 16  # of an answer, if neither the request, --max-tokens nor the model sets a limit


class PromptMaker:
    """Makes the prompts of requests, in a few worker threads, so that a text of millions of tokens delays no small one.

    Args:
        default_tokens: most tokens of an answer if the request does not say; None: what fits the model's context.
    """

    def __init__(self, *, default_tokens: int | None = None) -> None:
        self.num_waiting = 0
        self._default_tokens = default_tokens
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prompts")

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a worker thread, and return its result."""
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.num_waiting -= 1

    async def compile(
        self, request: ServerRequest, texts: LoadedTexts, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Compile the request's constraint, if it has one, and if the request is still wanted when its turn comes.

        Raises:
            RequestRefused: 400, the grammar is invalid.
        """
        if (constraint := request.constraint) is None:
            return
        compiled = lambda: texts.compile(constraint) if is_wanted() else None  # noqa: E731
        request.grammar = await asyncio.to_thread(compiled)  # it mostly waits
        if request.grammar is None:
            request.constraint = None  # so that other ranks do not compile it either

    # In a worker thread ---------------------------------------------------------------------------------------

    def complete(self, request: ServerRequest, texts: LoadedTexts) -> None:
        """Make the prompts of a request, and limit its answers to what fits. Call it in a worker thread.

        Raises:
            RequestRefused: 400, the request cannot be served.
        """
        texts.completed(request)
        if not request.prompts:
            request.prompts = [self.made(given, texts) for given in request.inputs]
        longest = max(len(prompt.tokens) for prompt in request.prompts)
        room = None if texts.capacity is None else texts.capacity - longest
        wanted = self._default_tokens if request.max_tokens is None else request.max_tokens
        if wanted is None:
            context = texts.context_length
            wanted = MAX_DEFAULT_TOKENS if context is None else max(1, context - longest)
        request.max_tokens = wanted if room is None else min(wanted, room)

    def made(self, given: Input, texts: LoadedTexts) -> Prompt:
        """Return one prompt; call it in a worker thread. Raises RequestRefused."""
        most = None if texts.capacity is None else texts.capacity - 1
        length = texts.context_length
        of_model = length is not None and (most is None or length < most)
        limits = PromptLimits(length if of_model else most, of_model)
        if isinstance(given, ChatInput):
            limits.check(len(given.messages), at_least=True)  # a message has at least one token
            check_images(given, texts)
            given = replace(given, messages=steady_messages(given.messages))
        return texts.make_prompt(given, limits)


def check_images(given: Input, texts: LoadedTexts) -> None:
    """Raise RequestRefused (400) for images that the model does not take, or that are no data URLs."""
    for part in parts_of(given):
        url = _url_of(part)
        if url is None:
            continue
        if not texts.takes_images:
            raise invalid("this model accepts only text", "messages")
        if not isinstance(url, str) or not url.startswith("data:"):
            raise invalid("an image must be a data URL", "messages")


def parts_of(given: Input) -> list[dict[str, Any]]:
    """Return all content parts of a chat; a content that is a string has none."""
    contents = [message.get("content") for message in given.messages] if isinstance(given, ChatInput) else []
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]


def _url_of(part: dict[str, Any]) -> Any:
    if part.get("type") not in ("image_url", "input_image", "image"):
        return None
    url = part.get("image_url", part.get("image"))
    return url.get("url") if isinstance(url, dict) else url
