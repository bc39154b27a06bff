"""A tiny random model in a folder that mlx-lm's server loads, with the first tokens of the demo model's tokenizer."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, llama, mamba

VOCAB = 4096  # of the 49,152: servers load it and compute its logits in a fraction of the time
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": False},
    "llama of wide heads": {
        **SHAPE,
        "model_type": "llama",
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
        "head_dim": 64,
    },
    "gemma3": {
        **SHAPE,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window": 40,
        "sliding_window_pattern": 2,
    },
    "mamba": {
        "model_type": "mamba",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
}
MODULES: dict[str, Any] = {"llama": llama, "llama of wide heads": llama, "gemma3": gemma3_text, "mamba": mamba}


def make_tiny_model(folder: Path, tokenizer: Path, kind: str = "llama", seed: int = 0) -> Path:
    """Write a model into ``folder``, with tokens from the folder ``tokenizer``. Weights depend on the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[kind]
    module = MODULES[kind]
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    # Random models of this size repeat one token for ever; larger embeddings vary their answers.
    weights = {name: 4 * x if "embed" in name else x for name, x in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    eos = json.loads((tokenizer / "config.json").read_text())["eos_token_id"]
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
    copy_tokenizer(tokenizer, folder)
    return folder


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy the tokenizer of the folder ``tokenizer`` into another, with its first ``VOCAB`` tokens only."""
    (folder / "tokenizer.json").write_text(_first_tokens(tokenizer))
    shutil.copy(tokenizer / "tokenizer_config.json", folder)


@functools.cache
def _first_tokens(tokenizer: Path) -> str:
    """Return the file of a BPE tokenizer without the tokens from ``VOCAB`` on, which its last merges make."""
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    bpe = content["model"]
    bpe["vocab"] = {token: number for token, number in bpe["vocab"].items() if number < VOCAB}
    bpe["merges"] = [pair for pair in bpe["merges"] if "".join(pair) in bpe["vocab"]]
    return json.dumps(content)


# Unneeded tokens of the demo model's tokenizer, and their names here.
RENAMED = {"<reponame>": "<think>", "<filename>": "</think>"}
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for tool_call in message.tool_calls or [] %}<tool_call>
{"name": "{{ tool_call.name or tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""


def make_tools_model(folder: Path, tokenizer: Path) -> Path:
    """Write a model with tools and reasoning into ``folder``; ``tokenizer`` is the demo model's folder."""
    make_tiny_model(folder, tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # earlier settings repeat the tokens
        text = (folder / name).read_text()
        for old, new in RENAMED.items():
            assert old in text or name == "tokenizer_config.json"
            text = text.replace(old, new)
        (folder / name).write_text(text)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder
