"""``--prompts-file``: run the prompts of a file through the batch generator."""

from __future__ import annotations

import argparse
import copy
import importlib
import io
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import mlx.core as mx

from ..engine.request import RequestOptions
from ..engine.sampling.params import SamplingParams
from ..errors import ConfigError, PromptsFileError, RequestFailedError, check_device
from ..grammar.grammar import CompiledGrammar, GrammarProcessor
from ..model_folder import warn_if_unbounded
from ..ranks.ranks import Ranks
from ..server.errors import invalid
from ..server.requests.chat import sampling_of
from ..server.stops import StoppedTokens
from .answer_grammars import AnswerGrammars
from .over_ranks import from_rank_0
from .prompts_file import Prompt, Results, read_prompts
from .terminal import BatchProgress

if TYPE_CHECKING:
    from ..patches.models.mtp import HeadFiles


class Sampling:
    """Sampling parameters of prompts: each prompt's own options override those of the command line.

    Args:
        args: parsed by mlx_lm.generate's parser.
        tokenizer: the model's.
        vocab_size: number of tokens that the model has.
    """

    def __init__(self, args: argparse.Namespace, tokenizer: Any, vocab_size: int) -> None:
        self._defaults = {
            "temperature": args.temp,
            "top_p": args.top_p,
            "min_p": args.min_p,
            "min_tokens_to_keep": args.min_tokens_to_keep,
            "top_k": args.top_k,
            "xtc_probability": args.xtc_probability,
            "xtc_threshold": args.xtc_threshold,
            "xtc_special_tokens": (*tokenizer.encode("\n"), *tokenizer.eos_token_ids),
        }
        self._vocab_size = vocab_size

    def params(self, options: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters of a prompt with these options.

        Raises:
            RequestRefused: ``logit_bias`` names a token that the model does not have.
            ConfigError: a value is out of range.
        """
        params = sampling_of(options, self._defaults)
        if any(not 0 <= token < self._vocab_size for token in params.logit_bias):
            raise invalid(f"logit_bias: token ids must be from 0 to {self._vocab_size - 1}", "logit_bias")
        return replace(params, top_k=min(params.top_k, self._vocab_size - 1))  # mlx-lm's limit

    def draws(self, options: Mapping[str, Any]) -> bool:
        """Return whether tokens are drawn at random, so that a seed matters."""
        return bool(options.get("temperature", self._defaults["temperature"]))


QUEUED_PER_ROW = 2  # requests per row that wait in the generator, besides the one that runs
MTP = "Let the model's multi-token prediction head propose up to --num-draft-tokens tokens, which the model verifies"
NOT_BATCHED = {
    "prompt_cache_file": "--prompt-cache-file",
    "image": "--image",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run over a file."""
    group = parser.add_argument_group("batches of prompts")
    group.add_argument(
        "--prompts-file",
        metavar="FILE",
        help='Run all prompts of a file in batches: one prompt per line, or JSONL with "prompt" or "messages", and '
        'optionally "id", "max_tokens", "temperature" and the other sampling options of the server\'s API. "-" is '
        "stdin. Results are JSONL, in the order of the file",
    )
    group.add_argument("--output", metavar="FILE", help="File for the results (default: stdout)")
    group.add_argument(
        "--resume", action="store_true", help="Keep the results in --output; run prompts that have none or have failed"
    )
    group.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="Maximum number of prompts in a batch (default: 32)"
    )
    group.add_argument("--mtp", action="store_true", help=MTP)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that cannot be combined with ``--prompts-file``, or that require it."""
    if args.prompts_file is None:
        if args.output is not None or args.resume:
            raise ConfigError("--output and --resume need --prompts-file")
        if args.mtp:
            raise ConfigError("--mtp needs --prompts-file")
        return
    for name, flag in NOT_BATCHED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{flag} cannot be combined with --prompts-file")
    _check_drafts(args)
    if args.resume and args.output is None:
        raise ConfigError("--resume needs --output, the file to continue")
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {args.batch_size}")
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens must be at least 1 with --prompts-file, got {args.max_tokens}")
    try:
        json.loads(args.chat_template_config or "{}")
    except ValueError as error:
        raise ConfigError(f"--chat-template-config is not valid JSON: {error}") from None


def _check_drafts(args: argparse.Namespace) -> None:
    from ..patches.generate.drafting import check_one_proposer

    check_one_proposer(args)
    if args.draft_model is None and not args.mtp:
        return
    flag = "--mtp" if args.mtp else "--draft-model"
    if args.no_paged:
        raise ConfigError(f"{flag} with --prompts-file requires the paged cache; remove --no-paged")
    if args.max_kv_size is not None:
        raise ConfigError(f"{flag} with --prompts-file cannot be combined with --max-kv-size")
    if "paged_prompt_lookup" in args:
        raise ConfigError(f"{flag} and --prompt-lookup both propose tokens: choose one")


def run_prompts_file(
    args: argparse.Namespace,
    load: Callable[..., Any],
    grammars: AnswerGrammars,
    ranks: Ranks | None = None,
    head: HeadFiles | None = None,
) -> tuple[Any, int]:
    """Generate for every prompt of the file.

    Args:
        args: parsed by mlx-lm's parser with :func:`add_arguments`.
        load: mlx-lm's ``load``.
        grammars: the grammars of the run.
        ranks: the ranks that compute the run, or None; rank 0 reads the prompts and writes the results.
        head: files of the model's prediction head, with ``--mtp``.

    Returns:
        The model, and the number of prompts that failed.

    Raises:
        PromptsFileError: the prompts or the results file cannot be used (checked before the model is loaded), or a
            result cannot be written.
        KeyboardInterrupt: interrupted; finished results are written.
    """
    is_first = ranks is None or ranks.rank == 0
    lines = from_rank_0(ranks, lambda: [line.decode("latin-1") for line in _lines(args.prompts_file)])
    name = "stdin" if args.prompts_file == "-" else args.prompts_file
    prompts = read_prompts([line.encode("latin-1") for line in lines], name)
    path = None if args.output is None or not is_first else Path(args.output)
    results = Results(prompts, path, sys.stdout, resume=args.resume and is_first)
    missing = [prompts[index] for index in from_rank_0(ranks, lambda: [prompt.index for prompt in results.missing()])]
    stderr = sys.stderr if is_first else io.StringIO()
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
        grammars.set_tokenizer(tokenizer)
        if args.max_kv_size is not None:
            warn_if_unbounded(model)
        vocab_size = getattr(getattr(model, "args", None), "vocab_size", None) or len(tokenizer)
        sampling = Sampling(args, tokenizer, vocab_size)
        generator = upstream.BatchGenerator(
            model,
            **_draft_options(args, load, model, tokenizer, head),
            max_tokens=args.max_tokens,
            stop_tokens=[[token] for token in tokenizer.eos_token_ids],
            completion_batch_size=args.batch_size,
            prefill_batch_size=min(8, args.batch_size),
            prefill_step_size=args.prefill_step_size,
            max_kv_size=args.max_kv_size,
        )
        with closing(generator), generator.stats() as stats:
            batch = BatchRun(generator, tokenizer, args, results, sampling, grammars, stderr, missing)
            batch.run(model)
        if args.verbose and is_first:
            print(
                f"{results.counts.done} prompts: {batch.num_prompt_tokens} prompt tokens, {batch.num_generated} "
                f"generated, {batch.num_generated / max(stats.wall_time, 1e-9):.1f} tokens/s, peak memory "
                f"{stats.peak_memory:.3f} GB",
                file=sys.stderr,
            )
        return model, results.counts.failed
    finally:
        results.close()


def _draft_options(
    args: argparse.Namespace, load: Callable[..., Any], model: Any, tokenizer: Any, files: HeadFiles | None
) -> dict[str, Any]:
    """Load the draft model or the prediction head, if there is one, and return the batch generator's options for it.
    Raises ConfigError if the number of draft tokens or the draft model's tokenizer cannot be used."""
    from ..patches.generate.drafting import check_draft_tokens, check_same_tokens
    from ..patches.models.mtp import load_head

    if args.draft_model is None and files is None:
        return {}
    check_draft_tokens(args.num_draft_tokens)
    if files is not None:
        head = load_head(model, files)
        mx.eval(head.parameters())
        return {"draft_model": head, "num_draft_tokens": args.num_draft_tokens}
    draft_model, draft_tokenizer = load(args.draft_model)
    check_same_tokens(tokenizer, draft_tokenizer)
    return {"draft_model": draft_model, "num_draft_tokens": args.num_draft_tokens}


