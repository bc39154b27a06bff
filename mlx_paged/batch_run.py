"""Runs the prompts of a file through the batch generator, for the command line."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx

from .errors import ConfigError, PagedCacheError, PromptsFileError, RequestFailedError
from .progress import BatchProgress
from .prompts_file import Prompt, Results, read_prompts

QUEUED_PER_ROW = 2  # requests handed to the generator ahead of those that run
NOT_BATCHED = {
    "prompt_cache_file": "--prompt-cache-file",
    "draft_model": "--draft-model",
    "image": "--image",
    "kv_bits": "--kv-bits",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a run over a file."""
    group = parser.add_argument_group("many prompts at once")
    group.add_argument(
        "--prompts-file",
        metavar="FILE",
        help='Batch all prompts of a file, one a line or JSONL ("prompt" or "messages", "max_tokens", "id"); "-" is '
        "stdin. Results are JSONL, in the order of the file",
    )
    group.add_argument("--output", metavar="FILE", help="Where the results go (default: stdout)")
    group.add_argument("--resume", action="store_true", help="Go on with the results that --output holds already")
    group.add_argument("--batch-size", type=int, default=32, metavar="N", help="Most prompts at a time (default: 32)")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that do not go with ``--prompts-file``, or only with it."""
    if args.prompts_file is None:
        if args.output is not None or args.resume:
            raise ConfigError("--output and --resume need --prompts-file")
        return
    for name, flag in NOT_BATCHED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{flag} does not go with --prompts-file")
    if args.resume and args.output is None:
        raise ConfigError("--resume needs --output, the file to go on with")
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, not {args.batch_size}")


def run_prompts_file(args: argparse.Namespace, load: Callable[..., Any]) -> tuple[Any, int]:
    """Generate for every prompt of the file.

    Args:
        args: of mlx-lm's parser, with :func:`add_arguments`.
        load: mlx-lm's ``load``.

    Returns:
        The model, and how many prompts failed.

    Raises:
        PromptsFileError: the prompts or the results cannot be used; before the model is loaded.
        KeyboardInterrupt: with what is done written.
    """
    prompts = _read(args.prompts_file)
    path = None if args.output is None else Path(args.output)
    results = Results(prompts, path, sys.stdout, resume=args.resume)
    try:
        if args.seed is not None:
            mx.random.seed(args.seed)
        upstream = importlib.import_module("mlx_lm.generate")
        model, tokenizer = load(
            args.model or upstream.DEFAULT_MODEL,
            adapter_path=args.adapter_path,
            tokenizer_config={"trust_remote_code": args.trust_remote_code},
            model_config={"quantize_activations": args.quantize_activations},
            trust_remote_code=args.trust_remote_code,
        )
        for token in args.extra_eos_token:
            tokenizer.add_eos_token(token)
        generator = upstream.BatchGenerator(
            model,
            max_tokens=args.max_tokens,
            stop_tokens=[[token] for token in tokenizer.eos_token_ids],
            sampler=_sampler(args, tokenizer),
            completion_batch_size=args.batch_size,
            prefill_batch_size=min(8, args.batch_size),
            prefill_step_size=args.prefill_step_size,
            max_kv_size=args.max_kv_size,
        )
        with generator.stats() as stats:
            BatchRun(generator, tokenizer, args, results, sys.stderr).run(model)
        generator.close()
        if args.verbose:
            print(
                f"{results.counts.done} prompts: {stats.prompt_tokens} prompt tokens, {stats.generation_tokens} "
                f"generated, {stats.generation_tokens / max(stats.wall_time, 1e-9):.1f} tokens/s, peak memory "
                f"{stats.peak_memory:.3f} GB",
                file=sys.stderr,
            )
        return model, results.counts.failed
    finally:
        results.close()


def _read(name: str) -> list[Prompt]:
    if name == "-":
        return read_prompts(sys.stdin, "stdin")
    try:
        with Path(name).expanduser().open() as lines:
            return read_prompts(lines, name)
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsFileError(f"{name} cannot be read: {error}") from None


def _sampler(args: argparse.Namespace, tokenizer: Any) -> Any:
    from mlx_lm.sample_utils import greedy_sampler, make_sampler

    if args.temp == 0:
        return greedy_sampler
    return make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )


class BatchRun:
    """Feeds prompts to a generator and results to their file.

    Args:
        generator: mlx-lm's batch generator, patched or not.
        tokenizer: of the model.
        args: of the command line.
        results: where results go; says which prompts are missing.
        stream: for the progress bar.
    """

    def __init__(
        self, generator: Any, tokenizer: Any, args: argparse.Namespace, results: Results, stream: TextIO
    ) -> None:
        self.generator = generator
        self.tokenizer = tokenizer
        self.args = args
        self.results = results
        self.stream = stream
        self._waiting = deque(results.missing())
        self._running: dict[int, tuple[Prompt, int, list[int]]] = {}  # by uid: prompt, its length, tokens so far

    def run(self, model: Any) -> None:
        """Until every prompt has a result."""
        from .patches import pool_of

        progress = BatchProgress(self.stream)
        num_tokens, begin = 0, time.monotonic()
        try:
            while self._waiting or self._running:
                self._feed()
                num_tokens += self._step()
                pool = pool_of(model)
                progress.show(self.results.counts, num_tokens, time.monotonic() - begin, pool.stats() if pool else None)
        finally:
            progress.clear()

    def _feed(self) -> None:
        while self._waiting and len(self._running) < (1 + QUEUED_PER_ROW) * self.args.batch_size:
            prompt = self._waiting.popleft()
            try:
                tokens = self._tokenise(prompt)
                (uid,) = self.generator.insert([tokens], [prompt.max_tokens or self.args.max_tokens])
            except (PagedCacheError, ValueError, TypeError, KeyError) as error:
                self.results.add(prompt, error=f"{type(error).__name__}: {error}")
                continue
            self._running[uid] = (prompt, len(tokens), [])

    def _tokenise(self, prompt: Prompt) -> list[int]:
        args, tokenizer = self.args, self.tokenizer
        if prompt.messages is None and (args.ignore_chat_template or not tokenizer.has_chat_template):
            return list(tokenizer.encode(prompt.text, add_special_tokens=True))
        if not tokenizer.has_chat_template:
            raise PromptsFileError('"messages" need a tokenizer with a chat template')
        messages = list(prompt.messages or ())
        if prompt.messages is None:
            if args.system_prompt is not None:
                messages.append({"role": "system", "content": args.system_prompt})
            messages.append({"role": "user", "content": prompt.text})
        if args.prefill_response is not None:
            messages.append({"role": "assistant", "content": args.prefill_response})
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            continue_final_message=args.prefill_response is not None,
            add_generation_prompt=args.prefill_response is None,
            **json.loads(args.chat_template_config or "{}"),
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _step(self) -> int:
        """One call of the generator. Returns how many tokens it gave."""
        if not self._running:
            return 0
        try:
            _, generated = self.generator.next()
        except RequestFailedError as error:
            prompt, _, _ = self._running.pop(error.uid)
            self.results.add(prompt, error=str(error))
            return 0
        for response in generated:
            prompt, length, tokens = self._running[response.uid]
            if response.finish_reason != "stop":
                tokens.append(response.token)
            if response.finish_reason is not None:
                del self._running[response.uid]
                self.results.add(
                    prompt,
                    text=self.tokenizer.decode(tokens),
                    finish_reason=response.finish_reason,
                    prompt_tokens=length,
                    generation_tokens=len(tokens),
                )
        return len(generated)
