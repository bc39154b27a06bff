"""Protocols of what the server needs from mlx-lm, implemented in ``patches/server.py`` and ``server_texts.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from ..kv.pool import BlockPool
from .call_formats import TextMarks
from .constraint import Constraint
from .errors import invalid
from .request import Input, ModelKey, Prompt, ServerRequest


class PromptLimits(NamedTuple):
    """Limits on the work for one prompt.

    Attributes:
        tokens: most tokens; None: no limit.
        of_model: whether ``tokens`` is the model's context length, rather than what the memory budget holds.
    """

    tokens: int | None = None
    of_model: bool = False

    def check(self, num_tokens: int, *, at_least: bool = False) -> None:
        """Raise RequestRefused (400) for more tokens than allowed."""
        if self.tokens is None or num_tokens <= self.tokens:
            return
        why = "the whole KV cache budget holds no more; raise kv_cache_memory (--kv-cache-memory) or shorten the prompt"
        if self.of_model:
            why = "the model's context length"
        number = f"at least {num_tokens}" if at_least else str(num_tokens)
        raise invalid(f"{number} tokens > {self.tokens} maximum: {why}", code="context_length_exceeded")


class ModelTexts(Protocol):
    """A model's tokenizer and chat template; for any thread.

    Attributes:
        vocab_size: size of the vocabulary.
        capacity: most tokens of a sequence, prompt and answer, that the memory budget holds; None: any number.
        context_length: the model's context length in tokens; None: its configuration has none.
        takes_images: whether prompts may contain images.
        marks: the marks that divide its answers.
    """

    key: ModelKey
    vocab_size: int
    capacity: int | None
    context_length: int | None
    takes_images: bool
    marks: TextMarks

    def make_prompt(self, given: Input, limits: PromptLimits) -> Prompt: ...
    def compile(self, constraint: Constraint) -> Any: ...
    def completed(self, request: ServerRequest) -> None: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def token(self, token_id: int) -> tuple[str, bytes]: ...
    def detokenizer(self) -> Any: ...


class Models(Protocol):
    """The present model, and those that can be loaded; for the engine thread.

    Attributes:
        prompt_cache: the prompt cache of all models.
        idle_unload: seconds without a request after which :meth:`unload` is called; None: never.
    """

    prompt_cache: Any
    idle_unload: float | None

    @property
    def texts(self) -> ModelTexts | None:
        """Texts of the present model; None before the first is loaded. For any thread."""
        ...

    @property
    def pool(self) -> BlockPool | None: ...
    def texts_of(self, key: ModelKey | None) -> ModelTexts | None:
        """Return a model's texts, None if they are not known; with ``key`` None the present model's. For any thread."""
        ...

    def is_present(self, key: ModelKey) -> bool: ...
    def load_default(self) -> None: ...
    def load(self, key: ModelKey, make_way: Callable[[], None]) -> None: ...
    def unload(self) -> None:
        """Unload all models and their pools; their texts stay."""
        ...

    def can_batch(self, request: ServerRequest) -> bool:
        """Return whether a request can run in the batch."""
        ...

    def batch(self, stream: mx.Stream) -> Any:
        """Return a batch generator: mlx-lm's interface and ``insert_request``."""
        ...

    def generate_alone(
        self, request: ServerRequest, index: int, stream: mx.Stream, on_progress: Callable[[int, int], None]
    ) -> Iterator[Any]:
        """Yield the tokens and texts of one answer to a request that cannot run in the batch."""
        ...

    def scores(self, tokens: list[int], num_top: int) -> Iterator[tuple[list[float], list[Any]] | None]:
        """Compute a prompt's log-probabilities in slices: yield None after each slice, and finally the result."""
        ...

    def trim(self, batch: Any) -> None: ...
    def close(self) -> None: ...
