"""PromptMaker: makes prompts in processes of its own, so that nothing a client sends holds up the server."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..warn import warn_once
from .prompt_messages import MadePrompt, PromptJob, receive, send
from .refusal import RequestRefused, invalid, too_many_tokens

MakePrompt = Callable[[Any, dict[str, Any], PromptJob], MadePrompt]  # from a tokenizer, and arguments of its template
PROMPT_SECONDS = 20.0  # for one prompt
PROMPT_BYTES = 4 << 30  # of memory
LARGE_BYTES = 256 << 10  # of a request
MOST_BYTES = 256 << 20  # of all requests whose prompts are being made or wait for it
POLL_SECONDS = 0.25


class PromptSetup:
    """A model's tokenizer, as processes take it.

    Args:
        key: of the model.
        tokenizer: mlx-lm's wrapper.
        chat_template_args: of the command line.
        grammars: makes the grammars of answers.
        has_processor: whether the model takes images.
        capacity: most tokens of a request; None: any number.
    """

    def __init__(
        self,
        key: Hashable,
        tokenizer: Any,
        chat_template_args: dict[str, Any],
        *,
        grammars: Any = None,
        has_processor: bool = False,
        capacity: int | None = None,
    ) -> None:
        self.key = key
        self.grammars = grammars
        self.capacity = capacity
        self.tokenizer, self.chat_template_args = tokenizer, chat_template_args
        self.has_processor = has_processor
        self.payload: bytes | None = None
        try:
            self.payload = pickle.dumps(("tokenizer", (tokenizer, chat_template_args)))
        except Exception as error:
            warn_once(
                f"the tokenizer cannot be sent to another process ({type(error).__name__}: {error}): prompts are "
                "made in the server's own, one at a time and without limits of time and memory"
            )


class PromptProcess:
    """One process, started when it is first needed and again after it had to be ended. For one thread at a time."""

    def __init__(self, module: str, seconds: float, num_bytes: int) -> None:
        self._module = module
        self._limits = seconds, num_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._setup: PromptSetup | None = None
        self.is_closed = False

    def start(self) -> None:
        """Begin to start it; it is ready when it answers. Raises RequestRefused: it was closed for good."""
        if self.is_closed:
            raise RequestRefused(503, "the server is shutting down", retry_after=5)
        if self._process is not None and self._process.poll() is None:
            return
        command = [sys.executable, "-m", self._module, *(str(limit) for limit in self._limits)]
        path = os.pathsep.join(filter(None, sys.path))
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
        env = {**os.environ, **quiet, "PYTHONPATH": path}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._setup = None

    @property
    def is_ready(self) -> bool:
        """Whether it has been started and has answered."""
        return self._setup is not None and self._process is not None

    def learn(self, setup: PromptSetup) -> None:
        """Give it the tokenizer, unless it has it."""
        assert setup.payload is not None
        self.start()
        if self._setup is not setup:
            self._ask(setup.payload)
            self._setup = setup

    def make(self, setup: PromptSetup, job: bytes) -> MadePrompt:
        """Raises RequestRefused: of the prompt's fault, or because it takes too long or too much memory."""
        self.learn(setup)
        kind, *answer = self._ask(job)
        if kind == "made":
            made: MadePrompt = answer[0]
            return made
        if kind == "refused":
            status, message, refused_as, param = answer
            raise RequestRefused(status, message, kind=refused_as, param=param)
        raise invalid(f"the prompt cannot be made: {answer[0]}")

    def _ask(self, payload: bytes) -> tuple[Any, ...]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin, payload)  # type: ignore[arg-type]
            answer: tuple[Any, ...] = pickle.loads(receive(process.stdout))  # type: ignore[arg-type]
            return answer
        except (OSError, EOFError):
            status = process.wait()
            self._end()
            self.start()  # in the background, for the next one
            if status == -signal.SIGALRM:
                raise invalid(f"the prompt was not made within {self._limits[0]:g} s") from None
            logging.warning("the process that makes prompts has ended with status %s", status)
            raise invalid("the prompt cannot be made within the memory that there is for one") from None

    def _end(self) -> None:
        process, self._process, self._setup = self._process, None, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what was not sent
                        pipe.close()

    def close(self) -> None:
        """End it; a prompt that is being made fails. By any thread."""
        self.is_closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()


