"""Sampling options over HTTP: seeds beside other requests, log probabilities only on request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.processes.server_process import ServerProcess

FLAGS = ("--log-level", "WARNING")

pytestmark = pytest.mark.demo_model


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "repetition_context_size": 0},
    {"temperature": 1.2, "top_k": 40, "frequency_penalty": 0.2},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.5, "logprobs": True, "top_logprobs": 2},
]


def text(server: ServerProcess, index: int) -> str:
    messages = [{"role": "user", "content": f"Question {index % 3}?"}]
    answer = server.chat(messages, max_tokens=12, seed=index // 2, **OPTIONS[index % 4])
    logprobs = answer["choices"][0].get("logprobs")
    if "logprobs" in OPTIONS[index % 4]:
        assert all(len(token["top_logprobs"]) == 2 and token["logprob"] < 0 for token in logprobs["content"])
    else:
        assert not logprobs
    return str(answer["choices"][0]["message"].get("content"))


@pytest.mark.slow
def test_seeds_give_the_same_answers_alone_and_concurrently(server: ServerProcess) -> None:
    alone = [text(server, index) for index in range(12)]
    assert len(set(alone)) == 12
    with ThreadPoolExecutor(12) as clients:
        assert list(clients.map(lambda index: text(server, index), range(12))) == alone
