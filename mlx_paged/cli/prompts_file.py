"""Files of prompts, and the files of their results."""

from __future__ import annotations

import json
import sys
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..errors import PromptsFileError
from ..server.errors import RequestRefused, invalid


def load_object(raw: bytes, what: str) -> dict[str, Any]:
    """Return a JSON object from UTF-8 text.

    Args:
        raw: the text.
        what: name of the text in error messages.

    Raises:
        RequestRefused: the text is not a JSON object.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        body = json.loads(raw.decode(), parse_constant=refuse)
        json.dumps(body, ensure_ascii=False).encode()  # refuses lone surrogates (escapes), which no tokenizer takes
    except UnicodeError:
        raise invalid(f"{what} is not UTF-8 text") from None
    except RecursionError:
        raise invalid(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise invalid(f"{what} is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise invalid(f"{what} must be a JSON object")
    return body


@dataclass(frozen=True)
class Line:
    """One line of a prompts file.

    Attributes:
        index: position among the file's prompts, from 0.
        text: the line, if the file is plain text.
        body: body of a request to ``/v1/chat/completions`` (``messages``) or ``/v1/completions`` (``prompt``).
        id: the line's ``custom_id`` or ``id``, a string or an integer; None: it has none.
        error: why the line cannot be used; None: it can.
    """

    index: int
    text: str | None = None
    body: dict[str, Any] = field(default_factory=dict)
    id: str | int | None = None
    error: str | None = None

    @property
    def names(self) -> dict[str, Any]:
        """Return the fields of a result that say which line it is of."""
        return {"index": self.index} | ({} if self.id is None else {"id": self.id})


def read_lines(name: str) -> list[Line]:
    """Return the lines of a file ("-": of stdin), as :func:`parse_lines` does.

    Raises:
        PromptsFileError: the file cannot be read or used.
    """
    if name == "-":
        return parse_lines(sys.stdin.buffer, "stdin")
    try:
        with Path(name).expanduser().open("rb") as lines:
            return parse_lines(lines, name)
    except OSError as error:
        raise PromptsFileError(f"{name} cannot be read: {error}") from None


def parse_lines(lines: Iterable[bytes], name: str) -> list[Line]:
    """Return the lines of a file that are not empty. An unusable line becomes one with an error.

    A file is JSONL if its name ends in ``.jsonl``, or if its first non-empty line begins with ``{`` and any line is a
    JSON object; otherwise each line is a user's message. An object is the body of a request with ``custom_id`` or
    ``id`` in it, or, as in OpenAI's batches, an object with ``custom_id`` and ``body``.

    Args:
        lines: the file's lines.
        name: the file's name.

    Raises:
        PromptsFileError: the file has no prompt, or two lines have the same id.
    """
    numbered = ((number, line.removeprefix(BOM_UTF8).rstrip(b"\r\n")) for number, line in enumerate(lines, 1))
    contents = [(number, line) for number, line in numbered if line.strip()]
    if not contents:
        raise PromptsFileError(f"{name} holds no prompt")
    parse = _from_object if _is_jsonl(name, [line for _, line in contents]) else _from_text
    parsed = []
    for index, (number, line) in enumerate(contents):
        try:
            parsed.append(parse(index, line))
        except RequestRefused as error:
            parsed.append(Line(index, error=f"line {number}: {error}"))
    seen: dict[str | int, int] = {}
    for (number, _), each in zip(contents, parsed, strict=True):
        if each.id is not None and seen.setdefault(each.id, number) != number:
            raise PromptsFileError(f"{name}: lines {seen[each.id]} and {number} have the same id {each.id!r}")
    return parsed


def _is_jsonl(name: str, lines: Sequence[bytes]) -> bool:
    if name.endswith(".jsonl"):
        return True
    return lines[0].lstrip().startswith(b"{") and any(_object_of(line) is not None for line in lines)


def _object_of(line: bytes) -> dict[str, Any] | None:
    try:
        return load_object(line, "the line")
    except RequestRefused:
        return None


def _from_text(index: int, line: bytes) -> Line:
    try:
        return Line(index, line.decode())
    except UnicodeDecodeError:
        raise invalid("it is not UTF-8 text") from None


def _from_object(index: int, line: bytes) -> Line:
    given = load_object(line, "it")
    ids = [value for name in ("custom_id", "id") if (value := given.pop(name, None)) is not None]
    if any(type(each) not in (str, int) for each in ids):
        raise invalid("an id must be a string or an integer")
    body = given.get("body", given)
    if not isinstance(body, dict):
        raise invalid("'body' must be an object")
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise invalid("exactly one of 'prompt' and 'messages' is required")
    return Line(index, None, body, ids[0] if ids else None)


class Counts(NamedTuple):
    """Counts of a run so far."""

    done: int
    total: int
    failed: int


class Results:
    """The results of a run, written as they come.

    Args:
        lines: all lines of the prompts file.
        path: the output file, or None.
        stream: where results are written if there is no path.
        resume: keep the results that an earlier run has left in the file, except errors.

    Attributes:
        missing: lines without a result.

    Raises:
        PromptsFileError: the file exists and ``resume`` is not set, it has a result of no line, or it cannot be read or
            written.
    """

    def __init__(self, lines: list[Line], path: Path | None, stream: TextIO, *, resume: bool = False) -> None:
        self.missing = lines
        self._num_lines, self._num_done, self._num_failed = len(lines), 0, 0
        self._path, self._stream = path, stream
        if path is not None:
            with _explained(path):
                self._stream = self._opened(path, lines, resume)

    def _opened(self, path: Path, lines: list[Line], resume: bool) -> TextIO:
        if not path.parent.is_dir():
            raise PromptsFileError(f"folder {path.parent} for the results does not exist")
        if path.exists():
            if not resume:
                raise PromptsFileError(f"{path} exists: continue it with --resume, or choose another name")
            known = {_name(line.names): line for line in lines}
            kept: dict[tuple[str, Any], bytes] = {}
            for raw in path.read_bytes().splitlines(keepends=True):
                record = _object_of(raw) if raw.endswith(b"\n") else None
                if record is None:  # the last one was cut off
                    continue
                if (name := _name(record)) not in known:
                    raise PromptsFileError(f"{path} is from another run: no prompt has the {name[0]} {name[1]!r}")
                if "error" not in record:
                    kept[name] = raw
            _replace(path, kept.values())
            self.missing = [line for name, line in known.items() if name not in kept]
            self._num_done = len(kept)
        return path.open("a", encoding="utf-8")

    @property
    def counts(self) -> Counts:
        """Numbers of prompts done, in all, and failed."""
        return Counts(self._num_done, self._num_lines, self._num_failed)

    def add(self, line: Line, **fields: Any) -> None:
        """Write a line's result. Raises PromptsFileError if it cannot be written."""
        with _explained(self._path or "stdout"):
            self._stream.write(json.dumps(line.names | fields, ensure_ascii=False) + "\n")
            self._stream.flush()
        self._num_done += 1
        self._num_failed += "error" in fields

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._path is not None:
            with suppress(OSError):  # what could not be written before cannot be written now
                self._stream.close()


def _name(record: dict[str, Any]) -> tuple[str, Any]:
    """Return what a result says of its line: the id, or else the index."""
    return ("id", record["id"]) if "id" in record else ("index", record.get("index"))


@contextmanager
def _explained(path: Path | str) -> Iterator[None]:
    """Turn errors of the file system into one PromptsFileError."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise PromptsFileError(f"cannot write results to {path}: {error}") from None


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """Replace ``path`` atomically by a file with these lines."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as out:
            out.writelines(lines)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