class PromptMaker:
    """Makes prompts for the threads of clients, each of which waits for its own.

    What is bounded: the time and the memory of a prompt, and how many are made at a time. There are two processes. One
    is for small requests; the other one, started when it is first needed, for large ones, and for small ones while the
    first is busy. So a template that never ends, or a text of millions of tokens, costs a process some seconds.

    Args:
        make_prompt: for tokenizers that cannot be sent to another process.
        module: run in a process of its own with the two limits as arguments, it does the same with what it is sent.
        seconds, num_bytes: for one prompt.
        allow_template: whether clients may bring their own chat templates.

    Attributes:
        num_waiting: requests whose turn has not come.
    """

    def __init__(
        self,
        make_prompt: MakePrompt,
        module: str,
        *,
        seconds: float = PROMPT_SECONDS,
        num_bytes: int = PROMPT_BYTES,
        allow_template: bool = False,
    ) -> None:
        self._make_prompt = make_prompt
        self.allow_template = allow_template
        self.num_waiting = 0
        self._here = threading.Lock()  # for prompts that cannot be made elsewhere
        self._changed = threading.Condition()
        self._for_small, self._for_large = (PromptProcess(module, seconds, num_bytes) for _ in range(2))
        self._busy: list[PromptProcess] = []
        self._num_bytes = 0

    def start(self) -> None:
        """Begin to start a process, for the first prompt."""
        self._for_small.start()

    def learn(self, setup: PromptSetup) -> None:
        """Return when a process is ready for a model's prompts."""
        if setup.payload is not None:
            with self._process(is_large=False) as process:
                process.learn(setup)

    def make(
        self,
        setup: PromptSetup,
        request: Any,
        template_kwargs: dict[str, Any] | None,
        most_tokens: int | None,
        *,
        has_images: bool = False,
        client_is_gone: Callable[[], bool] = lambda: False,
    ) -> MadePrompt:
        """The prompt of a request.

        Args:
            setup: of the request's model.
            request: mlx-lm's CompletionRequest, and its prompt if that has been made.
            template_kwargs: those of the request.
            most_tokens: see PromptJob.
            has_images: the text is wanted, not its tokens.
            client_is_gone: asked while the request waits for its turn.

        Raises:
            RequestRefused: the prompt cannot be made, or too many bytes of others are waiting (429).
            ConnectionAbortedError: the client has gone.
        """
        if (made := getattr(request, "made", None)) is not None:
            return _checked(made, setup, most_tokens)
        job = PromptJob(request, template_kwargs, most_tokens, self.allow_template, has_images and setup.has_processor)
        if setup.payload is None:
            with self._here:
                return self._make_prompt(setup.tokenizer, setup.chat_template_args, job)
        payload = pickle.dumps(("job", job))
        is_large = len(payload) > LARGE_BYTES
        with self._room(len(payload)), self._process(is_large=is_large, client_is_gone=client_is_gone) as process:
            return process.make(setup, payload)

    @contextmanager
    def _room(self, num_bytes: int) -> Iterator[None]:
        with self._changed:
            if self._num_bytes and self._num_bytes + num_bytes > MOST_BYTES:
                raise RequestRefused(429, "too many large prompts are waiting", kind="overloaded", retry_after=5)
            self._num_bytes += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._num_bytes -= num_bytes

    @contextmanager
    def _process(
        self, *, is_large: bool, client_is_gone: Callable[[], bool] = lambda: False
    ) -> Iterator[PromptProcess]:
        process = self._wait_for_process(is_large, client_is_gone)
        try:
            yield process
        finally:
            with self._changed:
                self._busy.remove(process)
                self._changed.notify_all()

    def _wait_for_process(self, is_large: bool, client_is_gone: Callable[[], bool]) -> PromptProcess:
        with self._changed:
            self.num_waiting += 1
        may_start = is_large
        try:
            while True:
                with self._changed:
                    process = self._idle(is_large, may_start)
                    if process is None and self._changed.wait(POLL_SECONDS):
                        continue
                    if process is not None:
                        self._busy.append(process)
                        return process
                may_start = True  # the first one is at something that takes long
                if client_is_gone():
                    raise ConnectionAbortedError("the client has gone")
        finally:
            with self._changed:
                self.num_waiting -= 1

    def _idle(self, is_large: bool, may_start: bool) -> PromptProcess | None:
        if not is_large and self._for_small not in self._busy:
            return self._for_small
        if self._for_large not in self._busy and (may_start or self._for_large.is_ready):
            return self._for_large
        return None

    def close(self) -> None:
        """End the processes; prompts that are being made fail."""
        self._for_small.close()
        self._for_large.close()


def _checked(made: MadePrompt, setup: PromptSetup, most_tokens: int | None) -> MadePrompt:
    """A copy of a prompt of token ids, which a client may have sent. Raises RequestRefused: it cannot be computed."""
    if most_tokens is not None and len(made.tokens) > most_tokens:
        raise too_many_tokens(len(made.tokens), most_tokens)
    if max(made.tokens, default=0) >= len(setup.tokenizer):
        raise invalid(f"prompt: token ids go from 0 to {len(setup.tokenizer) - 1}", "prompt")
    segments = [list(segment) for segment in made.segments]
    return MadePrompt(list(made.tokens), segments, list(made.segment_types), made.initial_state, made.text)
