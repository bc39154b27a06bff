"""--kv-bits, --kv-rotate and --prompt-lookup of mlx_paged.generate and mlx_paged.server, run as processes.
tests/test_config.py covers their values."""

import json
from pathlib import Path

import pytest

from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.http import parsed
from mlx_paged.server.requests.chat import CompletionBody
from tests.support.processes.small_model import PROMPT, generate, text_of

BITS = ("--kv-bits", "4", "--kv-group-size", "32")
QUANTISED = "quantised in 3 layer(s)"


def test_kv_bits_quantise_pages_alone_and_in_a_batch(folder: Path, tmp_path: Path) -> None:
    flags = ("--kv-bits", "8", "--kv-group-size", "32")
    alone = generate(folder, "--prompt", PROMPT, *flags, "--cache-stats")
    assert QUANTISED in alone.stderr and "Warning" not in alone.stderr
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    batch = generate(folder, "--prompts-file", prompts, *flags, "--cache-stats")
    assert json.loads(batch.stdout)["text"].strip() == text_of(alone) and QUANTISED in batch.stderr
    pair = generate(folder, "--prompt", PROMPT, "--kv-bits", "8,4", "--kv-group-size", "32", "--cache-stats")
    assert text_of(pair) and QUANTISED in pair.stderr
    late = ("--prompt", PROMPT, *flags, "--quantized-kv-start", "20")
    own = generate(folder, *late)
    assert text_of(own) == text_of(generate(folder, *late, module="mlx_lm"))
    assert own.stderr.count("NotPagedWarning") == 1 and "quantises from the first token on" in own.stderr
    other = generate(folder, "--prompt", PROMPT, "--kv-bits", 3)
    assert other.returncode == 0 and "use mlx-lm's own cache" in other.stderr
    assert other.stderr.count("Warning") == 1


def test_kv_rotate_flag_and_variable_give_the_same_text(folder: Path) -> None:
    rotated = generate(folder, "--prompt", PROMPT, *BITS, "--kv-rotate", "--cache-stats")
    assert text_of(rotated) and QUANTISED in rotated.stderr and "Warning" not in rotated.stderr
    from_env = generate(folder, "--prompt", PROMPT, *BITS, MLX_PAGED_KV_ROTATE="1")
    assert text_of(from_env) == text_of(rotated)


# Look-up ----------------------------------------------------------------------------------------------------------


def test_prompt_lookup_outside_0_to_64_is_refused_in_requests() -> None:
    body, _ = parsed(json.dumps({"prompt": "x", "prompt_lookup": 9}).encode(), CompletionBody)
    assert body.prompt_lookup == 9
    for value in (-1, 65, 1.0, "4", True):
        with pytest.raises(RequestRefused, match="prompt_lookup"):
            parsed(json.dumps({"prompt": "x", "prompt_lookup": value}).encode(), CompletionBody)