def _lines(name: str) -> list[bytes]:
    if name == "-":
        return list(sys.stdin.buffer)
    try:
        with Path(name).expanduser().open("rb") as lines:
            return list(lines)
    except OSError as error:
        raise PromptsFileError(f"{name} cannot be read: {error}") from None


class _Running(NamedTuple):
    """A prompt that was handed to the generator; ``length`` is the prompt's length in tokens."""

    prompt: Prompt
    length: int
    max_tokens: int
    answer: StoppedTokens


class BatchRun:
    """A run that feeds prompts to a generator and writes their results. If a prompt fails, its result is the error.

    Args:
        generator: mlx-lm's batch generator, patched or not.
        tokenizer: the model's.
        args: the parsed command line.
        results: where results are written.
        sampling: makes the prompts' sampling parameters.
        grammars: makes the prompts' grammars.
        stream: where the progress bar is drawn.
        missing: prompts to generate for; None: all that have no result yet.

    Attributes:
        num_prompt_tokens: prompt tokens prefilled so far, whether computed in this run or found in the cache.
        num_generated: tokens of answers; the stop token that ends an answer is not counted.
    """

    def __init__(
        self,
        generator: Any,
        tokenizer: Any,
        args: argparse.Namespace,
        results: Results,
        sampling: Sampling,
        grammars: AnswerGrammars,
        stream: TextIO,
        missing: Sequence[Prompt] | None = None,
    ) -> None:
        self.generator = generator
        self.grammars = grammars
        self.tokenizer = tokenizer
        self.args = args
        self.results = results
        self.sampling = sampling
        self.stream = stream
        missing = list(results.missing()) if missing is None else missing
        # A seeded answer must not depend on other prompts' draws. In mlx-lm's own batches all rows draw from one random
        # state, so seeded prompts run alone, at the end.
        self._seeds_rows = bool(getattr(generator, "seeds_rows", False))
        seeded = [p for p in missing if "seed" in p.sampling and sampling.draws(p.sampling) and not self._seeds_rows]
        alone = {prompt.index for prompt in seeded}
        self._waiting = deque(prompt for prompt in missing if prompt.index not in alone)
        self._seeded = deque(seeded)
        self._running: dict[int, _Running] = {}  # by uid
        self._prefilled: dict[int, int] = {}  # by uid of running prompts: prompt tokens that are prefilled
        self.num_prompt_tokens = 0
        self.num_generated = 0

    def run(self, model: Any) -> None:
        """Compute until every prompt has a result."""
        from ..patches.cache.pools import known_pool

        progress = BatchProgress(self.stream)
        begin = time.monotonic()
        try:
            while self._waiting or self._seeded or self._running:
                self._feed()
                self._step()
                pool = known_pool(model)
                progress.show(
                    self.results.counts,
                    self.num_generated,
                    time.monotonic() - begin,
                    pool.stats() if pool else None,
                    num_prompt_tokens=self.num_prompt_tokens,
                    underway=self._underway(),
                )
        finally:
            progress.clear()

    def _underway(self) -> float:
        """Return the progress of the running prompts, as a number of prompts: the sum of their finished shares."""
        return sum(
            (self._prefilled.get(uid, 0) + len(row.answer.tokens)) / (row.length + row.max_tokens)
            for uid, row in self._running.items()
        )

    def _feed(self) -> None:
        while self._waiting and len(self._running) < (1 + QUEUED_PER_ROW) * self.args.batch_size:
            self._insert(self._waiting.popleft())
        if self._seeded and not self._waiting and not self._running:
            prompt = self._seeded.popleft()
            mx.random.seed(prompt.sampling["seed"])
            self._insert(prompt)

    def _insert(self, prompt: Prompt) -> None:
        from ..patches.samplers import processors_of, sampler_of

        if prompt.error is not None:
            self.results.add(prompt, error=prompt.error)
            return
        most = prompt.max_tokens or self.args.max_tokens
        try:
            tokens = self._tokenise(prompt)
            stop = prompt.sampling.get("stop", ())
            answer = StoppedTokens(self.tokenizer, [stop] if isinstance(stop, str) else stop)
            grammar = self.grammars.grammar(prompt.sampling, tokens)
            params = self.sampling.params(prompt.sampling)
            processors, rest = processors_of(params), {}
            if not self.args.no_paged:
                rest["options"] = [self._options(prompt.sampling, params, grammar)]
            elif unpaged := {"prompt_lookup", "num_draft_tokens"}.intersection(prompt.sampling):
                raise ConfigError(f"{min(unpaged)} requires the paged cache; remove --no-paged or --pipeline")
            elif grammar is not None:
                processors = [GrammarProcessor(grammar), *processors]
            (uid,) = self.generator.insert_segments(
                [[tokens]], [most], samplers=[sampler_of(params)], logits_processors=[processors], **rest
            )
        except Exception as error:  # chat templates come with the model and may raise anything
            self.results.add(prompt, error=f"{type(error).__name__}: {error}")
            return
        self._running[uid] = _Running(prompt, len(tokens), most, answer)

    def _options(
        self, sampling: Mapping[str, Any], params: SamplingParams, grammar: CompiledGrammar | None
    ) -> RequestOptions:
        """Return the options for which mlx-lm's generator has no argument."""
        drafts = sampling.get("num_draft_tokens")
        if drafts is not None and self.args.draft_model is None and not self.args.mtp:
            raise ConfigError("num_draft_tokens needs --draft-model or --mtp")
        lookup = sampling.get("prompt_lookup")
        own = params if self._seeds_rows else None
        return RequestOptions(sampling=own, grammar=grammar, prompt_lookup=lookup, num_draft_tokens=drafts)

    def _tokenise(self, prompt: Prompt) -> list[int]:
        args, tokenizer = self.args, self.tokenizer
        if prompt.messages is None and (args.ignore_chat_template or not tokenizer.has_chat_template):
            return list(tokenizer.encode(prompt.text, add_special_tokens=True))
        if not tokenizer.has_chat_template:
            raise PromptsFileError('"messages" need a tokenizer with a chat template')
        messages = _template_messages(prompt.messages or ())
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

    def _step(self) -> None:
        """Call the generator once."""
        if not self._running:
            return
        try:
            prefilled, generated = self.generator.next()
        except RequestFailedError as error:
            self.results.add(self._leave(error.uid).prompt, error=str(error))
            return
        except Exception as error:  # mlx-lm's own generator does not say which prompt failed: all do
            check_device(error)
            failed = list(self._running)
            self.generator.remove(failed)
            for uid in failed:
                self.results.add(self._leave(uid).prompt, error=f"{type(error).__name__}: {error}")
            return
        for response in prefilled:
            if response.uid in self._running:
                done = response.progress[0]
                self.num_prompt_tokens += done - self._prefilled.get(response.uid, 0)
                self._prefilled[response.uid] = done
        for response in generated:
            if response.uid not in self._running:  # an earlier token of this step has ended it with a stop string
                continue
            answer, reason = self._running[response.uid].answer, response.finish_reason
            if reason != "stop":
                self.num_generated += 1
                if answer.add(response.token) and reason is None:
                    self.generator.remove([response.uid])
                    reason = "stop"
            if reason is not None:
                self._finish(response.uid, reason)

    def _finish(self, uid: int, reason: str) -> None:
        row = self._leave(uid)
        text, is_stopped = row.answer.text()
        self.results.add(
            row.prompt,
            text=text,
            finish_reason="stop" if is_stopped else reason,
            prompt_tokens=row.length,
            generation_tokens=len(row.answer.tokens),
        )

    def _leave(self, uid: int) -> _Running:
        self._prefilled.pop(uid, None)
        return self._running.pop(uid)


def _template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the messages in the form that chat templates expect, as mlx-lm's server makes it: text parts
    joined, arguments of tool calls parsed.

    Raises:
        ValueError: a part is not a text.
    """
    from mlx_lm.server import process_message_content

    copied = copy.deepcopy(list(messages))
    process_message_content(copied)
    return copied
