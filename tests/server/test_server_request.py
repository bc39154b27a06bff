"""ServerRequest and its description for other ranks; scores of prompts beside other requests."""

from __future__ import annotations

import json
import select
from dataclasses import asdict
from typing import Any

import pytest

from mlx_paged.engine.sampling.params import SamplingParams
from mlx_paged.server.request import Prompt, ServerRequest
from mlx_paged.server.requests.chat import ChatBody, chat_request
from mlx_paged.server.requests.fields import SamplingParameters
from mlx_paged.server.requests.messages import CountBody, message_request
from tests.support.constraints import constraint_of
from tests.support.processes.server_process import ServerProcess

FLAGS = ("--watchdog-timeout", "5")

GRAMMAR = 'start: "a" "b"*\n// ' + "x" * 10_000


def request(**options: object) -> ServerRequest:
    prompts = [Prompt([1, 2, 3], [[1, 2], [3]], ["system", "user"], "reasoning"), Prompt.of_tokens([4, 5])]
    return ServerRequest(
        [prompt.tokens for prompt in prompts],
        prompts=prompts,
        sampling=SamplingParams(temperature=0.5, logit_bias={7: 1.5}, seed=3, xtc_special_tokens=(1, 2)),
        max_tokens=9,
        stops=("b", "a"),
        constraint=constraint_of({"structured_outputs": {"grammar": GRAMMAR}}, chat=False),
        salt="mine",
        **options,  # type: ignore[arg-type]
    )


def test_description_for_other_ranks_has_the_whole_request() -> None:
    asked = request(n=3, top_logprobs=4)
    told = ServerRequest.from_description(json.loads(json.dumps(asked.described())))
    for name in ("prompts", "constraint", "max_tokens", "n", "top_logprobs", "salt", "number"):
        assert getattr(told, name) == getattr(asked, name), name
    assert told.stops == ("b", "a")
    assert [told.sampling_of(index).seed for index in range(6)] == [3, 4, 5, 3, 4, 5]
    assert told.sampling_of(1).logit_bias == {7: 1.5} and told.num_answers == 6


SAID = {
    **{"temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "top_k": 7, "xtc_probability": 0.75, "xtc_threshold": 0.375},
    **{"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 9},
    **{"repetition_context_size": 11, "presence_context_size": 12, "frequency_context_size": 13},
}
ONLY_OF_THE_ENGINE = {"min_tokens_to_keep", "xtc_special_tokens"}


def test_all_sampling_parameters_of_a_body_reach_the_engine() -> None:
    body = SamplingParameters(**SAID, logit_bias={"3": 1.5})
    made = asdict(body.sampling({}))
    assert {name: made[name] for name in SAID} == SAID and made["logit_bias"] == {3: 1.5}
    assert set(made) - set(SAID) - ONLY_OF_THE_ENGINE == {"logit_bias"}, "a parameter that no client can set"
    others = {"logit_bias", "prompt_lookup", "cache_salt", "priority"}
    assert set(SamplingParameters.model_fields) - set(SAID) == others, "a field that is not tested here"


MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
MARKED: dict[str, tuple[dict[str, Any], int]] = {  # 2 of the 3 tokens are the system message's
    "nothing": ({}, 0),
    "the body": (MARK, 3),
    "the system": ({"system": [{"type": "text", "text": "s", **MARK}]}, 2),
    "a tool": ({"tools": [{**TOOL, **MARK}]}, 2),
    "another tool": ({"tools": [TOOL]}, 0),
    "a message": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "m", **MARK}]}]}, 3),
}


@pytest.mark.parametrize(("body", "kept"), MARKED.values(), ids=MARKED)
def test_cache_control_marks_set_how_much_of_a_prompt_is_kept(body: dict[str, Any], kept: int) -> None:
    given = {"messages": [{"role": "user", "content": "m"}], **body}
    (prompt, alone) = request().prompts
    asked = message_request(CountBody.model_validate(given), {})
    assert asked.num_kept(prompt) == kept and asked.num_kept(alone) == (2 if kept else 0)
    told = ServerRequest.from_description(json.loads(json.dumps(request(keeps=asked.keeps).described())))
    assert told.num_kept(prompt) == kept
    for key, number in (("mine", 3), (None, 0)):
        chat = ChatBody.model_validate({"messages": given["messages"], "prompt_cache_key": key})
        assert chat_request(chat, {}).num_kept(prompt) == number


def test_description_does_not_grow_with_the_number_of_answers() -> None:
    one, many = (len(json.dumps(request(n=n).described())) for n in (1, 128))
    assert many < one + 100


# Prompts' own scores ----------------------------------------------------------------------------------------------


LONG: dict[str, Any] = {"prompt": [[5 + n] * 700 for n in range(250)], "max_tokens": 0, "echo": True, "logprobs": 0}


@pytest.mark.demo_model
def test_others_are_answered_while_prompts_are_scored(server: ServerProcess) -> None:
    with server.send_and_leave_open("/v1/completions", LONG) as client:
        server.wait_until(lambda: any(server.stats()["running"].values()))
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).status == 200
        assert not select.select([client], [], [], 0)[0], "it is answered last, after minutes"
    answer = server.post("/v1/completions", {**LONG, "prompt": LONG["prompt"][:4]}, 300)
    assert answer.status == 200 and len(answer.json["choices"][3]["logprobs"]["token_logprobs"]) == 700
    assert server.get("/health").json["status"] == "ok"  # the watchdog did not take it for a hang
