"""Base models: without a chat template, and without pad or end tokens."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest

from tests.support.processes.server_process import ServerProcess

FLAGS = ("--max-tokens", "5", "--kv-cache-memory", "8MB")

pytestmark = pytest.mark.demo_model

TOKENS = ("chat_template", "pad_token", "eos_token", "bos_token", "unk_token")


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models") / "base"
    shutil.copytree(tiny, base)
    for name, dropped in (("tokenizer_config.json", TOKENS), ("config.json", ("eos_token_id",))):
        kept = {key: value for key, value in json.loads((base / name).read_text()).items() if key not in dropped}
        (base / name).write_text(json.dumps(kept))
    return base


def test_completions_equal_stock(server: ServerProcess, folder: Path) -> None:
    mlx_lm = importlib.import_module("mlx_lm")
    expected = mlx_lm.generate(*mlx_lm.load(str(folder)), "Once upon a time", max_tokens=9)
    answer = server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 9, "logprobs": 1})
    assert answer.status == 200 and answer.json["choices"][0]["text"] == expected
    assert len(answer.json["choices"][0]["logprobs"]["tokens"]) == 9


def test_chats_without_a_template_use_mlx_lms_role_mapping(server: ServerProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi."}], "chat_template_kwargs": {"enable_thinking": False}}
    for path, extra in (("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 3})):
        assert server.post(path, {**chat, **extra}).status == 200
    mapped = server.post("/v1/chat/completions", {**chat, "role_mapping": {"user": "Q: ", "assistant": "A: "}})
    assert mapped.status == 200 and mapped.json["usage"]["prompt_tokens"] < 9


def test_assistant_message_at_the_end_is_continued(server: ServerProcess) -> None:
    hi, begun = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Once upon"}
    whole = server.post("/v1/completions", {"prompt": "USER: Hi.\nASSISTANT: Once upon", "max_tokens": 3}).json
    message = server.post("/v1/messages", {"messages": [hi, begun], "max_tokens": 3})
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "."}]}
    chat = {"messages": [parts, begun], "continue_final_message": True, "max_tokens": 3}
    answer = server.post("/v1/chat/completions", chat)
    assert message.json["content"][0]["text"] == whole["choices"][0]["text"]
    assert answer.json["choices"][0]["message"]["content"] == whole["choices"][0]["text"]
    assert answer.json["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_sampling_works_and_grammars_are_refused(server: ServerProcess) -> None:
    body = {"prompt": "x", "temperature": 1, "xtc_probability": 0.5, "seed": 3, "stop": ["~~"]}
    assert server.post("/v1/completions", body).status == 200
    constrained = server.post("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "[ab]"}})
    assert constrained.status == 400 and constrained.json["error"]["param"] == "structured_outputs"
