"""Every error this package raises on purpose. All derive from :class:`PagedCacheError`."""

from __future__ import annotations

import re
import traceback
from typing import TypeVar


class PagedCacheError(Exception):
    """Base of all errors raised by mlx_paged."""


class ConfigError(PagedCacheError, ValueError):
    """An option has a value that cannot be used."""


class GeometryError(PagedCacheError, ValueError):
    """Keys or values do not have the rank, heads, head dimension or dtype of their group."""


class BlockStateError(PagedCacheError, RuntimeError):
    """A block, block table or prefix was misused: released twice, used after release, or written while shared."""


class TrimError(PagedCacheError, ValueError):
    """A block table cannot be trimmed to this length, because it is shorter or no longer holds the blocks."""


class KernelUnavailableError(PagedCacheError, RuntimeError):
    """The fused kernel is required (``kernel="on"``), but cannot run."""


class BlocksUnavailableError(KernelUnavailableError):
    """The kernels that write and gather a GPU's blocks do not work, so nothing can be paged."""


class RankError(PagedCacheError, RuntimeError):
    """Another rank, a process that computes the same model, is gone or has failed."""


class DeviceError(PagedCacheError, RuntimeError):
    """Work on the device has failed, in this call or in an earlier one. ``__cause__`` is MLX's error.

    MLX reports it once, in whichever call waits or submits next, so nobody knows what is wrong since when. Every pool
    of the process is lost with its prefixes: using one raises this error, and new prompt caches get a new pool.

    Attributes:
        count: number of such errors in this process so far.
    """

    count = 0


class DeviceWatch:
    """Tells whether the device has failed since this was made."""

    def __init__(self) -> None:
        self._count = DeviceError.count

    @property
    def is_lost(self) -> bool:
        """Whether it has: what was computed is lost."""
        return DeviceError.count != self._count

    def check(self) -> None:
        """Raise DeviceError if the device has failed."""
        if DeviceError.count != self._count:
            raise DeviceError("its keys and values were lost when the device failed: make a new generator or cache")


class ModelFolderError(PagedCacheError, ValueError):
    """A model folder is missing, incomplete or unreadable."""


class PromptCacheError(PagedCacheError, ValueError):
    """A prompt cache does not belong to the model it is used with, or cannot be restored."""


class PatchError(PagedCacheError, RuntimeError):
    """A patch cannot be applied (strict mode only; otherwise the patch is skipped with a warning)."""


class PoolExhaustedError(PagedCacheError, MemoryError):
    """The pool cannot allocate the blocks within its budget; nothing was changed.

    Attributes:
        blocks_needed: blocks the request needed beyond those free.
        bytes_needed: bytes those blocks take.
        budget_bytes: the pool's whole budget in bytes.
        bytes_reserved: bytes of the budget that are reserved already.
    """

    def __init__(self, *, blocks_needed: int, bytes_needed: int, budget_bytes: int, bytes_reserved: int) -> None:
        self.blocks_needed = blocks_needed
        self.bytes_needed = bytes_needed
        self.budget_bytes = budget_bytes
        self.bytes_reserved = bytes_reserved
        super().__init__(
            f"KV block pool exhausted: {blocks_needed} more block(s) needed ({bytes_needed:,} bytes), but only "
            f"{max(0, budget_bytes - bytes_reserved):,} of the budget of {budget_bytes:,} bytes are left. "
            "Raise kv_cache_memory (--kv-cache-memory) or hold fewer tokens."
        )

    @classmethod
    def too_small(cls, budget_bytes: int, least_bytes: int) -> PoolExhaustedError:
        """Return the error for a budget that holds no sequence at all.

        Args:
            budget_bytes: the budget.
            least_bytes: bytes of the null block and one more in every layer.
        """
        error = cls(blocks_needed=1, bytes_needed=least_bytes, budget_bytes=budget_bytes, bytes_reserved=0)
        error.args = (
            f"the KV cache budget of {budget_bytes:,} bytes is too small for this model, which needs at least "
            f"{least_bytes:,} bytes (two blocks per layer). Raise kv_cache_memory (--kv-cache-memory) or use smaller "
            "blocks (--kv-block-size).",
        )
        return error


