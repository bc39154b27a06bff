"""Access to a server: model names, keys, salts, templates, and clients that ask for too much."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.processes.page_document import NEEDS_NODE, page_of
from tests.support.processes.server_process import BLOCK_SIZE, Answer, ServerProcess
from tests.support.processes.server_process import cached as cached_tokens

pytestmark = pytest.mark.demo_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEY, OTHER = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
SECRET = "You are the assistant of a bank. The word that opens the vault is swordfish. Never tell it to anybody. " * 3


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["--max-tokens", "3", "--kv-cache-memory", "8MB", "--allow-any-model"]
    flags += ["--served-model-name", "house", "--served-model-name", "org/house"]
    process = ServerProcess(folder, tmp_path_factory.mktemp("server"), *flags, MLX_PAGED_API_KEY="one,two\n")
    yield process
    process.check_end()


def cached(answer: Answer) -> int:
    assert answer.status == 200, answer.body
    return cached_tokens(answer.json)


def chat(content: str = "Hi.", **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **options}


# Names ------------------------------------------------------------------------------------------------------------


def test_model_is_served_under_all_its_names(server: ServerProcess, folder: Path) -> None:
    listed = [model["id"] for model in server.get("/v1/models", **KEY).json["data"]]
    assert listed[:4] == ["house", "org/house", "tiny-llama", str(folder)]
    for name in [*listed[:4], "default_model"]:
        answer = server.post(COMPLETIONS, {"prompt": "Hello", "model": name}, **KEY)
        assert answer.status == 200 and answer.json["model"] == ("house" if name == "default_model" else name)
        one = server.get(f"/v1/models/{name}", **KEY)
        assert one.status == 200 and one.json["id"] == name and one.json["object"] == "model"
    assert server.get("/v1/models/org%2Fhouse", **KEY).json["id"] == "org/house"
    for name in ("nobody", "house/x", "tiny"):
        missing = server.get(f"/v1/models/{name}", **KEY)
        assert missing.status == 404 and name in missing.json["error"]["message"]
    assert "unloaded" not in server.log and server.log.count("is ready") == 1  # it was the same one all the time


def test_root_redirects_to_the_page_and_head_is_answered(server: ServerProcess) -> None:
    assert server.get("/openapi.json").json["security"] == [{"key": []}]
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


def test_prefixes_are_not_shared_between_keys_or_salts(server: ServerProcess) -> None:
    prompt = {"prompt": SECRET, "max_tokens": 1}
    assert server.post(COMPLETIONS, prompt).status == 401
    assert cached(server.post(COMPLETIONS, prompt, **KEY)) == 0
    assert cached(server.post(COMPLETIONS, prompt, **OTHER)) == 0
    assert cached(server.post(COMPLETIONS, prompt, **KEY)) > 60
    salted = {**prompt, "cache_salt": "mine"}
    assert cached(server.post(COMPLETIONS, salted, **KEY)) == 0
    assert cached(server.post(COMPLETIONS, salted, **KEY)) > 60
    assert cached(server.post(COMPLETIONS, {**salted, "seed": 1}, **KEY)) > 60  # a request with a seed
    assert cached(server.post(COMPLETIONS, {**salted, "cache_salt": "other", "seed": 1}, **KEY)) == 0
    assert cached(server.post(COMPLETIONS, {**salted, "seed": 1}, **OTHER)) == 0
    for wrong in ("", 3, "x" * 1001):
        assert server.post(COMPLETIONS, {**prompt, "cache_salt": wrong}, **KEY).json["error"]["param"] == "cache_salt"


def test_key_in_x_api_key_is_accepted_beside_any_authorization(server: ServerProcess) -> None:
    """Clients behind a proxy send the proxy's credentials, too."""
    for scheme in ("Basic dXNlcg==", "Bearer other", "Bearer", ""):
        both = {"Authorization": scheme, "x-api-key": "two"}
        assert server.post(CHAT, chat(), **both).status == 200
        assert server.post(CHAT, chat(), **{**both, "x-api-key": "three"}).status == 401
    assert "client='key 2'" in server.log and "two" not in server.log


@NEEDS_NODE
def test_cached_share_of_each_key_is_in_the_metrics_and_on_the_page(server: ServerProcess, tmp_path: Path) -> None:
    names = {"key 1": KEY, "key 2": OTHER}
    before, _ = figures_of_clients(server, tmp_path)
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


def test_priority_header_is_accepted_or_refused(server: ServerProcess) -> None:
    assert server.post(CHAT, chat(), **KEY, **{"X-Priority": "-3"}).status == 200
    for wrong in ("high", "1.5", "99999999"):
        refused = server.post(CHAT, chat(), **KEY, **{"X-Priority": wrong})
        assert refused.status == 400 and refused.json["error"]["param"] == "priority"


# Prompts ----------------------------------------------------------------------------------------------------------


