"""Many prompts from a file, generated as one continuous batch, with results in JSONL."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from .errors import PromptsFileError

JOURNAL_SUFFIX = ".partial"


@dataclass(frozen=True)
class Prompt:
    """One request of a prompts file.

    Attributes:
        index: from 0, in the order of the file.
        text: the prompt, or None if ``messages`` are given.
        messages: a chat.
        max_tokens: of this prompt, or None.
        id: what the file calls it, or None.
    """

    index: int
    text: str | None
    messages: tuple[dict[str, Any], ...] | None = None
    max_tokens: int | None = None
    id: Any = None

    @property
    def digest(self) -> str:
        """What identifies the prompt when an interrupted run is resumed."""
        content = json.dumps([self.text, self.messages, self.max_tokens], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_prompts(lines: Iterable[str], name: str) -> list[Prompt]:
    """The prompts of a file: JSONL if its first line that is not empty is a JSON object, else one prompt a line.

    A JSON line holds ``prompt`` (a text) or ``messages`` (a chat), and may hold ``max_tokens`` and ``id``. Empty lines
    are skipped.

    Args:
        lines: of the file.
        name: of the file, for messages.

    Raises:
        PromptsFileError: a line is unusable, or there is no prompt; the message names file and line.
    """
    prompts: list[Prompt] = []
    is_json: bool | None = None
    for number, line in enumerate(lines, 1):
        content = line.rstrip("\r\n")
        if not content.strip():
            continue
        if is_json is None:
            is_json = _object_of(content) is not None
        if is_json:
            prompts.append(_from_object(len(prompts), _object_of(content), f"{name}, line {number}"))
        else:
            prompts.append(Prompt(len(prompts), content))
    if not prompts:
        raise PromptsFileError(f"{name} holds no prompt")
    return prompts


def _object_of(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _from_object(index: int, value: dict[str, Any] | None, where: str) -> Prompt:
    if value is None:
        raise PromptsFileError(f"{where}: not a JSON object, as the first prompt of the file is")
    text, messages, most = value.get("prompt"), value.get("messages"), value.get("max_tokens")
    if (text is None) == (messages is None):
        raise PromptsFileError(f'{where}: exactly one of "prompt" and "messages" is needed')
    if text is not None and not isinstance(text, str):
        raise PromptsFileError(f'{where}: "prompt" is not a text')
    if messages is not None and not (
        isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    ):
        raise PromptsFileError(f'{where}: "messages" is not a list of objects')
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise PromptsFileError(f'{where}: "max_tokens" is not a positive whole number')
    return Prompt(index, text, None if messages is None else tuple(messages), most, value.get("id"))


class Counts(NamedTuple):
    """Of a run so far."""

    done: int
    total: int
    failed: int


class Results:
    """Writes each result once all before it are written: the output is in the order of the prompts at any time.

    With a file, a result that is ready early goes to a journal beside it, ``FILE.partial``, so that an interrupted run
    has lost nothing that was complete; the journal goes when the last result is written.

    Args:
        prompts: all of them.
        path: the output file, or None.
        stream: where results go if there is no path.
        resume: take what a run before has left in the file and its journal.

    Raises:
        PromptsFileError: the file is there and ``resume`` is not asked for, or it holds other prompts' results.
    """

    def __init__(self, prompts: list[Prompt], path: Path | None, stream: TextIO, *, resume: bool = False) -> None:
        self.prompts = prompts
        self.failed = 0
        self._ready: dict[int, dict[str, Any]] = {}
        self._next = 0
        self._journal: TextIO | None = None
        self._path = path
        self._stream = stream
        if path is not None:
            self._open(path, resume)

    def _open(self, path: Path, resume: bool) -> None:
        journal = path.with_name(path.name + JOURNAL_SUFFIX)
        if not resume and (path.exists() or journal.exists()):
            raise PromptsFileError(f"{path} is there already: --resume goes on with it, or choose another name")
        for record in (*_records(path), *_records(journal)):
            self._check(record, path)
            if "error" not in record:  # what failed is tried again
                self._ready[record["index"]] = record
        # Nothing complete is lost if this run is interrupted here: the journal is whole before the output is cut back
        # to what comes before the first gap.
        _replace(journal, self._ready.values())
        written = []
        while self._next in self._ready:
            written.append(self._ready.pop(self._next))
            self._next += 1
        _replace(path, written)
        self._stream, self._journal = path.open("a"), journal.open("a")

    def _check(self, record: dict[str, Any], path: Path) -> None:
        index = record.get("index")
        if not isinstance(index, int) or not 0 <= index < len(self.prompts):
            raise PromptsFileError(f"{path} holds a result with index {index}, of {len(self.prompts)} prompts")
        if record.get("prompt_sha256") != self.prompts[index].digest:
            raise PromptsFileError(f"{path} holds the result of another prompt at index {index}: it is another run's")

    def missing(self) -> Iterator[Prompt]:
        """The prompts that have no result yet."""
        done = set(self._ready)
        return (prompt for prompt in self.prompts[self._next :] if prompt.index not in done)

    @property
    def counts(self) -> Counts:
        return Counts(self._next + len(self._ready), len(self.prompts), self.failed)

    def add(self, prompt: Prompt, **fields: Any) -> None:
        """A prompt's result: written now, or when those before it are there."""
        record: dict[str, Any] = {"index": prompt.index}
        if prompt.id is not None:
            record["id"] = prompt.id
        self._ready[prompt.index] = record | fields | {"prompt_sha256": prompt.digest}
        if prompt.index == self._next:
            while self._next in self._ready:
                self._write(self._stream, self._ready.pop(self._next))
        elif self._journal is not None:
            _write_line(self._journal, self._ready[prompt.index])

    def _write(self, out: TextIO, record: dict[str, Any]) -> None:
        self.failed += "error" in record
        _write_line(out, record)
        self._next += 1

    def close(self) -> None:
        """End of the run; the journal goes if everything is written."""
        if self._path is None:
            return
        self._stream.close()
        if self._journal is not None:
            self._journal.close()
            if self._next == len(self.prompts):
                self._path.with_name(self._path.name + JOURNAL_SUFFIX).unlink()


def _write_line(out: TextIO, record: dict[str, Any]) -> None:
    out.write(json.dumps(record, ensure_ascii=False) + "\n")
    out.flush()


def _replace(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Put a file with these lines in the place of ``path``, at once."""
    new = path.with_name(path.name + ".new")
    with new.open("w") as out:
        for record in records:
            _write_line(out, record)
    new.replace(path)


def _records(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a results file; none if it is not there."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [record for line in lines if line.endswith("\n") and (record := _object_of(line)) is not None]
