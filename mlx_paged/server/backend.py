"""What the server asks of the library whose models it serves; handed in by the patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from ..kv.pool import BlockPool
from .constraint import Constraint
from .errors import invalid
from .request import Input, ModelKey, Prompt, ServerRequest


class PromptLimits(NamedTuple):
    """Bounds of the work for one prompt.

    Attributes:
        tokens: more than these are refused; None: any number.
        seconds: that its template may run.
        allow_template: whether the client may bring its own chat template.
        of_model: ``tokens`` is the model's context, and not what the budget holds.
    """

    tokens: int | None = None
    seconds: float = 20.0
    allow_template: bool = False
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


class TextParts(Protocol):
    """Parts an answer's text into ``(state, text)``; states are ``normal``, ``reasoning`` and ``tool``."""

    def feed(self, text: str) -> list[tuple[str, str]]: ...
    def flush(self) -> tuple[str, str]: ...


class ModelTexts(Protocol):
    """A model's tokenizer and what goes with it; for any thread.

    Attributes:
        vocab_size: tokens that the model knows.
        capacity: most tokens of a sequence, prompt and answer, that the memory budget holds; None: any number.
        context_length: tokens that the model was made for; None: it does not say.
        takes_images: whether prompts may hold some.
        call_start: what a tool call begins with, in text; None: the model calls no tools.
    """

    key: ModelKey
    vocab_size: int
    capacity: int | None
    context_length: int | None
    takes_images: bool
    call_start: str | None

    def make_prompt(self, given: Input, limits: PromptLimits) -> Prompt: ...
    def compile(
        self, constraint: Constraint, *, is_cancelled: Callable[[], bool] = ..., is_checked: bool = ...
    ) -> Any: ...
    def completed(self, request: ServerRequest) -> None: ...
    def parts(self, initial_state: str, *, has_calls: bool) -> TextParts: ...
    def parse_calls(self, text: str, tools: Any) -> list[dict[str, Any]]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def token(self, token_id: int) -> tuple[str, bytes]: ...
    def detokenizer(self) -> Any: ...


class Models(Protocol):
    """The model that is loaded, and those that can be; for the thread that computes.

    Attributes:
        prompt_cache: of all models.
        idle_unload: seconds without a request after which :meth:`unload` is called; None: never.
    """

    prompt_cache: Any
    idle_unload: float | None

    @property
    def texts(self) -> ModelTexts | None:
        """Texts of the present model; None before the first is loaded. Any thread may read it."""
        ...

    @property
    def pool(self) -> BlockPool | None: ...
    @property
    def pools(self) -> list[BlockPool]: ...
    def texts_of(self, key: ModelKey | None) -> ModelTexts | None:
        """Return texts of a model that is loaded or was unloaded; None: of the present one. Any thread may ask."""
        ...

    def is_present(self, key: ModelKey) -> bool: ...
    def load_default(self) -> None: ...
    def load(self, key: ModelKey, make_way: Callable[[], None]) -> None: ...
    def unload(self) -> None:
        """Let go of all models and their pools. Texts stay."""
        ...

    def batches(self, request: ServerRequest) -> bool:
        """Return whether a request can be computed with others."""
        ...

    def batch(self, stream: mx.Stream) -> Any:
        """Return what computes requests together: mlx-lm's batch generator, which is asked by requests."""
        ...

    def alone(
        self, request: ServerRequest, index: int, stream: mx.Stream, on_progress: Callable[[int, int], None]
    ) -> Iterator[Any]:
        """Yield the tokens of a request that cannot, with their texts."""
        ...

    def scores(self, tokens: list[int], num_top: int) -> Iterator[tuple[list[float], list[Any]] | None]:
        """Yield None while a prompt's log-probabilities are computed, slice by slice, and then these."""
        ...

    def mend(self) -> None: ...
    def trim(self, batch: Any) -> None: ...
    def close(self) -> None: ...
