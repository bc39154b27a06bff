"""SpillFolder: the files of prefix blocks, which only their owner can read, and each of which may be bad by itself."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx

from ..kv.storage.base import Geometry, PageFormat


class SavedStates(NamedTuple):
    """States of a checkpoint that came from a file. They become caches when a sequence adopts them.

    Attributes:
        text: JSON, a list with the class and the state of each cache, arrays by name.
        arrays: by name.
    """

    text: str
    arrays: dict[str, mx.array]

    @classmethod
    def of(cls, caches: Sequence[Any]) -> SavedStates:
        """Return the states of caches with mlx-lm's ``state``."""
        arrays: dict[str, mx.array] = {}
        described = [[type(cache).__name__, _described(cache.state, arrays)] for cache in caches]
        return cls(json.dumps(described), arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def fill(self, caches: Sequence[Any]) -> list[Any]:
        """Return the caches, fresh ones of the same classes, with the states.

        Raises:
            ValueError: they are of other classes, or the text is not of states.
        """
        described = json.loads(self.text)
        if [name for name, _ in described] != [type(cache).__name__ for cache in caches]:
            raise ValueError("the states are of other layers")
        for cache, (_, state) in zip(caches, described, strict=True):
            cache.state = _value(state, self.arrays)
        return list(caches)


def _described(value: Any, arrays: dict[str, mx.array]) -> Any:
    if isinstance(value, mx.array):
        name = f"s{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, list):
        return [_described(each, arrays) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_described(each, arrays) for each in value]}
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"a state with {type(value).__name__} cannot be written")


def _value(described: Any, arrays: dict[str, mx.array]) -> Any:
    if isinstance(described, dict):
        if "array" in described:
            return mx.array(arrays[described["array"]])  # one of its own: caches write into their arrays
        return tuple(_value(each, arrays) for each in described["tuple"])
    if isinstance(described, list):
        return [_value(each, arrays) for each in described]
    return described


FORMAT = "mlx_paged prefix block 2"
STATES_FORMAT = "mlx_paged prefix states 1"
MAX_HEADER_BYTES = 1 << 20
STALE_SECONDS = 3600
NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors")
TEMPORARY = re.compile(r"\.[0-9]+-[0-9]+\.safetensors")

# Of a group: heads, sizes of their keys and values, dtype by name, and how the pages hold them (see Geometry); None if
# nothing was written to it.
BlockGeometry = tuple[int, int, int, str, tuple[int, ...] | None] | None
DTYPES = {str(dtype): dtype for dtype in (mx.float32, mx.float16, mx.bfloat16)}


class SpillWarning(UserWarning):
    """A prefix could not be written to disk, or a file there was not used; results are the same."""


class SpilledBlock(NamedTuple):
    """A file: the keys and values of one block of a prefix, in every layer, as pages hold them. Or the states at a
    prefix' end, in every layer that has no blocks.

    Attributes:
        path: ``<chain>-<first hex digits of the file's own SHA-256>.safetensors``.
        tokens: those of the block, at most ``block_size``; of states, those of the last block up to the prefix' end.
        starts: per group, the first position in the block whose keys are there; ``len(tokens)`` if none.
        geometry: per group.
        nbytes: size of the file.
        is_states: states, without starts and geometry.
    """

    path: Path
    tokens: tuple[int, ...]
    starts: tuple[int, ...]
    geometry: tuple[BlockGeometry, ...]
    nbytes: int
    is_states: bool = False

    @property
    def chain(self) -> str:
        """The hash of all tokens up to the block's end, from the file's name."""
        return self.path.stem.partition("-")[0]


