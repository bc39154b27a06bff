"""The process that makes prompts: ``python -m mlx_paged.patches.server.prompt_process SECONDS BYTES``, started by
serve/prompt_maker.py."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import sys
from typing import Any

from ...serve.prompt_messages import receive, send


def main() -> None:
    seconds, num_bytes = float(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the server says when to end
    source, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print is no answer

    from ...serve.refusal import RequestRefused
    from .prompt_job import make_prompt

    with contextlib.suppress(ImportError):  # tokenizers whose code came with the model
        from transformers.dynamic_module_utils import init_hf_modules

        init_hf_modules()
    _limit_memory(num_bytes)
    tokenizer: Any = None
    template_args: dict[str, Any] = {}
    while True:
        try:
            message = receive(source)
        except EOFError:
            return
        try:
            kind, value = pickle.loads(message)
            # The signal's default is to end the process, in the middle of C code, too: nothing a prompt does stops it.
            signal.setitimer(signal.ITIMER_REAL, seconds if kind == "job" else 0)
            if kind == "tokenizer":
                tokenizer, template_args = value
                answer: tuple[Any, ...] = ("ready",)
            else:
                answer = ("made", make_prompt(tokenizer, template_args, value))
        except RequestRefused as refusal:
            answer = ("refused", int(refusal.status), str(refusal), refusal.kind, refusal.param)
        except Exception as error:  # MemoryError among them
            answer = ("failed", f"{type(error).__name__}: {error}")
        payload = pickle.dumps(answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(answers, payload)
        del message, answer, payload


def _limit_memory(num_bytes: int) -> None:
    """Let the process take so many bytes beyond what it has. Where the system does not say, there is no limit."""
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes,) * 2)
    except (OSError, ValueError):
        pass


if __name__ == "__main__":
    main()
