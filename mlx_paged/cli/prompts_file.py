"""``--prompts-file``: answer the requests of a file with the server's engine, in this process.

The module needs the server's packages.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx

from ..errors import PromptsFileError
from ..ranks.ranks import Ranks
from ..server.answers import Answers, Head
from ..server.engine_thread import EngineThread
from ..server.errors import RequestRefused, invalid, refusal_of
from ..server.http import in_worker, json_object, validated
from ..server.loaded_models import LoadedModels
from ..server.options import ServerConfig
from ..server.ranked_engine import check_for_ranks, make_engine
from ..server.report import ServerStats
from ..server.request import Constraint, ServerRequest, Work
from ..server.requests.chat import CHAT, COMPLETIONS
from ..server.requests.fields import NO_EFFECT, REFUSED
from .over_ranks import from_rank_0
from .terminal import bar, plural, print_stats, rate

PROGRESS = "[{bar:30}] {n_fmt}/{total_fmt} prompts, {remaining} left"
QUEUED_PER_ROW = 2  # requests per row that wait for the engine, besides the one that runs


def run_prompts_file(args: argparse.Namespace, constraint: Constraint | None, ranks: Ranks | None = None) -> int:
    """Answer every prompt of the file.

    Args:
        args: the parsed command line.
        constraint: constraint on answers of lines that have none, or None.
        ranks: the ranks that compute the run, or None; rank 0 reads the prompts and writes the results.

    Returns:
        The number of prompts that failed.

    Raises:
        PagedCacheError: the prompts or the results file cannot be used (checked before the model is loaded), the model
            cannot be loaded, or a result cannot be written.
        KeyboardInterrupt: interrupted; finished results are written.
    """
    if ranks is not None and ranks.rank > 0:
        engine = engine_for(args, ranks)
        engine.start(is_watched=False)
        engine.thread.join()
        if engine.start_error is not None:
            raise engine.start_error
        return from_rank_0(ranks, int)
    lines = read_lines(args.prompts_file)
    path = None if args.output is None else Path(args.output)
    with closing(Results(lines, path, sys.stdout, resume=args.resume)) as results:
        run = BatchRun(args, engine_for(args, ranks), results, constraint, is_ranked=ranks is not None)
        asyncio.run(run.run())
    return from_rank_0(ranks, lambda: results.num_failed)


def engine_for(args: argparse.Namespace, ranks: Ranks | None) -> EngineThread:
    """Return an engine thread for the model of a command line; it has not started."""
    model = args.model or importlib.import_module("mlx_lm.generate").DEFAULT_MODEL
    args = argparse.Namespace(
        **vars(args)
        | {
            "model": model,
            "models": [model],
            "chat_template": None,
            "chat_template_args": json.loads(args.chat_template_config or "{}"),
            "decode_concurrency": args.batch_size,
            "prompt_concurrency": min(8, args.batch_size),
            "prompt_cache_size": args.batch_size,  # prefixes that later prompts may begin with
            "prompt_cache_bytes": None,
        }
    )
    return make_engine(LoadedModels(args, ServerConfig(mtp=args.mtp), ranks), ServerStats())


class BatchRun:
    """A run that gives requests to an engine and writes their results. If one fails, its result is the error.

    Args:
        args: the parsed command line.
        engine: the engine, which has not started.
        results: where results are written.
        constraint: constraint on answers of lines that have none, or None.
        is_ranked: whether several ranks compute the run.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        engine: EngineThread,
        results: Results,
        constraint: Constraint | None,
        *,
        is_ranked: bool = False,
    ) -> None:
        self._args, self._engine, self._results, self._constraint = args, engine, results, constraint
        self._is_ranked = is_ranked
        self._slots = asyncio.Semaphore((1 + QUEUED_PER_ROW) * args.batch_size)
        names = ("top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold")
        self._defaults = {"temperature": args.temp} | {name: getattr(args, name) for name in names}

    async def run(self) -> None:
        """Compute until every prompt has a result. Raises the error if the model cannot be loaded."""
        engine = self._engine
        engine.start(is_watched=False)
        try:
            try:
                texts = await engine.texts_for(None)
            except RequestRefused as refusal:
                raise engine.start_error or refusal from None
            for token in self._args.extra_eos_token:
                texts.tokenizer.add_eos_token(token)
            begin, results = time.monotonic(), self._results
            with bar(results.num_lines, PROGRESS, initial=results.num_done) as progress:
                async with asyncio.TaskGroup() as group:
                    for line in results.missing:
                        await self._slots.acquire()
                        group.create_task(self._answer(line, texts)).add_done_callback(lambda _: progress.update())
            self._report(time.monotonic() - begin)
        except ExceptionGroup as failed:  # a result cannot be written
            raise failed.exceptions[0] from None
        finally:
            engine.stop(None)

    async def _answer(self, line: Line, texts: Any) -> None:
        try:
            fields = {"error": line.error} if line.error is not None else await self._result_of(line, texts)
        except RequestRefused as refusal:
            fields = {"error": str(refusal)}
        finally:
            self._slots.release()
        self._results.add(line, **fields)

    async def _result_of(self, line: Line, texts: Any) -> dict[str, Any]:
        """Return the fields of a line's result. Raises RequestRefused."""
        self._engine.check()
        work: Work | None = None
        try:
            request, form = await in_worker(lambda: self._request_of(line, texts))
            await asyncio.to_thread(texts.constrain, request)
            answers = Answers(request, texts, form)
            work = self._engine.submit(Work(request, texts.key, asyncio.get_running_loop()))
            while not answers.are_over:
                answers.add(await work.receive())
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise refusal_of(error) from None
        finally:
            if work is not None:
                work.close()
        whole, usage = answers.whole(), answers.usage()
        (choice,) = whole["choices"]
        message = choice.get("message") or {"content": choice["text"]}
        more = {name: value for name, value in message.items() if name not in ("role", "content")}
        if choice.get("logprobs") is not None:
            more["logprobs"] = choice["logprobs"]
        return {
            "text": message["content"] or "",
            **more,
            "finish_reason": choice["finish_reason"],
            "prompt_tokens": usage.prompt,
            "generation_tokens": usage.completion,
        }

    def _request_of(self, line: Line, texts: Any) -> tuple[ServerRequest, Any]:
        """Return the request of a line with its prompts, and the form of the answer. Raises RequestRefused."""
        args = self._args
        given = line.body if line.text is None else body_of_text(line.text, args, texts.tokenizer)
        given = {name: value for name, value in given.items() if value is not None and name != "model"}
        endpoint = CHAT if "messages" in given else COMPLETIONS
        if unknown := sorted(given.keys() - {*endpoint.body.model_fields, *NO_EFFECT, *REFUSED}):
            raise invalid(f"{', '.join(map(repr, unknown))}: unknown parameter")
        for name in given.keys() & {"adapters", "draft_model"}:
            raise invalid(f"{name} is an option of the command line")
        body, _ = validated(given, endpoint.body)
        if (body.n or 1) > 1 or not isinstance(given.get("prompt", ""), str):
            raise invalid("a line has one prompt and one answer: n must be 1")
        if body.num_draft_tokens is not None and args.draft_model is None and not args.mtp:
            raise invalid("num_draft_tokens requires --draft-model or --mtp")
        request = endpoint.request(body, self._defaults)
        request.constraint = request.constraint or self._constraint
        if args.seed is not None and request.sampling.seed is None and request.sampling.temperature:
            request.sampling = replace(request.sampling, seed=args.seed + line.index)
        if self._is_ranked:
            check_for_ranks(request)
        texts.complete(request, args.max_tokens)
        body.stream_options = None
        return request, endpoint.form(Head("", "", 0, ""), body)

    def _report(self, seconds: float) -> None:
        """Print what was done, with ``--verbose``, and the pool's statistics, with ``--cache-stats``."""
        args, figures, pool = self._args, self._engine.stats.as_dict(), self._engine.models.pool
        stats = None if pool is None else pool.stats()
        if args.verbose:
            done, number = plural(self._results.num_done, "prompt"), figures["generated_tokens"]
            text = f"{done}: {plural(figures['prompt_tokens'], 'prompt token')}, {number:,} generated"
            memory = f"peak memory {mx.get_peak_memory() / 1e9:.3f} GB"
            print(f"{text}, {rate(number, seconds)}, {memory}", file=sys.stderr)
            if stats is not None and stats.drafted_tokens:
                print(f"accepted {stats.accepted_tokens} of {stats.drafted_tokens} drafts", file=sys.stderr)
        if args.cache_stats:
            print_stats({"KV cache": pool})


