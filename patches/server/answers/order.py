"""Order: what a request asks for, as the computing thread takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm import server as upstream

from ....serve.api.checks import prompts_of
from ....serve.api.parameters import MAX_ANSWERS, MAX_CHOICES
from ....serve.constraints.constraint import constraint_of
from ....serve.extras import RequestExtras
from ....serve.prompt_messages import MadePrompt
from ....serve.refusal import invalid
from .arguments import generation_arguments
from .choices import Choice
from .scoring import PromptScoring


@dataclass
class Order:
    """One request: prompts, and how many answers to each.

    Attributes:
        prompts: of each, mlx-lm's request.
        args: of all.
        extras: of each prompt.
        n: answers to each prompt that are told.
        best_of: answers to each prompt that are generated.
        echo: answers begin with their prompts.
        num_top: OpenAI's ``logprobs`` of a completion; None: not asked for in that form.
        has_no_answer: only the prompt is wanted.
        calls_once: no answer has more than one tool call.
    """

    prompts: Sequence[upstream.CompletionRequest]
    args: upstream.GenerationArguments
    extras: list[RequestExtras]
    n: int = 1
    best_of: int = 1
    echo: bool = False
    num_top: int | None = None
    has_no_answer: bool = False
    calls_once: bool = False

    @property
    def wants_tokens(self) -> bool:
        return bool(self.args.logprobs) or self.args.top_logprobs > 0

    def choices(self) -> list[Choice]:
        """All sequences, those of a prompt beside one another."""
        seed, args = self.args.seed, self.args
        if self.best_of > self.n:
            args = dataclasses.replace(args, logprobs=True)
        return [
            Choice(
                dataclasses.replace(request, messages=_copied(request.messages)),
                dataclasses.replace(args, seed=None if seed is None else (seed + number) % (1 << 64)),
                extras,
            )
            for request, extras in zip(self.prompts, self.extras, strict=True)
            for number in range(self.best_of)
        ]


def order_of(
    body: Mapping[str, Any], cli_args: Any, salt: str | None, chat: upstream.CompletionRequest | None = None
) -> Order:
    """What a body asks for.

    Args:
        body: as of a chat or a completion; checked.
        cli_args: of the command line, which has the defaults.
        salt: only requests with the same one share prefixes.
        chat: mlx-lm's request, for a chat; None: the body is a completion's.

    Raises:
        RequestRefused: with status 400, naming the parameter.
    """
    extras = RequestExtras(
        salt=salt,
        constraint=constraint_of(body, chat=chat is not None),
        prompt_lookup=body.get("prompt_lookup"),
    )
    args = generation_arguments(body, cli_args)
    if "num_draft_tokens" in body and not (cli_args.draft_model or body.get("draft_model")):
        raise invalid("num_draft_tokens needs a draft_model", "num_draft_tokens")
    n = body.get("n", 1)
    if chat is not None:
        return Order([chat], args, [extras], n, n, calls_once=body.get("parallel_tool_calls") is False)
    best_of, echo, logprobs = body.get("best_of", n), body.get("echo", False), body.get("logprobs", False)
    num_top = None if isinstance(logprobs, bool) else logprobs
    prompts = prompts_of(body["prompt"])
    _check(body, best_of, n, num_prompts=len(prompts))
    return Order(
        [_text_request(prompt if isinstance(prompt, str) else "") for prompt in prompts],
        args,
        [
            extras._replace(
                made=None if isinstance(prompt, str) else MadePrompt(prompt, [prompt], ["assistant"], "normal"),
                scoring=PromptScoring(num_top) if echo and num_top is not None else None,
            )
            for prompt in prompts
        ],
        n,
        best_of,
        echo,
        num_top,
        body.get("max_completion_tokens", body.get("max_tokens")) == 0,
    )


def _text_request(prompt: str) -> upstream.CompletionRequest:
    return upstream.CompletionRequest("text", prompt, [], None, None)


def _copied(messages: list[Any]) -> list[Any]:
    """mlx-lm writes into messages while it makes the prompt."""
    return [dict(message) for message in messages]


def _check(body: Mapping[str, Any], best_of: int, n: int, *, num_prompts: int) -> None:
    if best_of < n:
        raise invalid("best_of must be at least n", "best_of")
    if best_of > n and body.get("stream"):
        raise invalid("best_of answers cannot be a stream: the best are known at the end", "best_of")
    if num_prompts * best_of > MAX_ANSWERS:
        name = "prompt" if num_prompts > MAX_ANSWERS // MAX_CHOICES else "n"
        raise invalid(f"a request has at most {MAX_ANSWERS} answers to all its prompts", name)
    if body.get("max_completion_tokens", body.get("max_tokens")) == 0 and not body.get("echo"):
        raise invalid("max_tokens must be at least 1 without echo", "max_tokens")
    if body.get("echo") and body.get("logprobs") is True:
        raise invalid("logprobs must be a number beside echo", "logprobs")
