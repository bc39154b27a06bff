"""Who may do what with the server: names, keys, salts, templates, and clients that take more than their share."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes import commands
from tests.support.processes.page_document import NEEDS_NODE, page_of
from tests.support.processes.server_process import Answer, ServerProcess

pytestmark = pytest.mark.demo_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEY, OTHER = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
HOST_AND_KEY = "Host: x\r\nAuthorization: Bearer one\r\n"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SECRET = "You are the assistant of a bank. The word that opens the vault is swordfish. Never tell it to anybody. " * 3


@pytest.fixture(scope="module")
def folder(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", demo_model_folder)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["--max-tokens", "3", "--kv-cache-memory", "8MB", "--allow-chat-template-override"]
    flags += ["--served-model-name", "house", "--served-model-name", "org/house"]
    flags += ["--allow-any-model", "--drain-timeout", "0.2"]  # the last prompt never ends
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text(json.dumps({"batch": {"key": "three", "priority": 7, "requests_per_minute": 2}}))
    key = f"one,two,@{keys}\n"
    process = ServerProcess(folder, tmp_path_factory.mktemp("server"), *flags, MLX_PAGED_API_KEY=key)
    yield process
    assert process.stop() == 0, process.log[-3000:]
    assert "Traceback" not in process.log, process.log[-5000:]


def cached(answer: Answer) -> int:
    assert answer.status == 200, answer.body
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def chat(content: str = "Hi.", **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **options}


# Names ------------------------------------------------------------------------------------------------------------


def test_the_model_answers_to_its_names(server: ServerProcess, folder: Path) -> None:
    listed = [model["id"] for model in server.get("/v1/models", **KEY).json["data"]]
    assert listed[:4] == ["house", "org/house", "tiny-llama", str(folder)]
    for name in [*listed[:4], "default_model"]:
        answer = server.post(COMPLETIONS, {"prompt": "Hello", "model": name}, **KEY)
        assert answer.status == 200 and answer.json["model"] == name
        one = server.get(f"/v1/models/{name}", **KEY)
        assert one.status == 200 and one.json["id"] == name and one.json["object"] == "model"
    assert server.get("/v1/models/org%2Fhouse", **KEY).json["id"] == "org/house"
    for name in ("nobody", "house/x", "tiny"):
        missing = server.get(f"/v1/models/{name}", **KEY)
        assert missing.status == 404 and name in missing.json["error"]["message"]
    assert "unloaded" not in server.log and server.log.count("is ready") == 1  # it was the same one all the time


def test_the_root_leads_to_the_page_and_head_answers(server: ServerProcess) -> None:
    root = server.get("/")
    assert root.status == 307 and root.headers["location"] == "/cache"
    for path, status, headers in (
        ("/health", 200, {}),
        ("/cache", 200, {}),
        ("/v1/models", 200, KEY),
        ("/x", 404, KEY),
    ):
        whole, head = server.get(path, **headers), server.request("HEAD", path, None, headers, 30)
        assert head.status == whole.status == status and head.body == b""
        assert head.headers["content-length"] == whole.headers["content-length"]


# Keys and salts ---------------------------------------------------------------------------------------------------


def test_holders_of_other_keys_do_not_learn_what_was_asked(server: ServerProcess) -> None:
    prompt = {"prompt": SECRET, "max_tokens": 1}
    assert server.post(COMPLETIONS, prompt).status == 401
    assert cached(server.post(COMPLETIONS, prompt, **KEY)) == 0
    assert cached(server.post(COMPLETIONS, prompt, **OTHER)) == 0
    assert cached(server.post(COMPLETIONS, prompt, **KEY)) > 60
    salted = {**prompt, "cache_salt": "mine"}
    assert cached(server.post(COMPLETIONS, salted, **KEY)) == 0
    assert cached(server.post(COMPLETIONS, salted, **KEY)) > 60
    assert cached(server.post(COMPLETIONS, {**salted, "seed": 1}, **KEY)) > 60  # one that is served alone
    assert cached(server.post(COMPLETIONS, {**salted, "cache_salt": "other", "seed": 1}, **KEY)) == 0
    assert cached(server.post(COMPLETIONS, {**salted, "seed": 1}, **OTHER)) == 0
    for wrong in ("", 3, "x" * 1001):
        assert server.post(COMPLETIONS, {**prompt, "cache_salt": wrong}, **KEY).json["error"]["param"] == "cache_salt"


def test_a_keys_limit_is_told_with_the_time_to_wait(server: ServerProcess) -> None:
    limited = {"Authorization": "Bearer three", "User-Agent": "claude-cli/2"}
    for _ in range(2):
        assert server.post(CHAT, chat(), **limited).status == 200
    for path, body in ((CHAT, chat()), ("/v1/messages", chat(max_tokens=3))):
        refused = server.post(path, body, **limited)
        assert refused.status == 429 and 1 <= int(refused.headers["retry-after"]) <= 30
        assert "'batch' has used its requests" in refused.json["error"]["message"]
    assert server.get("/v1/models", **limited).status == 200 and server.post(CHAT, chat(), **KEY).status == 200
    clients = {each["client"]: each for each in server.get("/v1/cache/stats", **KEY).json["clients"]}
    assert clients["batch"]["requests"] == 2 and clients["batch"]["cached_tokens"] > 0
    metrics = server.get("/metrics", **KEY).body.decode()
    assert re.search(r'mlx_paged_client_cached_tokens_total\{client="batch"\} [1-9]', metrics)
    assert "client='key 1'" in server.log and "three" not in server.log


@NEEDS_NODE
def test_each_keys_cached_share_is_among_the_metrics_and_on_the_page(server: ServerProcess, tmp_path: Path) -> None:
    names = {"key 1": KEY, "key 2": OTHER}
    before, page = figures_of_clients(server, tmp_path)
    used = {name: before.get(name, Counter()).copy() for name in names}
    for name, headers in [*names.items(), *names.items(), ("key 2", OTHER)]:
        usage = server.post(CHAT, chat(f"{SECRET} of {name}"), **headers).json["usage"]
        used[name]["prompt_tokens"] += usage["prompt_tokens"]
        used[name]["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
    after, page = figures_of_clients(server, tmp_path)
    shares = {}
    for name, counted in used.items():
        assert after[name] == counted and counted["cached_tokens"] > before.get(name, Counter())["cached_tokens"]
        shares[name] = f"{100 * counted['cached_tokens'] / counted['prompt_tokens']:.1f} %"
        assert page[f"cached, {name}"] == f"{shares[name]} of {counted['prompt_tokens']:,}"
    assert len(set(shares.values())) == 2


def figures_of_clients(server: ServerProcess, folder: Path) -> tuple[dict[str, Counter[str]], dict[str, str]]:
    """Return the tokens of each client, as the metrics say, and the figures of the page."""
    text = server.get("/metrics", **KEY).body.decode()
    counted: dict[str, Counter[str]] = {}
    for figure in ("prompt_tokens", "cached_tokens"):
        for name, value in re.findall(rf'mlx_paged_client_{figure}_total\{{client="(.*?)"\}} (\S+)', text):
            counted.setdefault(name, Counter())[figure] = int(float(value))
    report = server.get("/v1/cache/stats?blocks=1", **KEY).json
    (said,), _ = page_of(server.get("/cache").body, [report], folder)
    return counted, said["figures"]


def test_a_priority_may_come_in_a_header(server: ServerProcess) -> None:
    assert server.post(CHAT, chat(), **KEY, **{"X-Priority": "-3"}).status == 200
    for wrong in ("high", "1.5", "99999999"):
        refused = server.post(CHAT, chat(), **KEY, **{"X-Priority": wrong})
        assert refused.status == 400 and refused.json["error"]["param"] == "priority"


def test_a_burst_shares_within_a_salt_alone(server: ServerProcess) -> None:
    prompt = "A burst of requests, all of which begin with the same long text. " * 20
    answers: list[int] = []

    def ask(number: int) -> None:
        body = {"prompt": f"{prompt} {number}", "max_tokens": 2, "cache_salt": f"burst {number % 2}"}
        answers.append(cached(server.post(COMPLETIONS, body, **KEY)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers)[:3] == [0, 0, sorted(answers)[2]] and sorted(answers)[2] > 100


# Prompts ----------------------------------------------------------------------------------------------------------


def test_arguments_of_the_renderer_are_refused(server: ServerProcess) -> None:
    for kwargs in (
        {"padding": "max_length", "max_length": 4_000_000},
        {"return_tensors": "np"},
        {"tokenizer_kwargs": {"padding": "max_length", "max_length": 3000}},
        {"tokenize": False},
        {"return_dict": True},
    ):
        answer = server.post(CHAT, chat(chat_template_kwargs=kwargs), **KEY)
        assert answer.status == 400 and answer.json["error"]["param"] == "chat_template_kwargs"
    brought = {"chat_template": "{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}", "mood": "!"}
    assert server.post(CHAT, chat(chat_template_kwargs=brought), **KEY).json["usage"]["prompt_tokens"] < 5


def test_others_are_answered_beside_prompts_that_are_too_long(server: ServerProcess) -> None:
    """``test_operations.py`` shows that they do not wait for these prompts."""
    body = {"prompt": "a b c " * 200_000}  # as few characters as might fit the pool
    with ThreadPoolExecutor(2) as pool:
        huge = [pool.submit(server.post, COMPLETIONS, body, timeout=240, **KEY) for _ in range(2)]
        for _ in range(3):
            assert server.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 2}, timeout=60, **KEY).status == 200
    assert all(answer.result().status in (400, 413) for answer in huge)


# Clients that go --------------------------------------------------------------------------------------------------


def test_a_client_that_goes_while_it_waits_is_noticed(server: ServerProcess) -> None:
    cancelled = server.get("/v1/cache/stats", **KEY).json["server"]["requests"]["cancelled"]
    raw = json.dumps({"prompt": "Tell me a story", "max_tokens": 10000}).encode()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    client.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\n{HOST_AND_KEY}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    server.wait_until(lambda: server.get("/v1/cache/stats", **KEY).json["running"]["running"] == 1)
    client.close()

    def is_cancelled() -> bool:
        stats = server.get("/v1/cache/stats", **KEY).json
        return bool(stats["server"]["requests"]["cancelled"] == cancelled + 1 and not stats["running"]["running"])

    server.wait_until(is_cancelled)


# Models that cannot be loaded -------------------------------------------------------------------------------------


def broken_models(folder: Path, at: Path) -> Iterator[tuple[str, Path]]:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    for name in ("garbage", "short", "missing tensors", "no tokenizer", "unknown type", "own code"):
        copy = at / name.replace(" ", "-")
        shutil.copytree(folder, copy)
        file, config = copy / "model.safetensors", json.loads((copy / "config.json").read_text())
        if name == "garbage":
            file.write_bytes(b"x" * 1000)
        elif name == "short":
            file.write_bytes(file.read_bytes()[:-5000])
        elif name == "missing tensors":
            mx.save_safetensors(str(file), dict(list(weights.items())[:3]))
        elif name == "no tokenizer":
            for part in ("tokenizer.json", "tokenizer_config.json"):
                (copy / part).unlink()
        elif name == "unknown type":
            config = {"model_type": "nope"}
        else:
            config["model_file"] = "own.py"
            (copy / "own.py").write_text(f"open({str(at / 'ran')!r}, 'w')")
        (copy / "config.json").write_text(json.dumps(config))
        yield name, copy


def test_a_model_that_cannot_be_loaded_leaves_the_present_one(
    server: ServerProcess, folder: Path, tmp_path: Path
) -> None:
    prompt = {"prompt": SECRET, "max_tokens": 1, "cache_salt": "models"}
    server.post(COMPLETIONS, prompt, **KEY)
    num_cached = cached(server.post(COMPLETIONS, prompt, **KEY))
    assert num_cached > 60
    for name, path in broken_models(folder, tmp_path):
        answer = server.post(COMPLETIONS, {**prompt, "model": str(path)}, **KEY)
        assert answer.status == 404 and answer.json["error"]["param"] == "model", name
        assert cached(server.post(COMPLETIONS, prompt, **KEY)) == num_cached, name
    assert not (tmp_path / "ran").exists()
    assert server.log.count("is ready") == 1


def test_errors_do_not_tell_what_there_is_on_disk(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    said = set()
    for name in ("file", "folder", "nowhere"):
        for field in ("model", "draft_model", "adapters"):
            path = str(tmp_path / name)
            body = {"prompt": "x", "model": str(tmp_path / "nowhere"), field: path}
            answer = server.post(COMPLETIONS, body, **KEY)
            assert answer.status == 404
            said.add(answer.body.replace(body["model"].encode(), b"PATH"))
    assert len(said) == 1


def test_another_model_takes_the_place_of_the_present_one(
    folder: Path, demo_model_folder: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", demo_model_folder, "gemma3")
    server = ServerProcess(folder, tmp_path, "--kv-cache-memory", "8MB", "--allow-any-model")
    for model in ("default_model", str(other), str(other), folder.name):
        answer = server.post(COMPLETIONS, {"prompt": "Hello there", "max_tokens": 4, "model": model})
        assert answer.status == 200, answer.body
    bodies = [{"prompt": "x", "max_tokens": 2, "model": model} for model in (str(other), folder.name, str(other))]
    together = [threading.Thread(target=server.post, args=(COMPLETIONS, body)) for body in bodies]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join(60)
    assert server.stats()["server"]["requests"] == {"ok": 7, "refused": 0, "failed": 0, "cancelled": 0}
    assert server.stop() == 0 and "Traceback" not in server.log


# The start and the log --------------------------------------------------------------------------------------------


def test_the_log_says_what_is_served_and_no_polls(server: ServerProcess, folder: Path) -> None:
    for path in ("/health", "/v1/cache/stats?blocks=1", "/metrics", "/v1/models"):
        assert server.get(path, **KEY).status == 200
    assert server.post(COMPLETIONS, {"prompt": "Hi"}, **KEY).status == 200
    server.wait_until(lambda: "POST" in server.log)  # written after the answer
    log = server.log
    # Of 32 tokens each, but for the one that is never handed out and the copy of one that is shared in part.
    num_blocks = 8_000_000 // (32 * 512) - 2
    ready = f"is ready, with a KV cache of 8,000,000 bytes, which holds {num_blocks * 32:,} tokens"
    assert f"the model {folder} {ready}" in log
    assert f"API at {server.url}/v1" in log and f"{server.url}/cache" in log
    assert not re.search(r"GET /(health|v1/cache/stats|metrics)", log)
    assert "not recommended for production" not in log
    assert "GET /v1/models" in log and "POST" in log


def test_addresses_that_are_none_are_bad_requests(server: ServerProcess) -> None:
    for line in (b"GET http://[ HTTP/1.1", b"POST http://[ HTTP/1.1", b"HEAD http://[ HTTP/1.1"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall(line + b"\r\nAuthorization: Bearer one\r\nContent-Length: 0\r\n\r\n")
            assert b" 400 " in client.recv(100)


def test_what_can_serve_nobody_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes(b"x" * 1000)
    for flags, env, words in (
        (["--model", str(broken)], {}, "is cut off"),
        (["--kv-cache-memory", "40KB"], {}, "holds no request of this model, which takes at least 49,152"),
        (["--kv-cache-memory", "20KB", "--no-prefix-cache"], {}, "which takes at least 32,768"),
        ([], {"MLX_PAGED_API_KEY": ""}, "MLX_PAGED_API_KEY holds an empty API key"),
        (["--api-key", " "], {}, "--api-key holds an empty API key"),
    ):
        done = commands.run("mlx_paged", "server", "--model", folder, "--port", 0, *flags, timeout=120, **env)
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


# Of a server's interpreter: its model is not loaded before a file is there.
LOADS_LATER = """
import pathlib, time
import mlx_lm.utils

