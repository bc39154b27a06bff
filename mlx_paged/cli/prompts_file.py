"""Files of prompts, and the files of their results."""

from __future__ import annotations

import hashlib
import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


JOURNAL_SUFFIX = ".partial"
# Fields of a line that do not go to ``Prompt.sampling``.
KEYS = frozenset({"prompt", "messages", "id", "max_tokens", "max_completion_tokens", "n"})


@dataclass(frozen=True)
class Prompt:
    """One request of a prompts file.

    Attributes:
        index: position among the file's prompts, from 0.
        text: the prompt, or None if ``messages`` are given.
        messages: a chat.
        max_tokens: limit for this prompt's answer, or None.
        id: what the file calls it, or None.
        sampling: options of this prompt alone, by their names in the server's API.
        error: why the line cannot be used, or None. With an error, only ``index`` is set.
    """

    index: int
    text: str | None
    messages: tuple[dict[str, Any], ...] | None = None
    max_tokens: int | None = None
    id: Any = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def digest(self) -> str:
        """Hash that identifies the prompt and its options when an interrupted run is resumed."""
        identity: list[Any] = [self.text, self.messages, self.max_tokens]
        if self.sampling:
            identity.append(dict(self.sampling))
        content = json.dumps(identity, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_prompts(lines: Iterable[bytes], name: str) -> list[Prompt]:
    """Return the prompts of a file, which has one per line: JSONL or plain text.

    A file is JSONL if its name ends in ``.jsonl``, or if its first non-empty line begins with ``{`` and any line is a
    JSON object. An object has ``prompt`` (a text) or ``messages`` (a chat), and may have the other fields of
    :class:`.prompt_line.PromptLine`. An unusable line becomes a prompt with an error. Empty lines are skipped.

    Args:
        lines: the file's lines.
        name: the file's name.

    Raises:
        PromptsFileError: the file has no prompt.
    """
    numbered = ((number, line.removeprefix(BOM_UTF8).rstrip(b"\r\n")) for number, line in enumerate(lines, 1))
    contents = [(number, line) for number, line in numbered if line.strip()]
    if not contents:
        raise PromptsFileError(f"{name} holds no prompt")
    read = _from_object if _is_jsonl(name, [line for _, line in contents]) else _from_text
    prompts = []
    for index, (number, line) in enumerate(contents):
        try:
            prompts.append(read(index, line))
        except RequestRefused as error:
            prompts.append(Prompt(index, None, error=f"line {number}: {error}"))
    return prompts


def _is_jsonl(name: str, lines: Sequence[bytes]) -> bool:
    if name.endswith(".jsonl"):
        return True
    return lines[0].lstrip().startswith(b"{") and any(_object_of(line) is not None for line in lines)


def _object_of(line: bytes) -> dict[str, Any] | None:
    try:
        return load_object(line, "the line")
    except RequestRefused:
        return None


def _from_text(index: int, line: bytes) -> Prompt:
    try:
        return Prompt(index, line.decode())
    except UnicodeDecodeError:
        raise invalid("it is not UTF-8 text") from None


def _from_object(index: int, line: bytes) -> Prompt:
    from .prompt_line import checked  # needs pydantic, plain text does not

    values = checked(load_object(line, "it"))
    messages, most = values.get("messages"), values.get("max_completion_tokens", values.get("max_tokens"))
    sampling = {name: value for name, value in values.items() if name not in KEYS}
    return Prompt(
        index, values.get("prompt"), None if messages is None else tuple(messages), most, values.get("id"), sampling
    )


class Counts(NamedTuple):
    """Counts of a run so far."""

    done: int
    total: int
    failed: int


class LinesFile:
    """A JSONL file that grows by whole lines: a line that cannot be written completely is removed again.

    Args:
        path: the file, which is created if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, record: dict[str, Any]) -> None:
        """Write a line.

        Raises:
            OSError: the line cannot be written; the file is as it was before.
        """
        line = memoryview(_line_of(record).encode())
        end = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Results:
    """The results of a run. Each is written once all before it are, so that the output is always in prompt order.

    With a file, a result that is ready early goes to a journal beside it, ``FILE.partial``, so that an interrupted run
    loses no finished result; the journal is deleted when the last result is written.

    Args:
        prompts: all prompts of the run.
        path: the output file, or None.
        stream: where results are written if there is no path.
        resume: keep the results that an earlier run has left in the file and its journal.

    Raises:
        PromptsFileError: the file exists and ``resume`` is not set, it holds other prompts' results, or it cannot be
            read or written.
    """

    def __init__(self, prompts: list[Prompt], path: Path | None, stream: TextIO, *, resume: bool = False) -> None:
        self.prompts = prompts
        self.failed = 0
        self._ready: dict[int, dict[str, Any]] = {}
        self._next = 0
        self._output: LinesFile | None = None
        self._journal: LinesFile | None = None
        self._path = path
        self._stream = stream
        if path is not None:
            with _explained(path):
                self._open(path, resume)

    def _open(self, path: Path, resume: bool) -> None:
        journal = path.with_name(path.name + JOURNAL_SUFFIX)
        if not path.parent.is_dir():
            raise PromptsFileError(f"folder {path.parent} for the results does not exist")
        if not resume and (path.exists() or journal.exists()):
            raise PromptsFileError(f"{path} exists: continue it with --resume, or choose another name")
        for record in (*_records(path), *_records(journal)):
            self._check(record, path)
            if "error" not in record:  # failed prompts are tried again
                self._ready[record["index"]] = record
        # The journal is complete before the output is cut back to the results before the first gap, so that an
        # interruption here loses none.
        _replace(journal, self._ready.values())
        written = []
        while self._next in self._ready:
            written.append(self._ready.pop(self._next))
            self._next += 1
        _replace(path, written)
        self._output, self._journal = LinesFile(path), LinesFile(journal)

    def _check(self, record: dict[str, Any], path: Path) -> None:
        index = record.get("index")
        if not isinstance(index, int) or not 0 <= index < len(self.prompts):
            raise PromptsFileError(
                f"{path} is from another run: it has a result with index {index} for {len(self.prompts)} prompts"
            )
        if "error" in record:  # the user may have fixed the line since
            return
        if record.get("prompt_sha256") != self.prompts[index].digest:
            raise PromptsFileError(f"{path} is from another run: its result with index {index} is of another prompt")

    def missing(self) -> Iterator[Prompt]:
        """Yield the prompts that have no result yet."""
        done = set(self._ready)
        return (prompt for prompt in self.prompts[self._next :] if prompt.index not in done)

    @property
    def counts(self) -> Counts:
        """Numbers of prompts done, in all, and failed."""
        return Counts(self._next + len(self._ready), len(self.prompts), self.failed)

    def add(self, prompt: Prompt, **fields: Any) -> None:
        """Write a prompt's result now, or once those before it are written.

        Raises:
            PromptsFileError: it cannot be written.
        """
        record: dict[str, Any] = {"index": prompt.index}
        if prompt.id is not None:
            record["id"] = prompt.id
        self._ready[prompt.index] = record | fields | {"prompt_sha256": prompt.digest}
        with _explained(self._path or "stdout"):
            if prompt.index == self._next:
                while self._next in self._ready:
                    self._write(self._ready[self._next])
                    del self._ready[self._next]
                    self._next += 1
            elif self._journal is not None:
                self._journal.append(self._ready[prompt.index])

    def _write(self, record: dict[str, Any]) -> None:
        if self._output is not None:
            self._output.append(record)
        else:
            self._stream.write(_line_of(record))
            self._stream.flush()
        self.failed += "error" in record

    def close(self) -> None:
        """Close the files, and delete the journal if all results are written."""
        if self._path is None or self._output is None or self._journal is None:
            return
        self._output.close()
        self._journal.close()
        if self._next == len(self.prompts):
            self._path.with_name(self._path.name + JOURNAL_SUFFIX).unlink()


@contextmanager
def _explained(path: Path | str) -> Iterator[None]:
    """Turn errors of the file system into one PromptsFileError."""
    try:
        yield
    except BrokenPipeError:  # the reader of stdout has closed it
        raise
    except (OSError, UnicodeError) as error:
        raise PromptsFileError(f"cannot write results to {path}: {error}") from None


def _line_of(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _replace(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace ``path`` atomically by a file with these lines."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("w", encoding="utf-8") as out:
            out.writelines(map(_line_of, records))
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the records in the complete lines of a results file; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [record for line in lines if line.endswith(b"\n") and (record := _object_of(line)) is not None]