class SpillFolder:
    """A folder of :class:`SpilledBlock` files.

    Folder and files are their owner's alone (0700, 0600) from the moment they are there, whatever the umask. A folder
    that others could look into is made private if it holds nothing else; files of this user's that others could read
    are. Files of other users, links, and whatever else there is are not used.

    A file is written under another name and renamed, and its name carries a hash of its bytes: whatever is truncated
    or altered is not used. So nothing is synced to the disk: what a power cut tears is not served.

    Args:
        path: made if it is not there.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._serial = count()
        self._warned = False
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=0o700)
            path.chmod(0o700)  # the umask may have taken something from the owner
        except FileExistsError:
            self._make_private()

    def _make_private(self) -> None:
        mode = self.path.stat()
        if not mode.st_mode & 0o077:
            return
        is_ours = mode.st_uid == os.geteuid() and not mode.st_mode & stat.S_ISVTX
        if is_ours and all(NAME.fullmatch(name) or TEMPORARY.fullmatch(name) for name in os.listdir(self.path)):
            self.path.chmod(stat.S_IMODE(mode.st_mode) & ~0o077)
            text = f"{self.path} was open to other users; now it is its owner's alone"
        else:
            text = f"{self.path} is open to other users; the files that are written there are not"
        warnings.warn(f"mlx_paged: {text}", SpillWarning, stacklevel=5)

    def blocks(self) -> list[SpilledBlock]:
        """Return what is there, used least recently first. Files that another process has not finished are left
        alone."""
        found: list[tuple[int, SpilledBlock]] = []
        for name in os.listdir(self.path):
            if not name.endswith(".safetensors"):
                continue
            path = self.path / name
            try:
                if name.startswith("."):
                    if TEMPORARY.fullmatch(name) and time.time() - path.lstat().st_mtime > STALE_SECONDS:
                        path.unlink(missing_ok=True)
                    continue
                found.append(self._read_header(path))
            except FileNotFoundError:
                continue  # another process has just deleted or renamed it
            except Exception as error:
                self.warn(f"{path} was ignored: {type(error).__name__}: {error}")
        return [block for _, block in sorted(found, key=lambda item: (item[0], item[1].path.name))]

    def _read_header(self, path: Path) -> tuple[int, SpilledBlock]:
        """Return when the file was written, and what it is. Makes it private if it is not."""
        # Neither following a link nor waiting for the writer of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or not NAME.fullmatch(path.name):
                raise ValueError("not a file of this user's with a prefix block")
            if status.st_mode & 0o077:
                os.fchmod(descriptor, 0o600)
            header = json.loads(file.read(min(MAX_HEADER_BYTES, int.from_bytes(file.read(8), "little"))))
        metadata = header["__metadata__"]
        tokens = tuple(int(token) for token in json.loads(metadata["tokens"]))
        is_states = metadata["format"] == STATES_FORMAT
        starts = tuple(int(start) for start in json.loads(metadata["starts"]))
        geometry = tuple(None if each is None else _geometry(*each) for each in json.loads(metadata["geometry"]))
        if (
            metadata["format"] not in (FORMAT, STATES_FORMAT)
            or not tokens
            or not path.name.startswith(metadata["chain"] + "-")
        ):
            raise ValueError("not a prefix block of this version")
        if is_states and (starts or geometry or not isinstance(metadata.get("states"), str)):
            raise ValueError("states have no blocks")
        if len(starts) != len(geometry) or not all(0 <= start <= len(tokens) for start in starts):
            raise ValueError("its groups do not agree")
        return status.st_mtime_ns, SpilledBlock(path, tokens, starts, geometry, status.st_size, is_states)

    def write(self, block: SpilledBlock, data: memoryview) -> SpilledBlock:
        """Write a block whose file was made by :func:`packed`, and return it with its path and size. Without MLX, so
        that any thread can.

        Raises:
            OSError: it cannot be written; nothing of it is left.
        """
        temporary = self.path / f".{os.getpid()}-{next(self._serial)}.safetensors"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            temporary.unlink(missing_ok=True)  # of a process that had this number before
            descriptor = os.open(temporary, flags, 0o600)
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o600)
                _fill(file, data)
            path = self.path / f"{block.chain}-{_digest(data)}.safetensors"
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return block._replace(path=path, nbytes=len(data))

    def load_states(self, block: SpilledBlock) -> SavedStates:
        """Return the states in a file.

        Raises (as whatever error): the file is not what was written.
        """
        self._check_digest(block)
        loaded: Any = mx.load(str(block.path), return_metadata=True)
        arrays, metadata = loaded
        mx.eval(list(arrays.values()))
        return SavedStates(metadata["states"], arrays)

    def _check_digest(self, block: SpilledBlock) -> None:
        if not block.path.stem.endswith("-" + _digest(block.path.read_bytes())):
            raise ValueError("its bytes have changed")

    def load(self, block: SpilledBlock, layers: list[tuple[int, ...]]) -> dict[str, mx.array]:
        """Return the block's keys and values: ``k<layer>`` and ``v<layer>``, each ``[1, heads, tokens - start,
        head_dim]``; of quantised pages rows of so many words (uint32).

        Args:
            block: of :meth:`blocks` or :meth:`write`.
            layers: of each group.

        Raises (as whatever error): the file is not what was written, or does not hold what it says.
        """
        self._check_digest(block)
        arrays = mx.load(str(block.path))
        assert isinstance(arrays, dict)
        for name, shape, dtype in _expected(block, layers):
            if name not in arrays or arrays[name].shape != shape or str(arrays[name].dtype) != dtype:
                raise ValueError(f"{name} is not there, or not {dtype} {shape}")
        mx.eval(list(arrays.values()))
        return arrays

    def delete(self, block: SpilledBlock) -> None:
        """Delete the block's file; a failure is a warning."""
        try:
            block.path.unlink(missing_ok=True)
        except OSError as error:
            self.warn(f"{block.path} could not be deleted: {error}")

    def warn(self, text: str) -> None:
        """Warn, once for the folder."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"mlx_paged: {text}", SpillWarning, stacklevel=4)


def packed(
    chain: str,
    tokens: tuple[int, ...],
    starts: tuple[int, ...],
    geometry: tuple[BlockGeometry, ...],
    arrays: dict[str, mx.array],
    states: str | None = None,
) -> memoryview:
    """Return the bytes of a block's file: a copy of the arrays in host memory. ``states``: the text of saved states."""
    metadata = {
        "format": FORMAT,
        "chain": chain,
        "tokens": json.dumps(tokens),
        "starts": json.dumps(starts),
        "geometry": json.dumps(geometry),
    }
    if states is not None:
        metadata |= {"format": STATES_FORMAT, "states": states}
    file = io.BytesIO()
    mx.save_safetensors(file, arrays, metadata)
    return file.getbuffer()


