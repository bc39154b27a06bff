"""A request as ranks tell it to each other is the one that came."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm import server as upstream

from mlx_paged.patches.server.answers.arguments import generation_arguments
from mlx_paged.patches.server.computing.shared_request import SharedQueue, SilentQueue, described, queue_of, request_of
from mlx_paged.patches.server.prepared_request import PreparedRequest
from mlx_paged.serve.constraints.constraint import Constraint, constraint_of
from mlx_paged.serve.prompt_messages import MadePrompt

CLI: Any = SimpleNamespace(temp=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=9, num_draft_tokens=3)
TOOL = {
    "type": "function",
    "function": {"name": "go", "strict": True, "parameters": {"type": "object", "z": 1, "a": 2}},
}
BODIES: list[dict[str, Any]] = [
    {},
    {
        "seed": 2**64 - 1,
        "logit_bias": {"39": 1.5, "7": -2},
        "stop": ["a", "\ud800b"],
        "temperature": 0.3,
        "top_logprobs": 4,
    },
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "z": {}, "a": {}}}}},
    {"tools": [TOOL], "tool_choice": "required"},
    {"structured_outputs": {"choice": ["yes", "no"]}},
]


class Setup:
    """Takes constraints, and makes no grammars of them."""

    tokenizer = SimpleNamespace(think_end=None)

    def __init__(self) -> None:
        self.asked: list[Constraint] = []
        self.grammars = SimpleNamespace(compile=lambda constraint, **options: self.asked.append(constraint))


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_it_comes_as_it_was(body: dict[str, Any]) -> None:
    args = generation_arguments(body, CLI)
    constraint = constraint_of(body, chat=True)
    made = MadePrompt([5, 6, 7], [[5], [6, 7]], ["system", "user"], "reasoning")
    request = PreparedRequest("chat", "", [{"role": "user", "content": "x"}], None, None, made, "salt", constraint)
    request.prompt_lookup = 3
    queue = queue_of(args.stop_words, is_shared=True)
    setup: Any = Setup()
    mine, theirs, its_args = request_of(json.loads(json.dumps(described(queue, request, args))), setup)
    assert mine.number == queue.number
    assert its_args == args
    assert (theirs.made, theirs.salt, theirs.prompt_lookup) == (made, "salt", 3)
    assert theirs.constraint == constraint
    assert setup.asked == ([] if constraint is None else [constraint])
    if constraint is not None and constraint.schema is not None:
        assert json.dumps(theirs.constraint.schema) == json.dumps(constraint.schema)  # in its order


def test_a_queue_of_ranks_is_wanted_until_all_are_told() -> None:
    queue = queue_of((), is_shared=True)
    assert isinstance(queue, SharedQueue)
    queue.cancelled = True
    assert not queue.client_waits
    assert queue.is_wanted
    assert not isinstance(queue_of((), is_shared=False), SharedQueue)


def test_a_rank_without_clients_finds_stop_strings_and_keeps_nothing() -> None:
    queue = SilentQueue(["ab"])
    machine: Any = None
    queue.put(upstream.GenerationContext(False, False, None, machine, "normal", [1]))
    for text in ("xa", "b", "c"):
        queue.put(upstream.Response(text, 1, 0.0, None, ()))
    assert queue.is_stopped
    assert queue.qsize() == 0
