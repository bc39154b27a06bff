"""What commands refuse: flags that do not go together, values out of range, folders and budgets that cannot be used."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import setup_arg_parser

from mlx_paged.cli.generate import check_batch_arguments, extend_parser
from mlx_paged.errors import ConfigError
from tests.support.processes import commands

BATCH, PROMPT = ("generate", "--model", "FOLDER", "--prompts-file", "-"), ("generate", "--model", "FOLDER", "-p", "w1")
SERVER = ("server", "--model", "FOLDER", "--port", "0")
BITS = ("--kv-bits", "4", "--kv-group-size", "32")
ON_CPU = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="a GPU may have the kernel")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--output", "x"), "need --prompts-file"),
        (("--mtp",), "--mtp needs --prompts-file"),
        (("--prompts-file", "p", "--resume"), "--resume needs --output"),
        (("--prompts-file", "p", "--no-paged"), "--no-paged cannot be combined with --prompts-file"),
        (("--prompts-file", "p", "--max-kv-size", "9"), "--max-kv-size cannot be combined with --prompts-file"),
        (("--prompts-file", "p", "--batch-size", "0"), "at least 1"),
        (("--prompts-file", "p", "-m", "-1"), "--max-tokens must be at least 1 with --prompts-file, got -1"),
        (("--prompts-file", "p", "--chat-template-config", "{x"), "--chat-template-config is not valid JSON"),
        (("--prompts-file", "p", "--draft-model", "d", "--prompt-lookup", "4"), "both propose tokens"),
        (("--prompts-file", "p", "--mtp", "--prompt-lookup", "4"), "--mtp and --prompt-lookup both propose tokens"),
        (("--prompts-file", "p", "--mtp", "--draft-model", "d"), "both propose tokens"),
    ],
)  # fmt: skip
def test_flags_that_do_not_go_together_are_refused(flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_batch_arguments(extend_parser(setup_arg_parser()).parse_args(flags))


# Arguments, exit status and the words of the error. FOLDER is a model's.
REFUSED: list[tuple[tuple[str, ...], int, str]] = [
    ((*BATCH[:-1], "missing.txt"), 1, "missing.txt cannot be read"),
    (BATCH, 1, "stdin holds no prompt"),
    ((*BATCH, "--kv-bits", "3"), 1, "kv_bits must be 8, 4 or (8, 4), got 3"),
    ((*BATCH, "--kv-bits", "8", "--quantized-kv-start", "9"), 1, "quantized_kv_start must be 0 or 5000"),
    ((*BATCH, "--mtp"), 1, "mtp: model type llama is not supported; supported: "),
    ((*PROMPT, "--kv-bits", "8,4", "--no-paged"), 1, "requires the paged cache; remove --no-paged"),
    ((*PROMPT, "--kv-rotate"), 1, "kv_rotate requires kv_bits"),
    ((*PROMPT, "--kv-rotate", "--kv-bits", "3"), 1, "kv_rotate requires kv_bits of 8, 4 or 8,4"),
    ((*PROMPT, "--kv-rotate", *BITS, "--no-paged"), 1, "requires the paged cache; remove --no-paged"),
    ((*PROMPT, "--prompt-lookup", "4"), 1, "--prompt-lookup needs --prompts-file"),
    ((*PROMPT, "--pipeline"), 1, "--pipeline needs several ranks"),
    ((*PROMPT, "--kv-block-size", "33"), 2, "block size must be auto, 8, 16, 32, 64 or 128, not '33'"),
    (
        (*PROMPT, "-m", "0"),
        2,
        "max_tokens must be -1, or a whole number of at least 1, not '0'\n",
    ),
    (("generate", "--promt", "x"), 2, "error: unrecognized arguments: --promt x; did you mean --prompt?\n"),
    (("chat", "--kv-cache-memry", "8GB"), 2, "; did you mean --kv-cache-memory?\n"),
    (("chat", "--model", "./nope"), 1, "mlx_paged: model folder ./nope does not exist\n"),
    (("chta",), 1, "mlx_paged: unknown command 'chta'; did you mean chat?\n"),
    (("server", "--modle", "x"), 2, "; did you mean --model?\n"),
    (
        ("server", "--port", "99999"),
        2,
        "the port must be a whole number from 0 to 65535, not '99999'\n",
    ),
    (("server", "--port", "-1"), 2, "the port must be a whole number from 0 to 65535, not '-1'\n"),
    (
        ("server", "--max-tokens", "0"),
        2,
        "max_tokens must be a whole number of at least 1, not '0'\n",
    ),
    (("server", "--model", "./nope"), 78, "model folder ./nope does not exist\n"),
    (("server", "--prefix-cache-dir", __file__), 78, "test_refused_commands.py is a file, not a folder\n"),
    ((*SERVER, "--no-prefix-cache", "--prefix-cache-ttl", "1"), 78, "cannot be combined with"),
    ((*SERVER, "--kv-block-size", "7"), 2, "block size must be auto, 8"),
    ((*SERVER, "--kv-rotate"), 78, "kv_rotate requires kv_bits"),
    ((*SERVER, "--mtp"), 78, "mtp: model type llama is not supported; supported: "),
    ((*SERVER, "--mtp", "--draft-model", "FOLDER"), 78, "--draft-model and --mtp both propose tokens"),
    ((*SERVER, "--kv-block-size", "32", "--kv-cache-memory", "100KB"), 78, "one request of this model needs at least "),
    ((*SERVER, "--kv-cache-memory", "20KB", "--no-prefix-cache"), 78, "which needs at least "),
    ((*SERVER, "--api-key", " "), 78, "--api-key contains an empty API key"),
]


@pytest.mark.parametrize(("arguments", "status", "words"), REFUSED, ids=lambda value: str(value)[-60:])
def test_mistake_is_refused_without_a_traceback(
    arguments: tuple[str, ...], status: int, words: str, folder: Path
) -> None:
    run = commands.run("mlx_paged", *(str(folder) if each == "FOLDER" else each for each in arguments))
    assert run.returncode == status and words in run.stderr and "Traceback" not in run.stderr, run.stderr
    assert not words.endswith("\n") or run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "name", "value", "words"),
    [
        (PROMPT, 1, "MLX_PAGED_BLOCK_SIZE", "31", "MLX_PAGED_BLOCK_SIZE: block size must be auto, 8,"),
        pytest.param(PROMPT, 1, "MLX_PAGED_KERNEL", "on", "kernel=on, but MLX", marks=ON_CPU),
        (SERVER, 78, "MLX_PAGED_API_KEY", "", "MLX_PAGED_API_KEY contains an empty API key"),
    ],
)
def test_bad_variable_is_refused(
    arguments: tuple[str, ...], status: int, name: str, value: str, words: str, folder: Path
) -> None:
    run = commands.run("mlx_paged", *(str(folder) if each == "FOLDER" else each for each in arguments), **{name: value})
    assert run.returncode == status and words in run.stderr and "Traceback" not in run.stderr, run.stderr