def _fill(file: BinaryIO, data: memoryview) -> None:
    file.write(data)


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def described(geometry: Geometry | None) -> BlockGeometry:
    """Return a geometry as a file says it."""
    if geometry is None:
        return None
    page_format = None if geometry.format is None else tuple(geometry.format)
    return geometry.num_kv_heads, geometry.k_head_dim, geometry.v_head_dim, str(geometry.dtype), page_format


def geometry_of(described: BlockGeometry) -> Geometry:
    """Return the geometry that a file says. Raises an error (whatever) if it says none that there can be."""
    if described is None:
        raise ValueError("it does not say what its keys are")
    heads, k_dim, v_dim, dtype, page_format = described
    return Geometry(heads, k_dim, v_dim, DTYPES[dtype], None if page_format is None else PageFormat._make(page_format))


def _geometry(
    heads: int, k_dim: int, v_dim: int, dtype: str, page_format: list[int] | None = None
) -> tuple[int, int, int, str, tuple[int, ...] | None]:
    return int(heads), int(k_dim), int(v_dim), str(dtype), None if page_format is None else tuple(map(int, page_format))


def _expected(block: SpilledBlock, layers: list[tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of the arrays that a block has to hold."""
    for own, start, geometry in zip(layers, block.starts, block.geometry, strict=True):
        if start == len(block.tokens):
            continue
        heads, k_dim, v_dim, dtype, _ = geometry_of(geometry).stored
        for layer in own:
            for name, dim in (("k", k_dim), ("v", v_dim)):
                yield f"{name}{layer}", (1, heads, len(block.tokens) - start, dim), str(dtype)
