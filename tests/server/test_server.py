"""The server as its clients see it: a process, the openai client, raw sockets. The model is tiny and random, with the
demo model's tokenizer."""

from __future__ import annotations

import importlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cases import slow
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes.server_process import BLOCK_SIZE, ServerProcess, cached, together

pytestmark = pytest.mark.demo_model

SYSTEM = "You answer in rhyme, always in the language of the question, and never with more than a line. " * 6
SEVEN = {"39": 1000}  # makes the tokenizer's "7" the only answer
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def messages_of(question: str, system: str = SYSTEM) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


# The openai client ------------------------------------------------------------------------------------------------


def test_answers_equal_stock(server: ServerProcess, client: openai.OpenAI, folder: Path) -> None:
    mlx_lm = importlib.import_module("mlx_lm")
    model, tokenizer = mlx_lm.load(str(folder))
    for question in ("Who are you?", "Where is the sea?", "Who are you?"):
        prompt = tokenizer.apply_chat_template(messages_of(question), add_generation_prompt=True)
        expected = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
        answer = client.chat.completions.create(model="default_model", messages=messages_of(question), max_tokens=12)
        assert answer.choices[0].message.content == expected
        assert answer.usage.prompt_tokens == len(prompt)
    prompt = "Once upon a time, in a forest,"
    expected = mlx_lm.generate(model, tokenizer, prompt, max_tokens=9)
    assert client.completions.create(model="default_model", prompt=prompt, max_tokens=9).choices[0].text == expected


# Sharing ----------------------------------------------------------------------------------------------------------


def test_burst_computes_its_system_prompt_once(server: ServerProcess) -> None:
    system = "This is the prompt of a burst of requests. " * 40
    before = server.stats()["server"]

    def ask(number: int) -> tuple[int, int, str]:
        body = server.chat(messages_of(f"Question {number}: what is {number} plus {number * 7}?", system))
        return body["usage"]["prompt_tokens"], cached(body), body["choices"][0]["message"]["content"]

    answers = together(ask, range(16))
    alone = [ask(number) for number in range(16)]
    assert [text for *_, text in answers] == [text for *_, text in alone]
    assert all(found == (length - 1) // BLOCK_SIZE * BLOCK_SIZE for length, found, _ in alone)
    lengths = [length for length, *_ in answers]
    found = sorted(each for _, each, _ in answers)
    shared = found[1]  # the first one finds nothing
    assert shared >= 352 > found[0]
    unique = shared + sum(length - shared for length in lengths)
    computed = sum(length - each for length, each, _ in answers)
    assert computed <= 1.05 * unique
    after = server.stats()["server"]
    computed += sum(length - each for length, each, _ in alone)
    assert after["computed_prompt_tokens"] - before["computed_prompt_tokens"] == computed
    assert after["cached_tokens"] - before["cached_tokens"] == sum(c for _, c, _ in [*answers, *alone])


@pytest.mark.parametrize("kind", ["llama", "gemma3", *slow("mamba")])
def test_ten_turns_compute_only_new_tokens(
    kind: str, server: ServerProcess, serve: Any, demo_model_folder: Path, tmp_path: Path
) -> None:
    """Each turn computes its new tokens and at most a block before them; also with windows, or states."""
    if kind != "llama":
        server = serve(model=make_tiny_model(tmp_path / kind, demo_model_folder, kind))
    messages, known = messages_of("Hello."), 0
    for turn in range(10):
        # A random model's answers do not encode to the tokens that were generated; digits do.
        body = server.chat(messages, max_tokens=7, logit_bias=SEVEN)
        usage, answer = body["usage"], body["choices"][0]["message"]["content"]
        assert answer == "7" * 7
        assert known == 0 or usage["prompt_tokens"] - cached(body) <= usage["prompt_tokens"] - known + 32, turn
        known = usage["total_tokens"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"Go on, for turn {turn}."}]
    assert known > 200
    again = server.chat(messages_of("Hello."), max_tokens=7)
    assert kind == "mamba" or cached(again) >= again["usage"]["prompt_tokens"] - 32
    assert server.get("/metrics").status == 200


