"""SpillFolder: files of prefix blocks, readable by their owner only, each verified by itself."""

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

from ..kv.geometry import Geometry, PageFormat


class SavedStates(NamedTuple):
    """States of a checkpoint in the form of a file. They become caches when a sequence adopts them.

    Attributes:
        text: JSON list of each cache's class and state, with names in place of arrays.
        arrays: the arrays by name.
    """

    text: str
    arrays: dict[str, mx.array]

    @classmethod
    def of(cls, caches: Sequence[Any]) -> SavedStates:
        """Return the states of caches that have mlx-lm's attribute ``state``."""
        arrays: dict[str, mx.array] = {}
        described = [[type(cache).__name__, _described(cache.state, arrays)] for cache in caches]
        return cls(json.dumps(described), arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def fill(self, caches: Sequence[Any]) -> list[Any]:
        """Give the states to ``caches``, fresh ones of the same classes, and return them.

        Raises:
            ValueError: the caches are of other classes, or the text is not JSON.
        """
        described = json.loads(self.text)
        if [name for name, _ in described] != [type(cache).__name__ for cache in caches]:
            raise ValueError("the states belong to other layers")
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
            return mx.array(arrays[described["array"]])  # a copy: caches write into their arrays
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

# A group's number of KV heads, sizes of their keys and values, name of the dtype, and page format (see Geometry); None
# if nothing was written to the group.
BlockGeometry = tuple[int, int, int, str, tuple[int, ...] | None] | None
DTYPES = {str(dtype): dtype for dtype in (mx.float32, mx.float16, mx.bfloat16)}


class SpillWarning(UserWarning):
    """A prefix could not be written to disk, or a file there was not used; results are the same."""


class SpilledBlock(NamedTuple):
    """A file that holds the keys and values of one block of a prefix in every layer, as pages hold them, or the states
    at the end of a prefix in every layer without blocks.

    Attributes:
        path: ``<chain>-<first hex digits of the file's own SHA-256>.safetensors``.
        tokens: tokens of the block, at most ``block_size``; for states, those of the prefix's last block.
        starts: per group, the first position in the block whose keys are in the file; ``len(tokens)`` if none.
        geometry: geometry of each group.
        nbytes: size of the file.
        is_states: the file holds states; ``starts`` and ``geometry`` are empty.
    """

    path: Path
    tokens: tuple[int, ...]
    starts: tuple[int, ...]
    geometry: tuple[BlockGeometry, ...]
    nbytes: int
    is_states: bool = False

    @property
    def chain(self) -> str:
        """Hash of all that comes before the block (see :class:`SpillStore`), from the file's name."""
        return self.path.stem.partition("-")[0]


class SpillFolder:
    """A folder of :class:`SpilledBlock` files.

    Folder and files are private (0700, 0600) from their creation, whatever the umask. An existing folder that others
    can read is made private if it holds nothing but such files; this user's files that others can read are made
    private, too. Files of other users, links and everything else are ignored.

    A file is written under a temporary name and renamed, and its name holds a hash of its bytes, so truncated or
    altered files are not used. Therefore nothing is synced to disk: a file torn by a power cut is not served.

    Args:
        path: created if missing.

    Raises:
        OSError: the folder cannot be created or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._serial = count()
        self._warned = False
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=0o700)
            path.chmod(0o700)  # the umask may have taken permissions from the owner
        except FileExistsError:
            self._make_private()

    def _make_private(self) -> None:
        mode = self.path.stat()
        if not mode.st_mode & 0o077:
            return
        is_ours = mode.st_uid == os.geteuid() and not mode.st_mode & stat.S_ISVTX
        if is_ours and all(NAME.fullmatch(name) or TEMPORARY.fullmatch(name) for name in os.listdir(self.path)):
            self.path.chmod(stat.S_IMODE(mode.st_mode) & ~0o077)
            text = f"{self.path} was accessible to other users; now only its owner can access it"
        else:
            text = f"{self.path} is accessible to other users; the files written there are not"
        warnings.warn(f"mlx_paged: {text}", SpillWarning, stacklevel=5)

    def blocks(self) -> list[SpilledBlock]:
        """Return the blocks in the folder, least recently used first. Temporary files, which another process may be
        writing, are deleted after an hour."""
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
        """Return when the file was written or last used, in ns, and its block. Makes the file private."""
        # Follows no link, and does not wait for the writer of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or not NAME.fullmatch(path.name):
                raise ValueError("not a prefix file of this user")
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
            raise ValueError("a file of states must not have blocks")
        if len(starts) != len(geometry) or not all(0 <= start <= len(tokens) for start in starts):
            raise ValueError("starts and geometry of its groups do not match")
        return status.st_mtime_ns, SpilledBlock(path, tokens, starts, geometry, status.st_size, is_states)

    def write(self, block: SpilledBlock, data: memoryview) -> SpilledBlock:
        """Write the file of a block, made by :func:`packed`, and return the block with its path and size. Uses no MLX,
        so that any thread may call it.

        Raises:
            OSError: the file cannot be written; no part of it is left.
        """
        temporary = self.path / f".{os.getpid()}-{next(self._serial)}.safetensors"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            temporary.unlink(missing_ok=True)  # left by an earlier process with this id
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

        Raises (any type of error): the file is not what was written.
        """
        self._check_digest(block)
        loaded: Any = mx.load(str(block.path), return_metadata=True)
        arrays, metadata = loaded
        mx.eval(list(arrays.values()))
        return SavedStates(metadata["states"], arrays)

    def _check_digest(self, block: SpilledBlock) -> None:
        if not block.path.stem.endswith("-" + _digest(block.path.read_bytes())):
            raise ValueError("its contents do not match the digest in its name")

    def load(self, block: SpilledBlock, layers: list[tuple[int, ...]]) -> dict[str, mx.array]:
        """Return the block's keys and values: ``k<layer>`` and ``v<layer>``, each ``[1, heads, tokens - start,
        head_dim]``; the last dimension of quantised pages is uint32 words of a row.

        Args:
            block: from :meth:`blocks` or :meth:`write`.
            layers: layers of each group.

        Raises (any type of error): the file is not what was written, or does not hold what it says.
        """
        self._check_digest(block)
        arrays = mx.load(str(block.path))
        assert isinstance(arrays, dict)
        for name, shape, dtype in _expected(block, layers):
            if name not in arrays or arrays[name].shape != shape or str(arrays[name].dtype) != dtype:
                raise ValueError(f"{name} is missing, or not {dtype} {shape}")
        mx.eval(list(arrays.values()))
        return arrays

    def delete(self, block: SpilledBlock) -> None:
        """Delete the block's file; a failure only warns."""
        try:
            block.path.unlink(missing_ok=True)
        except OSError as error:
            self.warn(f"{block.path} could not be deleted: {error}")

    def warn(self, text: str) -> None:
        """Warn, at most once per folder."""
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


def block_geometry_of(geometry: Geometry | None) -> BlockGeometry:
    """Return a geometry in the form that files hold."""
    if geometry is None:
        return None
    page_format = None if geometry.format is None else tuple(geometry.format)
    return geometry.num_kv_heads, geometry.k_head_dim, geometry.v_head_dim, str(geometry.dtype), page_format


def geometry_of(geometry: BlockGeometry) -> Geometry:
    """Return the geometry that a file describes. Raises any type of error if it is not valid."""
    if geometry is None:
        raise ValueError("a block has no geometry")
    heads, k_dim, v_dim, dtype, page_format = geometry
    return Geometry(heads, k_dim, v_dim, DTYPES[dtype], None if page_format is None else PageFormat._make(page_format))


def _geometry(
    heads: int, k_dim: int, v_dim: int, dtype: str, page_format: list[int] | None = None
) -> tuple[int, int, int, str, tuple[int, ...] | None]:
    return int(heads), int(k_dim), int(v_dim), str(dtype), None if page_format is None else tuple(map(int, page_format))


def _expected(block: SpilledBlock, layers: list[tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and dtype of each array that a block must hold."""
    for own, start, geometry in zip(layers, block.starts, block.geometry, strict=True):
        if start == len(block.tokens):
            continue
        heads, k_dim, v_dim, dtype, _ = geometry_of(geometry).stored
        for layer in own:
            for name, dim in (("k", k_dim), ("v", v_dim)):
                yield f"{name}{layer}", (1, heads, len(block.tokens) - start, dim), str(dtype)
