"""The commands on a small model folder, as processes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.support.models.builders import COMMON, HEADS, build
from tests.support.models.tokenizers import word_tokenizer
from tests.support.processes import commands

PROMPT = " ".join(f"w{(7 * i) % 300}" for i in range(60))


def save_model(path: Path, **changes: int) -> Path:
    path.mkdir(exist_ok=True)
    changes = {"hidden_size": 96, "num_hidden_layers": 3, **changes}  # transformers requires a multiple of the heads
    model = build("llama", **changes)
    config = {**COMMON, **HEADS, "model_type": "llama", "tie_word_embeddings": False, **changes}
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}w1 {{ message['content'] }} w2 {% endfor %}"
    tokenizer.save_pretrained(path)
    return path


def command(*args: object, module: str = "mlx_paged", **env: str) -> subprocess.CompletedProcess[str]:
    return commands.run(module, *args, **env)


def generate(folder: Path, *args: object, module: str = "mlx_paged", **env: str) -> subprocess.CompletedProcess[str]:
    fixed = ("--model", folder, "--max-tokens", 24, "--ignore-chat-template")
    return command("generate", *fixed, *args, module=module, **env)


def text_of(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 0, run.stderr
    return run.stdout.split("==========")[1].strip()


def check_error(run: subprocess.CompletedProcess[str], message: str, code: int = 1) -> None:
    assert run.returncode == code, (run.stdout, run.stderr)
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def records(text: str) -> list[dict[str, Any]]:
    """Return the results in the order of the file: they are written as they finish."""
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda record: record["index"])
