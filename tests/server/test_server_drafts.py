"""A server with a draft model batches its requests and gives the answers of a server without one."""

import json
from pathlib import Path
from typing import Any

from tests.support.processes.server_process import ServerProcess, together

COMPLETIONS = "/v1/completions"
BODIES: list[dict[str, Any]] = [
    {"prompt": "one two three four", "temperature": 0},
    {"prompt": "a b c d e f g", "temperature": 1.0, "seed": 5, "top_p": 0.9},
    {"prompt": "once upon a time", "temperature": 0, "repetition_penalty": 1.3, "num_draft_tokens": 1},
    {"prompt": "once upon a time", "temperature": 0, "draft": False},
]
LENGTH = {"max_tokens": 40, "logit_bias": {"2": -100}}


def ask_all(server: ServerProcess) -> list[str]:
    answers = together(lambda body: server.complete(**{**LENGTH, **body}), BODIES)
    return [answer["choices"][0]["text"] for answer in answers]


def test_drafted_requests_are_batched_and_give_plain_answers(folder: Path, serve: Any) -> None:
    server = serve("--draft-model", folder, "--kv-cache-memory", "64MB")
    long = {**LENGTH, **BODIES[0], "max_tokens": 700}  # long enough to repay a trial of drafts
    first = server.complete(**long)["choices"][0]["text"]
    found = ask_all(server)
    pool = server.stats()["pool"]
    # A trial reads the last 16 tokens of a row, so its drafts may be wrong.
    assert 0 <= pool["accepted_tokens"] <= pool["drafted_tokens"] and 0 < pool["draft_steps"] <= pool["drafted_tokens"]
    assert pool["budget_bytes"] == 32_000_000, "both models have pages of one size, so each gets half"
    assert ask_all(server) == found
    for length in (1, 7):
        answer = server.complete(**{**BODIES[0], **LENGTH, "max_tokens": length})
        assert answer["usage"]["completion_tokens"] == length
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["left", "right"]}}}
    answer = server.chat([{"role": "user", "content": "which?"}], max_tokens=30, response_format=schema)
    assert json.loads(answer["choices"][0]["message"]["content"]) in ("left", "right")
    plain = serve()
    refused = plain.post(COMPLETIONS, {"prompt": "x", "num_draft_tokens": 2})
    assert refused.status == 400 and "requires a draft model" in refused.json["error"]["message"]
    for body in BODIES:
        body.pop("num_draft_tokens", None)
    assert ask_all(plain) == found
    assert plain.complete(**long)["choices"][0]["text"] == first
