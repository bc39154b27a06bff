"""PromptMaker: makes prompts in worker threads, since tokenizers release the GIL while they work."""

from __future__ import annotations

import asyncio
import base64
import functools
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from .backend import PromptLimits
from .clients import FairLock
from .errors import invalid
from .request import ChatInput, Input, Prompt, ServerRequest
from .requests.agents import ToolOrders, steady_messages

if TYPE_CHECKING:
    from .backend import ModelTexts

T = TypeVar("T")
PROMPT_SECONDS = 20.0  # for one chat template
MAX_IMAGE_BYTES = 20 << 20
IMAGE_SECONDS = 10
WAITING_THREADS = 4
SMALL_CHARACTERS = 64 << 10  # up to this size, prompts have a thread of their own
MAX_DEFAULT_TOKENS = 1 << 16  # of an answer, if neither the request, --max-tokens nor the model sets a limit


class PromptMaker:
    """Makes the prompts of requests. Large and small prompts have a thread each, so that a text of millions of tokens
    delays no small request.

    Args:
        allow_template: whether clients may bring their own chat templates.
        image_hosts: hosts that images are fetched from; other images must come as data URLs.
        default_tokens: most tokens of an answer if the request does not say; None: what fits the model's context.
    """

    def __init__(
        self,
        *,
        allow_template: bool = False,
        image_hosts: frozenset[str] = frozenset(),
        default_tokens: int | None = None,
    ) -> None:
        self.num_waiting = 0
        self._allow_template, self._image_hosts, self._default_tokens = allow_template, image_hosts, default_tokens
        self._tool_orders = ToolOrders()
        self._small, self._large = ((ThreadPoolExecutor(1, thread_name_prefix="prompts"), FairLock()) for _ in range(2))
        # For work that mostly waits: grammar trials and image downloads.
        self._waiting = ThreadPoolExecutor(WAITING_THREADS, thread_name_prefix="waiting")

    async def complete(self, request: ServerRequest, texts: ModelTexts, is_gone: Callable[[], bool]) -> None:
        """Make the prompts and the grammar of a request, and limit its answers to what fits.

        Args:
            is_gone: returns whether the client has disconnected; called during the grammar's trial.

        Raises:
            RequestRefused: 400, the request cannot be served.
        """
        texts.completed(request)
        for given in request.inputs:
            if isinstance(given, ChatInput) and given.tools:
                given.tools = self._tool_orders.steady(given.tools, request.salt)
            await self.fetch_images(given, texts)
        if (constraint := request.constraint) is not None:
            request.grammar = await self._waited_for(lambda: texts.compile(constraint, is_cancelled=is_gone))
            if request.grammar is None:
                request.constraint = None  # so that other ranks do not compile it either
        size = sum(map(_size, request.inputs))
        await self.run(lambda: self._complete(request, texts), size=size, client=request.client)

    def _complete(self, request: ServerRequest, texts: ModelTexts) -> None:
        if not request.prompts:
            request.prompts = [self.made(given, texts) for given in request.inputs]
        longest = max(len(prompt.tokens) for prompt in request.prompts)
        room = None if texts.capacity is None else texts.capacity - longest
        wanted = self._default_tokens if request.max_tokens is None else request.max_tokens
        if wanted is None:
            context = texts.context_length
            wanted = MAX_DEFAULT_TOKENS if context is None else max(1, context - longest)
        request.max_tokens = wanted if room is None else min(wanted, room)

    async def tokens_of(self, given: Input, texts: ModelTexts) -> list[int]:
        """Return a prompt's tokens. Raises RequestRefused."""
        await self.fetch_images(given, texts)
        made = await self.run(lambda: self.made(given, texts), size=len(str(given)))
        return made.tokens

    def made(self, given: Input, texts: ModelTexts) -> Prompt:
        """Return one prompt; call it in a worker thread. Raises RequestRefused."""
        most = None if texts.capacity is None else texts.capacity - 1
        length = texts.context_length
        of_model = length is not None and (most is None or length < most)
        if isinstance(given, ChatInput):
            given = replace(given, messages=steady_messages(given.messages))
        limits = PromptLimits(length if of_model else most, PROMPT_SECONDS, self._allow_template, of_model)
        return texts.make_prompt(given, limits)

    async def run(self, work: Callable[[], T], *, size: int = 0, client: str = "") -> T:
        """Run ``work`` in the worker thread for its ``size`` in characters; return its result. Clients take turns."""
        pool, lock = self._small if size <= SMALL_CHARACTERS else self._large
        self.num_waiting += 1
        try:
            async with lock.hold(client):
                return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            self.num_waiting -= 1

    async def _waited_for(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._waiting, work)

    # Images ---------------------------------------------------------------------------------------------------

    async def fetch_images(self, given: Input, texts: ModelTexts) -> None:
        """Replace every image URL of a chat by a data URL; images are fetched from allowed hosts only.

        Raises:
            RequestRefused: 400, the model takes no images, or one cannot be fetched.
        """
        for part in parts_of(given):
            url = _url_of(part)
            if url is None:
                continue
            if not texts.takes_images:
                raise invalid("this model accepts only text", "messages")
            if isinstance(url, str) and url.startswith("data:"):
                continue
            if _host_of(url) not in self._image_hosts:
                raise invalid("an image must be a data URL, or come from a host of --allow-remote-images", "messages")
            data, kind = await self._waited_for(functools.partial(fetch, url))
            part.clear()
            part |= {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}


def _size(given: Input) -> int:
    if isinstance(given, str | list):
        return len(given)
    return sum(len(str(message.get("content"))) for message in given.messages) + len(str(given.tools or ""))


def parts_of(given: Input) -> list[dict[str, Any]]:
    """Return all content parts of a chat; a content that is a string has none."""
    contents = [message.get("content") for message in given.messages] if isinstance(given, ChatInput) else []
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]


def _url_of(part: dict[str, Any]) -> Any:
    if part.get("type") not in ("image_url", "input_image", "image"):
        return None
    url = part.get("image_url", part.get("image"))
    return url.get("url") if isinstance(url, dict) else url


def _host_of(url: Any) -> str | None:
    """Return the host of an http or https URL, else None: ``file://localhost/`` is a file of this machine."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        return parts.hostname if parts is not None and parts.scheme in ("http", "https") else None
    except ValueError:
        return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: an allowed host could redirect to one that is not."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def fetch(url: str) -> tuple[bytes, str]:
    """Return an image's bytes and media type. Raises RequestRefused if it is too large or cannot be fetched in time."""
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
    data, until = b"", time.monotonic() + IMAGE_SECONDS
    try:
        with opener.open(url, timeout=IMAGE_SECONDS) as answer:
            kind = answer.headers.get_content_type()
            while len(data) <= MAX_IMAGE_BYTES and (part := answer.read1(1 << 20)):
                data += part
                if time.monotonic() > until:
                    raise TimeoutError
    except (OSError, ValueError, HTTPException):
        raise invalid("an image cannot be fetched", "messages") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise invalid(f"an image is larger than {MAX_IMAGE_BYTES:,} bytes", "messages")
    return data, kind
