"""The demo model answers with stock mlx-lm's exact tokens."""

import functools
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import BatchGenerator, generate_step

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.attention import dispatch

SLOW = pytest.mark.slow  # on a CPU each token of prompt and answer takes some 0.1 to 0.4 s
PROMPTS = {
    "short": "Write two sentences about the sea.",
    "list": "Name five colours and say where in nature each is seen.",
}


def voyage(num_days: int) -> str:
    days = (f"On day {day} the wind was {day % 7} and we sailed {3 * day} miles." for day in range(1, num_days + 1))
    return f"Here are notes of a voyage. {' '.join(days)} Sum up the voyage in a few words."


PROMPTS |= {"two blocks": voyage(1), "several blocks": voyage(6), "long": voyage(59)}
QUICK = ("start", 4, 8)  # a block of 8 tokens; the answer goes on in a second one
START = "The wind rose at dawn, and the old ship left the harbour for the sea with nine men"  # without the template


@functools.cache
def load_demo(folder: Path):
    return load(str(folder))


def prompt_named(tokenizer, name: str) -> mx.array:
    if name == QUICK[0]:
        return mx.array(tokenizer.encode(START)[:7])
    return mx.array(
        tokenizer.apply_chat_template([{"role": "user", "content": PROMPTS[name]}], add_generation_prompt=True)
    )


@pytest.mark.demo_model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "num_tokens", "block_size"), [QUICK, *(pytest.param(name, 200, 32, marks=SLOW) for name in PROMPTS)]
)
def test_demo_model_gives_stock_tokens(name: str, num_tokens: int, block_size: int, demo_model_folder: Path) -> None:
    model, tokenizer = load_demo(demo_model_folder)
    prompt = prompt_named(tokenizer, name)
    assert prompt.size > {"two blocks": 32, "several blocks": 100, "long": 1000}.get(name, 0)

    def run() -> list[int]:
        return [token for token, _ in generate_step(prompt, model, max_tokens=num_tokens)]

    expected = run()
    mlx_paged.apply_patches(PagedConfig(block_size=block_size))
    got = run()
    assert mlx_paged.last_dispatch().path == "gather"
    assert got == expected
    assert len(got) == num_tokens
    pool = mlx_paged.pool_of(model)
    pool.check_integrity()
    assert pool.stats().peak_live_blocks == -(-(prompt.size + num_tokens) // block_size)


@pytest.mark.gpu
@pytest.mark.demo_model
@pytest.mark.timeout(1200)
def test_demo_model_through_kernels_gives_stock_tokens(
    demo_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run three prompts in f32, alone and as a batch, in compiled steps."""
    model, tokenizer = load(str(demo_model_folder))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": PROMPTS[name]}], add_generation_prompt=True)
        for name in ("short", "two blocks", "several blocks")
    ]
    num_tokens = 200

    def alone(prompt: list[int]) -> list[int]:
        return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=num_tokens)]

    expected = [alone(prompt) for prompt in prompts]
    mlx_paged.apply_patches()
    compiled: list[int] = []
    record = dispatch.record_compiled
    monkeypatch.setattr(dispatch, "record_compiled", lambda layers: (compiled.append(layers), record(layers)))
    assert [alone(prompt) for prompt in prompts] == expected
    assert mlx_paged.last_dispatch().path == "kernel"
    assert len(compiled) > 3 * num_tokens * 3 // 4
    del compiled[:]
    generator = BatchGenerator(model, max_tokens=num_tokens)
    tokens: dict[int, list[int]] = {uid: [] for uid in generator.insert(prompts)}
    while any(len(row) < num_tokens for row in tokens.values()):
        for response in generator.next()[1]:
            tokens[response.uid].append(response.token)
    assert list(tokens.values()) == expected
    assert len(compiled) > num_tokens // 2
    generator.close()
