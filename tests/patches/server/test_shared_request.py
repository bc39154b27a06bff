"""A request as ranks tell it to each other is the one that came."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlx_lm import server as upstream

from mlx_paged.engine.ranks.peer import DATA, read_frame, send_frame
from mlx_paged.errors import GrammarError
from mlx_paged.patches.server.answers.arguments import generation_arguments
from mlx_paged.patches.server.computing import shared_request
from mlx_paged.patches.server.computing.ranked_loop import RankedLoop
from mlx_paged.patches.server.computing.shared_request import (
    ComingRequests,
    Descriptions,
    SharedQueue,
    SharedRequest,
    SilentQueue,
    queue_of,
    requests_of,
)
from mlx_paged.patches.server.prepared_request import PreparedRequest
from mlx_paged.serve.constraints.constraint import Constraint, constraint_of
from mlx_paged.serve.prompt_messages import MadePrompt
from mlx_paged.serve.refusal import RequestRefused

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


def told_to_others(requests: list[SharedRequest]) -> list[SharedRequest]:
    descriptions = Descriptions()
    assert all(descriptions.add(*each) for each in requests)
    return requests_of(json.loads(json.dumps(descriptions.told())))


def copies(count: int, grammar: str) -> list[SharedRequest]:
    """Answers to one request with ``count`` seeds."""
    body = {"seed": 1, "logit_bias": {"7": -2}, "structured_outputs": {"grammar": grammar}}
    args, constraint = generation_arguments(body, CLI), constraint_of(body, chat=True)
    made = MadePrompt([5, 6, 7], [[5], [6, 7]], ["system", "user"], "normal")
    requests = []
    for seed in range(count):
        request = PreparedRequest("chat", "", [], None, None, made, None, constraint)
        queue: Any = queue_of((), is_shared=True)
        requests.append(SharedRequest(queue, request, dataclasses.replace(args, seed=seed)))
    return requests


def test_copies_of_a_request_share_what_is_large() -> None:
    grammar = 'start: "a"\n// ' + "\U0001f600" * 100_000
    descriptions, requests = Descriptions(), copies(256, grammar)
    assert all(descriptions.add(*each) for each in requests)
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        size = pool.submit(send_frame, ours, DATA, descriptions.told())
        found = requests_of(read_frame(theirs)[1])
        assert size.result() < len(grammar.encode()) + 256 * 2000
    assert [each.args.seed for each in found] == list(range(256))
    assert all(each.request.constraint == requests[0].request.constraint for each in found)
    assert all(each.request.made == requests[0].request.made for each in found)
    assert [each.queue.number for each in found] == [each.queue.number for each in requests]


def test_a_message_holds_what_fits_and_one_request_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_request, "MOST_MESSAGE_CHARACTERS", 5000)
    owner: Any = SimpleNamespace(requests=Queue(), is_stopping=False, memory_watch=None)
    loop = RankedLoop(owner, cast(Any, SimpleNamespace(rank=0, now=0.0)))
    fitting = [*copies(1, "a" * 3000), *copies(1, "b" * 3000)]
    [large] = copies(1, "c" * 6000)
    for each in (large, *fitting):
        owner.requests.put(each)
    told = [[each["number"] for each in loop._collected()["requests"]["requests"]] for _ in range(2)]
    assert told == [[each.queue.number] for each in fitting]
    refused = large.queue.get(timeout=60)
    assert isinstance(refused, RequestRefused) and refused.status == 413


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_it_comes_as_it_was(body: dict[str, Any]) -> None:
    args = generation_arguments(body, CLI)
    constraint = constraint_of(body, chat=True)
    made = MadePrompt([5, 6, 7], [[5], [6, 7]], ["system", "user"], "reasoning")
    request = PreparedRequest("chat", "", [{"role": "user", "content": "x"}], None, None, made, "salt", constraint)
    request.prompt_lookup = 3
    queue = queue_of(args.stop_words, is_shared=True)
    [(mine, theirs, its_args)] = told_to_others([SharedRequest(cast(Any, queue), request, args)])
    assert mine.number == queue.number
    assert its_args == args
    assert (theirs.made, theirs.salt, theirs.prompt_lookup) == (made, "salt", 3)
    assert theirs.constraint == constraint
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


class Exchange:
    """Two ranks in two threads, whose values are exchanged."""

    def __init__(self) -> None:
        self.size = 2
        self._values: list[Any] = [None, None]
        self._barrier = threading.Barrier(2, timeout=60)

    def of_rank(self, rank: int) -> Any:
        def exchange(value: Any) -> list[Any]:
            self._values[rank] = json.loads(json.dumps(value))
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return SimpleNamespace(rank=rank, exchange=exchange)


class Setup:
    """Compiles when it may, or raises."""

    tokenizer = SimpleNamespace(think_end=None)

    def __init__(self, error: Exception | None = None) -> None:
        self.may_compile, self.is_asked, self._error = threading.Event(), threading.Event(), error
        self.grammars = SimpleNamespace(compile=self._compile)

    def _compile(self, constraint: Constraint, *, is_checked: bool, **options: Any) -> str:
        assert is_checked, "on rank 0"
        self.is_asked.set()
        assert self.may_compile.wait(60)
        if self._error is not None:
            raise self._error
        return "compiled"


def told_requests() -> tuple[list[SharedRequest], list[SharedRequest]]:
    """A request with a grammar and one without, as rank 0 has them and as the other rank does."""
    mine = []
    for body in (BODIES[4], BODIES[0]):
        args = generation_arguments(body, CLI)
        made = MadePrompt([5, 6, 7], [[5], [6, 7]], ["system", "user"], "normal")
        request = PreparedRequest("chat", "", [], None, None, made, None, constraint_of(body, chat=True))
        queue: Any = queue_of((), is_shared=True)
        mine.append(SharedRequest(queue, request, args))
    return mine, told_to_others(mine)


def run_ranks(setup: Setup, steps: Callable[[int, ComingRequests], None]) -> list[ComingRequests]:
    exchange = Exchange()
    coming = [ComingRequests(exchange.of_rank(rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(steps, range(2), coming))
    return coming


def test_a_request_begins_on_all_ranks_when_each_has_its_grammar() -> None:
    setup, told = Setup(), told_requests()
    begun: list[list[tuple[int, int]]] = [[], []]
    free: list[list[int]] = [[], []]

    def steps(rank: int, coming: ComingRequests) -> None:
        free[rank] = [each.queue.number for each in coming.add(told[rank], cast(Any, setup))]
        for step in range(1000):
            if rank == 0 and step == 5:
                assert setup.is_asked.wait(60)
                setup.may_compile.set()
            begun[rank] += [(step, each.queue.number) for each in coming.ready()]
            if not coming:
                break

    coming = run_ranks(setup, steps)
    (constrained, plain) = told[0]
    assert free == [[plain.queue.number]] * 2, "which does not wait for it"
    assert begun[0] == begun[1] and [number for _, number in begun[0]] == [constrained.queue.number]
    assert begun[0][0][0] >= 5, "steps went on while it was compiled"
    assert told[1][0].request.grammar == "compiled"  # type: ignore[comparison-overlap]
    assert [each.close() for each in coming] == [[], []]


def test_a_grammar_that_one_rank_cannot_make_is_refused_on_all() -> None:
    setup, told = Setup(GrammarError("llguidance is not here")), told_requests()
    setup.may_compile.set()

    def steps(rank: int, coming: ComingRequests) -> None:
        coming.add(told[rank], cast(Any, setup))
        while coming:
            assert coming.ready() == []

    run_ranks(setup, steps)
    refused = told[0][0].queue.get(timeout=60)
    assert isinstance(refused, RequestRefused) and "llguidance is not here" in str(refused)


def test_who_goes_while_others_compile_is_forgotten() -> None:
    setup, told = Setup(), told_requests()

    def steps(rank: int, coming: ComingRequests) -> None:
        coming.add(told[rank], cast(Any, setup))
        assert coming.ready() == []
        told[rank][0].queue.is_wanted = False
        coming.drop_gone()
        assert not coming and coming.ready() == []

    coming = run_ranks(setup, steps)
    setup.may_compile.set()
    assert [each.close() for each in coming] == [[], []]
