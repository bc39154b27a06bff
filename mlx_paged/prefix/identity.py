"""model_identity(): what tells a model's keys and values from those of any other model, across processes."""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..by_model import ByModel

# Bytes hashed at a time. On CUDA as much is copied, for each piece under way.
PIECE_BYTES = 16 << 20
MOST_THREADS = 16
OWN_FOLDER = Path(__file__).parents[1]


def model_identity(model: nn.Module, config: Any = None) -> str:
    """Return a hash of all that a model's keys and values depend on, tokens apart.

    Of every array: where it is in the model, dtype, shape and bytes. Of every module: its class and its plain
    attributes, such as a norm's ``eps``, an adapter's ``scale`` and the arguments the model was built from. Of the
    code: versions and sources of MLX's layers, of the package each class is from, and of this one.

    Reads all weights once, in as many threads as there are processors. They are not copied where the host can read
    them, and on CUDA piece by piece.

    Args:
        model: loaded, adapters included.
        config: what it was loaded with (config.json), as parsed.

    Returns:
        64 hex digits.
    """
    with _ArrayHasher() as hash_array:
        parts = [*_described("model", model, hash_array, {}), *_described("config", config, hash_array, {})]
        parts += _code_of(model)
        return digest_of(part if isinstance(part, str) else part() for part in parts)


def digest_of(parts: Iterable[str]) -> str:
    """Return a hash of texts in order, 64 hex digits; where one ends and the next begins counts."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(raw) + raw)
    return digest.hexdigest()


# Arrays ---------------------------------------------------------------------------------------------------------------


class _ArrayHasher:
    """Hashes arrays in threads, a bounded number of pieces at a time; hashlib lets go of the interpreter meanwhile."""

    def __init__(self) -> None:
        self._num_threads = min(MOST_THREADS, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(self._num_threads, thread_name_prefix="mlx_paged identity")
        self._under_way: deque[Future[str]] = deque()

    def __enter__(self) -> _ArrayHasher:
        return self

    def __exit__(self, *error: Any) -> None:
        self._executor.shutdown(cancel_futures=True)

    def __call__(self, x: mx.array) -> Callable[[], str]:
        """Start on an array. What is returned waits for its hash."""
        pieces = [self._start(piece) for piece in _pieces(x)]
        return lambda: digest_of(piece.result() for piece in pieces)

    def _start(self, piece: memoryview) -> Future[str]:
        while len(self._under_way) >= 2 * self._num_threads:
            self._under_way.popleft().result()
        future = self._executor.submit(_sha256, piece)
        self._under_way.append(future)
        return future


def _sha256(piece: memoryview) -> str:
    with piece:
        return hashlib.sha256(piece).hexdigest()


def _pieces(x: mx.array) -> Iterator[memoryview]:
    """Yield the array's bytes, row by row."""
    raw = x.reshape(-1).view(mx.uint8)
    if _host_reads_arrays():
        mx.eval(raw)
        for start in range(0, raw.size, PIECE_BYTES):
            yield memoryview(raw)[start : start + PIECE_BYTES]  # type: ignore[arg-type]
        return
    zero = mx.array(0, mx.uint8)
    for start in range(0, raw.size, PIECE_BYTES):
        # Not a view: the buffer that the host reads from is moved to where it can.
        piece = raw[start : start + PIECE_BYTES] | zero
        mx.eval(piece)
        yield memoryview(piece)  # type: ignore[arg-type]


@functools.cache
def _host_reads_arrays() -> bool:
    return mx.default_device() == mx.Device(mx.cpu) or bool(mx.metal.is_available())


# Everything else ------------------------------------------------------------------------------------------------------


def _described(
    path: str, value: Any, hash_array: _ArrayHasher, seen: dict[int, str]
) -> Iterator[str | Callable[[], str]]:
    """Texts that are the same in every process for values that mean the same.

    Args:
        path: of the value.
        hash_array: what to do with arrays.
        seen: paths of the containers and objects described already, by id.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield f"{path}: {type(value).__name__} {value!r}"
        return
    if isinstance(value, mx.array):
        yield f"{path}: {value.dtype} {value.shape}"
        yield hash_array(value)
        return
    if isinstance(value, mx.Dtype):
        yield f"{path}: {value}"
        return
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        yield f"{path}: {value.__module__}.{value.__qualname__}"
        return
    if isinstance(value, set | frozenset):
        yield f"{path}: {sorted(map(repr, value))}"
        return
    yield f"{path}: {type(value).__module__}.{type(value).__qualname__}"
    if id(value) in seen:
        yield f"as {seen[id(value)]}"
        return
    seen[id(value)] = path
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items += [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        items += [(f"[{index:09}]", each) for index, each in enumerate(value)]
    elif isinstance(value, functools.partial):
        items += [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    # `_no_grad` says what to train.
    attributes = getattr(value, "__dict__", {})
    items += [(f".{name}", each) for name, each in attributes.items() if name != "_no_grad"]
    for name, each in sorted(items, key=lambda item: item[0]):
        yield from _described(path + name, each, hash_array, seen)


def _code_of(model: nn.Module) -> list[str]:
    """Versions and source files of what computes the model."""
    found = [f"mlx {version('mlx')}"]
    files = {Path(folder) / name for folder, _, names in os.walk(OWN_FOLDER, followlinks=True) for name in names}
    for name in sorted({cls.__module__ for module in model.modules() for cls in type(module).__mro__}):
        module, package = sys.modules.get(name), sys.modules.get(name.partition(".")[0])
        found.append(f"{name} {getattr(package, '__version__', None)}")
        if (file := getattr(module, "__file__", None)) is not None:
            # A model shares code with its neighbours in a package; one that came by itself is a file of its own.
            files |= set(Path(file).parent.glob("*.py")) if getattr(module, "__package__", "") else {Path(file)}
    sources = sorted((f"{file.parent.name}/{file.name}", file) for file in files if file.suffix != ".pyc")
    return found + [f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for name, file in sources]


def identity_of(models: Sequence[Any]) -> str | None:
    """Return what names models, a target and perhaps its draft, on disk (see :func:`model_identity`); None if it cannot
    be told. Nothing is remembered: under the same name, another model may have been saved since."""
    begin = time.monotonic()
    try:
        identity = digest_of(model_identity(model, loaded_configs.get(model)) for model in models)
    except OSError as error:
        logging.warning("prefixes on disk are not used: the code of the model cannot be read: %s", error)
        return None
    logging.info("read the weights for the prefixes on disk in %.1f s", time.monotonic() - begin)
    return identity


# The config.json that each model was loaded with: the file may be another one by the time somebody asks.
loaded_configs: ByModel[dict[str, Any]] = ByModel()


def noting_configs(load: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's ``load``, which notes the configuration of what it loads."""

    @functools.wraps(load)
    def noting_load(*args: Any, return_config: bool = False, **kwargs: Any) -> Any:
        model, tokenizer, config = load(*args, return_config=True, **kwargs)
        loaded_configs.put(model, copy.deepcopy(config))
        return (model, tokenizer, config) if return_config else (model, tokenizer)

    return noting_load
