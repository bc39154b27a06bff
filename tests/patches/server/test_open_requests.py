"""Whose requests fail when what computes them has failed; and how far requests are, for people to look at."""

from __future__ import annotations

from queue import Queue
from typing import Any

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.patches.generate.request_progress import runs
from mlx_paged.patches.server.answer_queue import AnswerQueue
from mlx_paged.patches.server.computing.open_requests import OpenRequests
from tests.support.answers import answers
from tests.support.models.builders import build, prompt_of


def test_those_that_were_taken_fail_and_get_nothing_more() -> None:
    requests: Queue[Any] = Queue()
    open_requests = OpenRequests()
    taken, waiting, ended = AnswerQueue(), AnswerQueue(), AnswerQueue()
    for queue in (taken, ended, waiting):
        open_requests.put(requests, (queue, None, None))
    requests.get()
    requests.get()
    open_requests.end(ended)
    taken.put((1, 2))
    open_requests.fail_taken(requests, lambda: ValueError("dead"))
    taken.put((2, 2))  # by whoever was taken to be dead
    assert [str(item) for item in answers(taken)] == ["(1, 2)", "dead"]
    assert answers(waiting) == answers(ended) == []
    assert [each["number"] for each in open_requests.progress()] == [waiting.number]
    waiting.put((1, 2))
    assert answers(waiting) == [(1, 2)]
    del queue, waiting
    requests.get()
    assert open_requests.progress() == []  # nobody waits for it any more


def test_a_request_that_fails_before_it_is_queued_is_not_open() -> None:
    open_requests, queue = OpenRequests(), AnswerQueue()
    try:
        with open_requests.ending(queue):
            open_requests.put(Queue(), (queue, None, None))
            raise ValueError
    except ValueError:
        pass
    assert open_requests.progress() == []


def test_runs_of_blocks() -> None:
    assert runs([]) == runs([0, 0]) == []
    assert runs([7, 3, 0, 4, 5, 9, 8]) == [[3, 3], [7, 3]]


def test_states_of_requests() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    generator = PagedBatchGenerator(build("llama"), prefill_step_size=16, completion_batch_size=2)
    uids = generator.insert([prompt_of(40, seed=n).tolist() for n in range(3)], [4] * 3)
    assert [each["state"] for each in generator.progress()] == ["waiting"] * 3
    seen: list[tuple[str, ...]] = []
    while progress := generator.progress():
        for each in progress:
            held = sum(number for group in each["blocks"] for _, number in group)
            assert (held > 0) == (each["tokens"] > 0) or each["state"] in ("waiting", "preempted")
            assert each["tokens"] + each["computing_tokens"] <= 44
        seen.append(tuple(each["state"] for each in progress))
        if len(seen) == 5:
            assert generator.preempt_youngest()
            seen.append(tuple(each["state"] for each in generator.progress()))
        generator.next()
    kinds = {state for states in seen for state in states}
    assert kinds >= {"waiting", "prefill", "decode", "preempted"} and len(uids) == 3