def test_unsafe_chat_template_arguments_are_refused(server: ServerProcess) -> None:
    assert server.post(CHAT, chat(chat_template_kwargs={"unknown": 1}), **KEY).status == 200
    for kwargs in (
        {"padding": "max_length", "max_length": 4_000_000},
        {"return_tensors": "np"},
        {"tokenizer_kwargs": {"padding": "max_length", "max_length": 3000}},
        {"tokenize": False},
        {"return_dict": True},
        {"chat_template": "{{ messages }}"},
    ):
        answer = server.post(CHAT, chat(chat_template_kwargs=kwargs), **KEY)
        assert answer.status == 400 and answer.json["error"]["param"] == "chat_template_kwargs"


# Models that cannot be loaded -------------------------------------------------------------------------------------


def breaks(copy: Path, at: Path) -> dict[str, Any]:
    """Return what makes a copy of a model unusable, by name."""
    file, config = copy / "model.safetensors", copy / "config.json"
    few: Any = dict(list(mx.load(str(file)).items())[:3])  # type: ignore[union-attr]
    own = {**json.loads(config.read_text()), "model_file": "own.py"}
    (copy / "own.py").write_text(f"open({str(at / 'ran')!r}, 'w')")
    return {
        "garbage": lambda: file.write_bytes(b"x" * 1000),
        "short": lambda: file.write_bytes(file.read_bytes()[:-5000]),
        "missing tensors": lambda: mx.save_safetensors(str(file), few),
        "no tokenizer": lambda: [path.unlink() for path in copy.glob("tokenizer*.json")],
        "unknown type": lambda: config.write_text('{"model_type": "nope"}'),
        "own code": lambda: config.write_text(json.dumps(own)),
    }


def test_model_that_cannot_be_loaded_leaves_the_current_one(
    server: ServerProcess, folder: Path, tmp_path: Path
) -> None:
    prompt = {"prompt": SECRET, "max_tokens": 1, "cache_salt": "models"}
    server.post(COMPLETIONS, prompt, **KEY)
    num_cached = cached(server.post(COMPLETIONS, prompt, **KEY))
    assert num_cached > 60
    for name in ("garbage", "short", "missing tensors", "no tokenizer", "unknown type", "own code"):
        copy = tmp_path / name.replace(" ", "-")
        shutil.copytree(folder, copy)
        breaks(copy, tmp_path)[name]()
        answer = server.post(COMPLETIONS, {**prompt, "model": str(copy)}, **KEY)
        assert answer.status == 404 and answer.json["error"]["param"] == "model", name
        assert cached(server.post(COMPLETIONS, prompt, **KEY)) == num_cached, name
    assert not (tmp_path / "ran").exists()
    assert server.log.count("is ready") == 1


def test_errors_do_not_reveal_what_is_on_disk(server: ServerProcess, tmp_path: Path) -> None:
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


# The start and the log --------------------------------------------------------------------------------------------


def test_log_names_the_model_and_addresses_but_no_polls(server: ServerProcess, folder: Path) -> None:
    for path in ("/health", "/v1/cache/stats?blocks=1", "/metrics", "/v1/models"):
        assert server.get(path, **KEY).status == 200
    assert server.post(COMPLETIONS, {"prompt": "Hi"}, **KEY).status == 200
    server.wait_until(lambda: "POST" in server.log)  # written after the answer
    log = server.log
    # Without the null block and one for the copy of a block that is shared in part.
    num_blocks = 8_000_000 // (BLOCK_SIZE * 512) - 2
    ready = f"is ready, with a KV cache of 8,000,000 bytes, which holds {num_blocks * BLOCK_SIZE:,} tokens"
    assert f"the model {folder} {ready}" in log
    assert f"API at {server.url}/v1" in log and f"{server.url}/cache" in log
    assert not re.search(r"GET /(health|v1/cache/stats|metrics)", log)
    assert "not recommended for production" not in log
    assert "GET /v1/models" in log and "POST" in log


def test_malformed_addresses_are_bad_requests(server: ServerProcess) -> None:
    for line in (b"GET http://[ HTTP/1.1", b"POST http://[ HTTP/1.1", b"HEAD http://[ HTTP/1.1"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall(line + b"\r\nAuthorization: Bearer one\r\nContent-Length: 0\r\n\r\n")
            assert b" 400 " in client.recv(100)


# Runs in the server's interpreter: the model is not loaded until a file exists.
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


def test_health_is_503_while_loading_and_200_when_ready(serve: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    flag = tmp_path / "load"
    (tmp_path / "sitecustomize.py").write_text(LOADS_LATER.format(flag=str(flag)))

    class Loading(ServerProcess):
        @property
        def is_up(self) -> bool:
            try:
                answer = self.get("/health")
            except OSError:
                return False
            seen.append((answer.status, answer.json["status"]))
            flag.touch()
            return answer.status == 200

    serve(kind=Loading, cold=True, PYTHONPATH=str(tmp_path))
    assert seen[0] == (503, "loading") and seen[-1] == (200, "ok") and len(set(seen)) == 2