def test_prefixes_are_restored_after_the_server_is_killed(serve: Any, tmp_path: Path) -> None:
    flags = ("--prefix-cache-dir", tmp_path / "prefixes", "--prefix-cache-dir-size", "50MB")
    question = messages_of("What was before?")
    first = serve(*flags)
    expected = first.chat(question, max_tokens=12)
    tokens = expected["usage"]["total_tokens"]
    first.wait_until(lambda: first.stats()["prefix_cache"]["on_disk"]["blocks"] >= (tokens - 1) // BLOCK_SIZE)
    first.post(CHAT, {"messages": messages_of("And after?"), "max_tokens": 80})  # some more blocks
    first.kill()  # as kill -9 does, perhaps in the middle of a file
    truncated = max((tmp_path / "prefixes").glob("*.kv0"), key=lambda path: path.stat().st_mtime)
    truncated.write_bytes(truncated.read_bytes()[:-100])

    second = serve(*flags)
    body = second.chat(question, max_tokens=12)
    assert body["choices"][0]["message"] == expected["choices"][0]["message"]
    assert cached(body) >= body["usage"]["prompt_tokens"] - 1 - 2 * BLOCK_SIZE
    second.check_end()  # this end writes the rest to disk
    third = serve(*flags, "--prefix-cache-ttl", "1")
    body = third.chat(question, max_tokens=1)
    assert cached(body) == (body["usage"]["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
    third.wait_until(lambda: third.stats()["pool"]["live_blocks"] == 0)  # the time to live is over


@pytest.mark.parametrize("kind", ["llama", *slow("mamba")])
def test_model_overwritten_under_its_path_uses_no_old_prefixes(
    kind: str, folder: Path, serve: Any, demo_model_folder: Path, tmp_path: Path
) -> None:
    """Old prefixes are used neither from disk nor, for states that are not paged, from memory."""
    mlx_lm = importlib.import_module("mlx_lm")
    model = make_tiny_model(tmp_path / "model", demo_model_folder, kind)
    prompt = "The quick brown fox jumps over the lazy dog, and then " * 8
    server = serve("--prefix-cache-dir", tmp_path / "prefixes", "--allow-any-model", model=model)

    def ask(name: Path) -> tuple[str, int]:
        answer = server.complete(prompt, max_tokens=12, model=str(name))
        return answer["choices"][0]["text"], cached(answer)

    before, _ = ask(model)
    assert ask(model)[1] > 0
    assert ask(folder)[0]
    if kind == "llama":
        assert ask(model)[0] == before and ask(model)[1] > 0  # from disk: it is the same model
        assert ask(folder)[0]
    make_tiny_model(model, demo_model_folder, kind, seed=7)
    after, found = ask(model)
    assert after == mlx_lm.generate(*mlx_lm.load(str(model)), prompt, max_tokens=12)
    assert found == 0
    assert kind == "mamba" or after != before  # at this size, both repeat the same text


# Clients that go --------------------------------------------------------------------------------------------------


def use(server: ServerProcess, number: int, num_asks: int) -> None:
    """Send one user's requests one after the other; some are cancelled."""
    rng = random.Random(number)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    chat: Any = client.chat.completions.create
    kinds: list[dict[str, Any]] = [{}, {"seed": 3}, {"stop": [" the", "a"]}, {"logprobs": True, "top_logprobs": 2}]
    for _ in range(num_asks):
        options: dict[str, Any] = {"model": "default_model", "max_tokens": rng.randint(1, 24)}
        options["temperature"] = rng.choice([0.0, 0.8])
        question = messages_of(f"Question {rng.randint(0, 30)} of user {number % 4}?", SYSTEM * (number % 3))
        kind = rng.choice([*kinds, "text", "stream", "cancel", "cancel"])
        if kind == "text":
            answer: Any = client.completions.create(prompt=SYSTEM + str(rng.randint(0, 9)), **options)
            assert answer.usage.completion_tokens <= options["max_tokens"]
        elif kind == "stream":
            assert list(chat(messages=question, stream=True, **options))[-1].choices[0].finish_reason
        elif kind == "cancel":
            with chat(messages=question, stream=True, **options | {"max_tokens": 2000}) as stream:
                for _ in range(rng.randint(0, 6)):
                    next(iter(stream), None)
        else:
            answer = chat(messages=question, **kind, **options)
            is_ended = answer.choices[0].finish_reason == "stop"  # by a token that is not among the scored ones
            scored = answer.choices[0].logprobs
            assert not scored or "stop" in kind or len(scored.content) == answer.usage.completion_tokens - is_ended


@pytest.mark.parametrize("num_users, num_asks", [(8, 3), pytest.param(16, 300, marks=pytest.mark.slow)])
def test_many_users_leak_nothing_and_figures_are_consistent(
    server: ServerProcess, num_users: int, num_asks: int
) -> None:
    failed = server.stats()["server"]["requests"]["failed"]
    together(lambda number: use(server, number, num_asks), range(num_users))
    server.wait_until(lambda: server.is_idle)
    stats = server.stats()
    pool, figures = stats["pool"], stats["server"]
    assert pool["live_blocks"] + pool["free_blocks"] == pool["total_blocks"]
    counted: Counter[str] = Counter()
    for group in stats["blocks"]:
        for state, number in group["runs"]:
            counted[state] += number
    assert counted["c"] == pool["cached_blocks"] and counted["f"] == pool["free_blocks"]
    assert not stats["sequences"] and not counted["l"] and not counted["s"]
    assert pool["bytes_reserved"] <= pool["budget_bytes"] == 8_000_000
    assert 0 <= figures["cached_tokens"] <= figures["prompt_tokens"] and 0 <= figures["hit_rate"] <= 1
    assert figures["requests"]["failed"] == failed
    families = {f.name: f for f in text_string_to_metric_families(server.get("/metrics").body.decode())}
    for name in ("total_blocks", "live_blocks", "cached_blocks", "free_blocks", "bytes_in_use"):
        assert families[f"mlx_paged_pool_{name}"].samples[0].value == pool[name]
    assert families["mlx_paged_generated_tokens"].samples[0].value == figures["generated_tokens"]
    assert {s.labels["outcome"]: s.value for s in families["mlx_paged_requests"].samples} == figures["requests"]


# Limits -----------------------------------------------------------------------------------------------------------


def test_requests_past_the_budget_or_the_body_limit_are_refused(server: ServerProcess) -> None:
    answer = server.post(CHAT, {"messages": messages_of("word " * 20000)})
    assert answer.status == 400 and "KV cache budget" in answer.json["error"]["message"]
    assert answer.json["error"]["code"] == "context_length_exceeded"
    answer = server.post(CHAT, {"messages": messages_of("Hi."), "max_tokens": 1 << 25})
    assert answer.status == 400 and answer.json["error"]["param"] == "max_tokens"
    raw = json.dumps({"prompt": "x"}).encode()
    for length, status in ((str(65 << 20), 413), ("9" * 30, 400), ("-5", 400), ("x", 400)):
        assert server.post(COMPLETIONS, raw, **{"Content-Length": length}).status == status
    assert server.is_up


def test_answer_ends_at_the_budget_and_keys_are_required(serve: Any) -> None:
    server = serve("--kv-cache-memory", "150KB", "--api-key", "söcret", "--kv-block-size", 16)
    key = {"Authorization": "Bearer söcret".encode().decode("latin-1")}
    assert {server.get(path).status for path in ("/v1/cache/stats", "/metrics", "/v1/models")} == {401}
    assert server.get("/health").status == server.get("/cache").status == 200

    def ask(prompt: str, max_tokens: int) -> Any:
        return server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": max_tokens}, **key)

    answer = ask("Once upon a time", 100000).json
    assert answer["choices"][0]["finish_reason"] == "length" and 200 < answer["usage"]["total_tokens"] < 300
    # More than fit together: some wait or are preempted.
    assert [each.status for each in together(lambda n: ask(f"{n} " * 60, 40), range(5))] == [200] * 5


def test_public_host_without_keys_is_warned_of(serve: Any) -> None:
    server = serve("--host", "0.0.0.0", "--no-prefix-cache")
    assert "no --api-key" in server.log
    for seed in (None, None, 1, 1):  # --no-prefix-cache keeps nothing
        seeded = {} if seed is None else {"seed": seed}
        assert cached(server.chat(messages_of("Again?"), max_tokens=8, **seeded)) == 0
    server.wait_until(lambda: server.stats()["pool"]["live_blocks"] == 0)
    assert server.stats()["prefix_cache"] is None