load = mlx_lm.utils.load_model

def load_later(*args, **options):
    while not pathlib.Path({flag!r}).exists():
        time.sleep(0.01)
    return load(*args, **options)

mlx_lm.utils.load_model = load_later
"""


def test_health_tells_loading_from_ready(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    flag = tmp_path / "load"
    (tmp_path / "sitecustomize.py").write_text(LOADS_LATER.format(flag=str(flag)))

    def look(process: ServerProcess) -> bool:
        assert process.process.poll() is None, process.log
        try:
            answer = process.get("/health")
        except OSError:
            return False
        seen.append((answer.status, answer.json["status"]))
        flag.touch()
        return answer.status == 200

    monkeypatch.setattr(ServerProcess, "is_up", property(look))
    server = ServerProcess(folder, tmp_path, cold=True, PYTHONPATH=str(tmp_path))
    assert seen[0] == (503, "loading") and seen[-1] == (200, "ok") and len(set(seen)) == 2
    assert server.stop() == 0, server.log


# The last one with this server: what never ends keeps its process busy for some seconds more, and others wait longer.
@pytest.mark.slow
@pytest.mark.parametrize("stays", [False, True])
def test_a_template_that_never_ends_holds_up_nobody(server: ServerProcess, stays: bool) -> None:
    """Whether its client goes or stays for the end of the time that there is for a prompt."""
    raw = json.dumps(chat(chat_template_kwargs={"chat_template": ENDLESS})).encode()
    head = f"POST {CHAT} HTTP/1.1\r\n{HOST_AND_KEY}Content-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=90) as client:
        client.sendall(head + raw)
        for _ in range(2):
            assert server.post(CHAT, chat(), timeout=60, **KEY).status == 200
        if stays:
            answer = b"".join(iter(lambda: client.recv(65536), b""))
            assert b" 400 " in answer[:20] and b"was not made within" in answer
    server.wait_until(lambda: server.get("/v1/cache/stats", **KEY).json["running"]["waiting"] == 0)
