"""The server as its clients see it: a process, the openai client, raw sockets. The model is tiny and random, with the
demo model's tokenizer."""

from __future__ import annotations

import importlib
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cases import slow
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes import commands
from tests.support.processes.server_process import ServerProcess

pytestmark = pytest.mark.demo_model

BUDGET = 8 << 20  # about 16,000 tokens of the tiny model
FLAGS = ("--kv-cache-memory", str(BUDGET), "--max-tokens", "4", "--log-level", "WARNING")
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


def test_streams_equal_whole_answers(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "default_model", "messages": messages_of("How far is the moon?")}
    whole = client.chat.completions.create(**options, max_tokens=10)
    chunks = list(
        client.chat.completions.create(**options, max_tokens=10, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 10)
    assert usage.prompt_tokens_details.cached_tokens == (whole.usage.prompt_tokens - 1) // 32 * 32


def test_stop_strings_logprobs_seeds_and_biases_work(client: openai.OpenAI, server: ServerProcess) -> None:
    options: dict[str, Any] = {"model": "default_model", "messages": messages_of("Why?"), "max_tokens": 10}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    content = whole.choices[0].logprobs.content
    assert len(content) == 10 and all(len(token.top_logprobs) == 3 for token in content)
    assert all(t.logprob == max(other.logprob for other in t.top_logprobs) < 0 for t in content)
    text = whole.choices[0].message.content
    names = [token.token for token in content]
    stop = next(name for name in names[2:] if name[0] == " " and name[1:].isalpha())
    cut = client.chat.completions.create(**options, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert (cut.choices[0].message.content or "") == text[: text.index(stop)]
    seeded = [
        client.chat.completions.create(**options, seed=seed, temperature=1.0).choices[0].message.content
        for seed in (1, 1, 2, -5)
    ]
    assert seeded[0] == seeded[1] != seeded[2]
    biased = client.chat.completions.create(**options, logit_bias=SEVEN)
    assert biased.choices[0].message.content == "7" * 10
    assert client.models.list().data
    server.wait_until(lambda: server.is_idle)


# Sharing ----------------------------------------------------------------------------------------------------------


def test_burst_computes_its_system_prompt_once(server: ServerProcess) -> None:
    system = "This is the prompt of a burst of requests. " * 40
    before = server.stats()["server"]

    def ask(number: int) -> tuple[int, int, str]:
        body = server.chat(messages_of(f"Question {number}: what is {number} plus {number * 7}?", system))
        usage = body["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, body["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    alone = [ask(number) for number in range(16)]
    assert [text for *_, text in answers] == [text for *_, text in alone]
    assert all(cached == (length - 1) // 32 * 32 for length, cached, _ in alone)
    lengths = [length for length, *_ in answers]
    found = sorted(cached for _, cached, _ in answers)
    shared = found[1]  # the first one finds nothing
    assert shared >= 352 > found[0]
    unique = shared + sum(length - shared for length in lengths)
    computed = sum(length - cached for length, cached, _ in answers)
    assert computed <= 1.05 * unique
    after = server.stats()["server"]
    computed += sum(length - cached for length, cached, _ in alone)
    assert after["computed_prompt_tokens"] - before["computed_prompt_tokens"] == computed
    assert after["cached_tokens"] - before["cached_tokens"] == sum(c for _, c, _ in [*answers, *alone])


def chat_of_ten_turns(server: ServerProcess) -> None:
    """Check that each turn computes only its new tokens and at most a block before them."""
    messages, known = messages_of("Hello."), 0
    for turn in range(10):
        # A random model's answers do not encode to the tokens that were generated; digits do.
        body = server.chat(messages, max_tokens=7, logit_bias=SEVEN)
        usage, answer = body["usage"], body["choices"][0]["message"]["content"]
        assert answer == "7" * 7
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert known == 0 or computed <= usage["prompt_tokens"] - known + 32, turn
        known = usage["total_tokens"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"Go on, for turn {turn}."}]
    assert known > 200


def test_ten_turns_compute_only_new_tokens(server: ServerProcess) -> None:
    chat_of_ten_turns(server)


@pytest.mark.parametrize("kind", ["gemma3", *slow("mamba")])
def test_ten_turns_with_windows_or_states_compute_only_new_tokens(
    kind: str, demo_model_folder: Path, tmp_path: Path
) -> None:
    server = ServerProcess(make_tiny_model(tmp_path / kind, demo_model_folder, kind), tmp_path)
    chat_of_ten_turns(server)
    usage = server.chat(messages_of("Hello."), max_tokens=7)["usage"]  # and the first prompt again
    if kind == "gemma3":
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 32
    assert server.get("/metrics").status == 200
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log


def test_prefixes_are_restored_after_the_server_is_killed(folder: Path, tmp_path: Path) -> None:
    flags = ("--prefix-cache-dir", str(tmp_path / "prefixes"), "--prefix-cache-dir-size", "50MB")
    question = messages_of("What was before?")
    first = ServerProcess(folder, tmp_path, *flags)
    expected = first.chat(question, max_tokens=12)
    tokens = expected["usage"]["total_tokens"]
    first.wait_until(lambda: first.stats()["prefix_cache"]["on_disk"]["blocks"] >= (tokens - 1) // 32)
    first.post(CHAT, {"messages": messages_of("And after?"), "max_tokens": 80})  # some more blocks
    first.kill()  # as kill -9 does, perhaps in the middle of a file
    truncated = max((tmp_path / "prefixes").glob("*.kv0"), key=lambda path: path.stat().st_mtime)
    truncated.write_bytes(truncated.read_bytes()[:-100])

    second = ServerProcess(folder, tmp_path, *flags)
    body = second.chat(question, max_tokens=12)
    assert body["choices"][0]["message"] == expected["choices"][0]["message"]
    usage = body["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1 - 2 * 32
    assert second.stop() == 0, second.log  # this end writes the rest to disk
    third = ServerProcess(folder, tmp_path, *flags, "--prefix-cache-ttl", "1")
    usage = third.chat(question, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 32 * 32
    third.wait_until(lambda: third.stats()["pool"]["live_blocks"] == 0)  # the time to live is over
    assert third.stop() == 0, third.log


@pytest.mark.parametrize("kind", ["llama", *slow("mamba")])
def test_model_overwritten_under_its_path_uses_no_old_prefixes(
    kind: str, folder: Path, demo_model_folder: Path, tmp_path: Path
) -> None:
    """Old prefixes are used neither from disk nor, for states that are not paged, from memory."""
    mlx_lm = importlib.import_module("mlx_lm")
    model = make_tiny_model(tmp_path / "model", demo_model_folder, kind)
    body = {"prompt": "The quick brown fox jumps over the lazy dog, and then " * 8, "max_tokens": 12}

    def ask(name: Path) -> tuple[str, int]:
        answer = server.post(COMPLETIONS, {**body, "model": str(name)}).json
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    server = ServerProcess(model, tmp_path, "--prefix-cache-dir", str(tmp_path / "prefixes"), "--allow-any-model")
    before, _ = ask(model)
    assert ask(model)[1] > 0
    assert ask(folder)[0]
    if kind == "llama":
        assert ask(model)[0] == before and ask(model)[1] > 0  # from disk: it is the same model
        assert ask(folder)[0]
    make_tiny_model(model, demo_model_folder, kind, seed=7)
    after, cached = ask(model)
    assert server.stop() == 0, server.log
    expected = mlx_lm.generate(*mlx_lm.load(str(model)), body["prompt"], max_tokens=12)
    assert after == expected
    assert cached == 0
    assert kind == "mamba" or after != before  # at this size, both repeat the same text


# Clients that go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_blocks_of_a_request(server: ServerProcess, stream: bool) -> None:
    server.wait_until(lambda: server.is_idle)
    body = {
        "messages": messages_of("Tell me a long story."),
        "max_tokens": 10000,
        "stream": stream,
        "logit_bias": SEVEN,
    }
    connection = server.send_and_leave_open(CHAT, body)
    server.wait_for(running=1)
    if stream:
        assert connection.recv(10)
    before = server.stats()["server"]
    connection.close()
    server.wait_until(lambda: server.is_idle)
    after = server.stats()["server"]
    assert after["generated_tokens"] < before["generated_tokens"] + 9000, "it was not computed to its end"
    server.wait_until(lambda: server.stats()["server"]["requests"]["cancelled"] == before["requests"]["cancelled"] + 1)


def users(server: ServerProcess, num_users: int, num_asks: int) -> dict[str, int]:
    """Run chats of concurrent users, some cancelled; return the number of each kind. Any error raises."""
    counts: dict[str, int] = {}
    lock = threading.Lock()

    def user(number: int) -> None:
        rng = random.Random(number)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        for _ in range(num_asks):
            kind = rng.choice(["chat", "chat", "text", "stream", "cancel", "cancel", "seed", "stop", "logprobs"])
            options: dict[str, Any] = {"model": "default_model", "max_tokens": rng.randint(1, 24)}
            options["temperature"] = rng.choice([0.0, 0.8])
            messages: Any = messages_of(f"Question {rng.randint(0, 30)} of user {number % 4}?", SYSTEM * (number % 3))
            chat = client.chat.completions.create
            if kind == "text":
                answer: Any = client.completions.create(prompt=SYSTEM + str(rng.randint(0, 9)), **options)
                assert answer.usage.completion_tokens <= options["max_tokens"]
            elif kind == "stream":
                assert list(chat(messages=messages, stream=True, **options))[-1].choices[0].finish_reason
            elif kind == "cancel":
                options["max_tokens"] = 2000
                with chat(messages=messages, stream=True, **options) as stream:
                    for _ in range(rng.randint(0, 6)):
                        next(iter(stream), None)
            elif kind == "seed":
                answer = chat(messages=messages, seed=rng.randint(0, 9), **options)
            elif kind == "stop":
                answer = chat(messages=messages, stop=[" the", "a"], **options)
            elif kind == "logprobs":
                answer = chat(messages=messages, logprobs=True, top_logprobs=2, **options)
                is_ended = answer.choices[0].finish_reason == "stop"  # by a token that is not among them
                assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens - is_ended
            else:
                assert chat(messages=messages, **options).usage.prompt_tokens > 0
            with lock:
                counts[kind] = counts.get(kind, 0) + 1

    with ThreadPoolExecutor(num_users) as pool:
        for future in [pool.submit(user, number) for number in range(num_users)]:
            future.result()
    return counts


def check_consistent(server: ServerProcess) -> None:
    server.wait_until(lambda: server.is_idle)
    stats = server.stats()
    pool, figures = stats["pool"], stats["server"]
    assert pool["live_blocks"] + pool["free_blocks"] == pool["total_blocks"]
    counted: dict[str, int] = {}
    for group in stats["blocks"]:
        for state, number in group["runs"]:
            counted[state] = counted.get(state, 0) + number
    assert counted.get("c", 0) == pool["cached_blocks"] and counted.get("f", 0) == pool["free_blocks"]
    assert not stats["sequences"] and "l" not in counted and "s" not in counted
    assert pool["bytes_reserved"] <= BUDGET
    assert 0 <= figures["cached_tokens"] <= figures["prompt_tokens"] and 0 <= figures["hit_rate"] <= 1
    assert figures["requests"]["failed"] == 0
    families = {f.name: f for f in text_string_to_metric_families(server.get("/metrics").body.decode())}
    for name in ("total_blocks", "live_blocks", "cached_blocks", "free_blocks", "bytes_in_use"):
        assert families[f"mlx_paged_pool_{name}"].samples[0].value == pool[name]
    assert families["mlx_paged_generated_tokens"].samples[0].value == figures["generated_tokens"]
    assert {s.labels["outcome"]: s.value for s in families["mlx_paged_requests"].samples} == figures["requests"]


@pytest.mark.parametrize("num_users, num_asks", [(8, 3), pytest.param(16, 300, marks=pytest.mark.slow)])
def test_many_users_leak_nothing_and_figures_are_consistent(
    server: ServerProcess, num_users: int, num_asks: int
) -> None:
    counts = users(server, num_users, num_asks)
    assert sum(counts.values()) == num_users * num_asks
    check_consistent(server)


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


def test_answer_ends_at_the_budget_and_keys_are_required(folder: Path, tmp_path: Path) -> None:
    server = ServerProcess(folder, tmp_path, "--kv-cache-memory", "150KB", "--api-key", "söcret", "--kv-block-size=16")
    key = {"Authorization": "Bearer söcret".encode().decode("latin-1")}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic söcret"}, {"Authorization": "é"}):
        for path in ("/v1/cache/stats", "/metrics", "/v1/models"):
            assert server.get(path, **{k: v.encode().decode("latin-1") for k, v in headers.items()}).status == 401
        assert server.post(CHAT, {}).status == 401
    assert server.get("/health").status == server.get("/cache").status == 200
    prompt = {"prompt": "Once upon a time", "max_tokens": 100000}
    answer = server.post(COMPLETIONS, prompt, **key).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 200 < answer["usage"]["total_tokens"] < 300

    def ask(number: int) -> int:
        body = {"prompt": f"{number} " * 60, "max_tokens": 40}
        return server.post(COMPLETIONS, body, **key).status

    with ThreadPoolExecutor(5) as pool:  # more than fit together: some wait or are preempted
        assert list(pool.map(ask, range(5))) == [200] * 5
    assert server.stop() == 0, server.log


def test_server_that_cannot_start_exits_with_the_reason(server: ServerProcess, folder: Path) -> None:
    for flags, status, words in (
        (["--port", str(server.port)], 1, "cannot start"),
        (["--model", "/nowhere"], 78, "model folder /nowhere does not exist"),
        (["--no-prefix-cache", "--prefix-cache-ttl", "1"], 78, "cannot be combined with"),
        (["--kv-block-size", "7"], 2, "block size must be 8, 16"),
    ):
        done = commands.run("mlx_paged", "server", "--model", folder, *flags, timeout=60)
        assert done.returncode == status and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_public_host_without_keys_is_warned_of(tmp_path: Path, folder: Path) -> None:
    server = ServerProcess(folder, tmp_path, "--host", "0.0.0.0", "--no-prefix-cache")
    assert "no --api-key" in server.log
    for seed in (None, None, 1, 1):  # --no-prefix-cache keeps nothing
        seeded = {} if seed is None else {"seed": seed}
        usage = server.chat(messages_of("Again?"), max_tokens=8, **seeded)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    server.wait_until(lambda: server.stats()["pool"]["live_blocks"] == 0)
    assert server.stats()["prefix_cache"] is None
    assert server.stop() == 0