class WeightsTooLargeError(PagedCacheError, MemoryError):
    """The weights do not fit the memory; they were not read.

    Attributes:
        weight_bytes: bytes of the weights of all models.
        usable_bytes: bytes that MLX may hold.
    """

    def __init__(self, weight_bytes: int, usable_bytes: int) -> None:
        self.weight_bytes, self.usable_bytes = weight_bytes, usable_bytes
        super().__init__(
            f"the weights take {weight_bytes / 1e9:.2f} GB, and the KV cache needs memory beside them, but MLX may use "
            f"only {usable_bytes / 1e9:.2f} GB on this machine: use smaller, fewer or more quantised models"
        )


class RequestTooLargeError(PagedCacheError, MemoryError):
    """A request has more tokens than the whole budget holds: it could never run. Nothing was changed.

    Attributes:
        num_tokens: tokens of the prompt and of the cache that came with it.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        super().__init__(
            f"a request of {num_tokens} tokens is larger than the whole KV cache budget: "
            "raise kv_cache_memory (--kv-cache-memory) or shorten the prompt"
        )


class RequestFailedError(PagedCacheError, RuntimeError):
    """One request of a batch failed and was removed; the others go on. ``__cause__`` is the original error.

    Attributes:
        uid: uid of the request.
    """

    def __init__(self, uid: int, cause: BaseException) -> None:
        self.uid = uid
        super().__init__(f"request {uid} failed: {type(cause).__name__}: {cause}")
        self.__cause__ = cause


class GrammarError(PagedCacheError, ValueError):
    """A grammar cannot be used, or it failed while an answer was generated."""


class PromptsFileError(PagedCacheError, ValueError):
    """A file of prompts, or of their results, cannot be used."""


# What MLX 0.32 says of a command buffer that failed on Metal, and the errors after which CUDA fails every call.
_DEVICE_ERROR = re.compile(
    r"\[METAL\] Command buffer execution failed"
    r"|failed: .*("
    r"illegal memory access|illegal instruction|misaligned address|operation not supported on global/shared address"
    r"|invalid program counter|unspecified launch failure|launch timed out|device-side assert|hardware stack error"
    r"|[Uu]ncorrectable|[Ii]nvalid access of peer GPU memory|tensor memory)"
    r"|cublas.* failed with code: 1[34]\b"  # execution failed, internal error
)


def check_device(error: BaseException) -> None:
    """Raise DeviceError if ``error``, or one that it was raised from, is an error of the device.

    Call it wherever an error that MLX may have raised is handled rather than raised again.
    """
    part: BaseException | None = error
    seen: set[int] = set()
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        if isinstance(part, DeviceError):
            raise part
        if isinstance(part, RuntimeError) and _DEVICE_ERROR.search(str(part)):
            raise device_failed(part) from part
        part = part.__cause__


def device_failed(cause: BaseException) -> DeviceError:
    """Return the error to raise for one that the device has caused; all pools are lost."""
    DeviceError.count += 1
    return DeviceError(f"the device failed: {cause}")


E = TypeVar("E", bound=BaseException)
_WHERE = "It happened here:\n"


def without_frames(error: E) -> E:
    """Remove the tracebacks of an error that is kept, and of its causes; its own becomes a note. Returns the error.

    A traceback keeps its frames and their callers alive, and with them the caches of all requests and often the error.

    Raises:
        DeviceError: it is an error of the device, which concerns more than the request it is kept for.
    """
    check_device(error)
    if error.__traceback__ is not None:
        notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(_WHERE)]
        error.__notes__ = notes  # of an error raised repeatedly, only the latest note is kept
        notes.append(_WHERE + "".join(traceback.format_exception(error)).rstrip())
    parts: list[BaseException | None] = [error]
    seen: set[int] = set()
    while parts:
        part = parts.pop()
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            part.__traceback__ = None
            parts += [part.__cause__, part.__context__]
    return error
