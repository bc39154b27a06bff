"""Requests of a server as ranks tell them to each other, and where their answers go on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from mlx_lm import server as upstream

from ....engine.grammar.source import GrammarSource
from ....serve.constraints.constraint import Constraint
from ....serve.constraints.tools import Tool, Tools
from ....serve.prompt_maker import PromptSetup
from ....serve.prompt_messages import MadePrompt
from ..answer_queue import NOBODY, AnswerQueue
from ..prepared_request import PreparedRequest


class SharedQueue(AnswerQueue):
    """Of a request that all ranks compute: whether it is still wanted changes only between their turns.

    Attributes:
        is_wanted: set on all ranks in the same turn.
    """

    is_wanted: bool = True  # type: ignore[assignment]


class SilentQueue(SharedQueue):
    """Of a rank that has no clients: takes the answer, finds its stop strings, and keeps nothing."""

    def _put(self, item: Any) -> None:
        pass


def queue_of(
    stop_words: Iterable[str], is_stalled: Callable[[], bool] = NOBODY.is_stalled, *, is_shared: bool
) -> AnswerQueue:
    """For an answer to a client."""
    return (SharedQueue if is_shared else AnswerQueue)(stop_words, is_stalled)


def described(queue: AnswerQueue, request: PreparedRequest, args: upstream.GenerationArguments) -> dict[str, Any]:
    """A request in values of JSON."""
    made = request.made
    assert made is not None
    return {
        "number": queue.number,
        "made": [made.tokens, made.segments, made.segment_types, made.initial_state],
        "salt": request.salt,
        "constraint": request.constraint,
        "prompt_lookup": request.prompt_lookup,
        "args": dataclasses.asdict(args),
    }


def request_of(
    told: dict[str, Any], setup: PromptSetup
) -> tuple[SharedQueue, PreparedRequest, upstream.GenerationArguments]:
    """The request that :func:`described` has told of, with its grammar, on a rank without clients.

    Args:
        setup: of the model.

    Raises:
        RequestRefused: the grammar cannot be made, as it could on rank 0.
    """
    args = _arguments(told["args"])
    queue = SilentQueue(args.stop_words)
    queue.number = told["number"]
    request = PreparedRequest("text", "", [], None, None, made=MadePrompt(*told["made"]), salt=told["salt"])
    request.prompt_lookup = told["prompt_lookup"]
    request.constraint = _constraint(told["constraint"])
    request.constrain(setup, queue)
    return queue, request, args


def _arguments(told: dict[str, Any]) -> upstream.GenerationArguments:
    logits = dict(told["logits"])
    if logits["logit_bias"] is not None:  # JSON's keys are strings
        logits["logit_bias"] = {int(token): bias for token, bias in logits["logit_bias"].items()}
    parts = {
        "model": upstream.ModelDescription(**told["model"]),
        "sampling": upstream.SamplingArguments(**told["sampling"]),
        "logits": upstream.LogitsProcessorArguments(**logits),
    }
    return upstream.GenerationArguments(**{**told, **parts})


def _constraint(told: list[Any] | None) -> Constraint | None:
    if told is None:
        return None
    answer, param, schema, tools = told
    if tools is not None:
        tools = Tools([Tool(*each) for each in tools[0]], *tools[1:])
    return Constraint(None if answer is None else GrammarSource(*answer), param, schema, tools)