def body_of_text(text: str, args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Return the body of a request for a line of plain text."""
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return {"prompt": text}
    said = (("system", args.system_prompt), ("user", text), ("assistant", args.prefill_response))
    messages = [{"role": role, "content": content} for role, content in said if content is not None]
    return {"messages": messages, "continue_final_message": args.prefill_response is not None}


# Reading ------------------------------------------------------------------------------------------------------------


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

    A file is JSONL if its name ends in ``.jsonl`` or its first line that is not empty begins with ``{``; otherwise each
    line is a user's message. An object is the body of a request with ``custom_id`` or
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
    is_jsonl = name.endswith(".jsonl") or contents[0][1].lstrip().startswith(b"{")
    parse = _from_object if is_jsonl else _from_text
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


def _from_text(index: int, line: bytes) -> Line:
    try:
        return Line(index, line.decode())
    except UnicodeDecodeError:
        raise invalid("it is not UTF-8 text") from None


def _from_object(index: int, line: bytes) -> Line:
    given = json_object(line, "it")
    ids = [value for name in ("custom_id", "id") if (value := given.pop(name, None)) is not None]
    if any(type(each) not in (str, int) for each in ids):
        raise invalid("an id must be a string or an integer")
    body = given.get("body", given)
    if not isinstance(body, dict):
        raise invalid("'body' must be an object")
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise invalid("exactly one of 'prompt' and 'messages' is required")
    return Line(index, None, body, ids[0] if ids else None)


# Writing ------------------------------------------------------------------------------------------------------------


class Results:
    """The results of a run, written as they come.

    Args:
        lines: all lines of the prompts file.
        path: the output file, or None.
        stream: where results are written if there is no path.
        resume: keep the results that an earlier run has left in the file, except errors.

    Attributes:
        missing: lines without a result.
        num_lines, num_done, num_failed: numbers of lines in all, with a result, and with an error as the result.

    Raises:
        PromptsFileError: the file exists and ``resume`` is not set, it has a result of no line, or it cannot be read or
            written.
    """

    def __init__(self, lines: list[Line], path: Path | None, stream: TextIO, *, resume: bool = False) -> None:
        self.missing = lines
        self.num_lines, self.num_done, self.num_failed = len(lines), 0, 0
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
                try:
                    record = json_object(raw, "the result")
                except RequestRefused:  # it was cut off
                    continue
                if (name := _name(record)) not in known:
                    raise PromptsFileError(f"{path} is from another run: no prompt has the {name[0]} {name[1]!r}")
                if "error" not in record:
                    kept[name] = raw.rstrip() + b"\n"  # the last one may lack its end
            _replace(path, kept.values())
            self.missing = [line for name, line in known.items() if name not in kept]
            self.num_done = len(kept)
        return path.open("a", encoding="utf-8")

    def add(self, line: Line, **fields: Any) -> None:
        """Write a line's result. Raises PromptsFileError if it cannot be written."""
        with _explained(self._path or "stdout"):
            self._stream.write(json.dumps(line.names | fields, ensure_ascii=False) + "\n")
            self._stream.flush()
        self.num_done += 1
        self.num_failed += "error" in fields

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
