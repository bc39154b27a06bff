"""Work for bench_lookup.py: answers that repeat their prompt, and answers that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler, make_sampler
from support.bench_common import PRESETS, SEED, BenchError, random_model
from support.changed_preset import changed_preset

WORDS = 200  # that a model of random weights says
LIKELY = 4  # that may follow each of them in prose
NAMES = ("Anna", "Bela", "Carl", "Dora", "Emil", "Fina", "Gert", "Hana")
TEXT = (
    "{name} opened the old workshop at seven in the morning, lit the stove, and put the kettle on. The clocks on the "
    "wall had stopped at different hours, and {name} liked to guess which of them had gone on longest. A customer "
    "came in with a watch wrapped in a handkerchief. It had been his grandfather's, he said, and it had lost four "
    "minutes a day since the spring. {name} opened the case, found a grain of sand between two wheels, and laughed. "
    "The man paid with two coins and a jar of honey, and the watch has kept time ever since."
)
COPY = "Repeat the following text word for word, and say nothing else.\n\n{text}"
PROSE = "Write a long story about a person called {name}, who finds something strange on a journey."


class Work(NamedTuple):
    """What a batch does.

    Attributes:
        name: ``copy`` or ``prose``.
        prompts: tokens, of as many requests as are wanted.
        sampler: of all of them.
    """

    name: str
    prompts: Callable[[int], list[list[int]]]
    sampler: Callable[[mx.array], mx.array]


def successor_model(preset: str, dtype: str | None) -> Any:
    """A model of random weights whose next token depends nearly on the last one alone, one of WORDS, and whose steps
    cost what any other's do."""
    if PRESETS[preset].module.__name__.rsplit(".", 1)[-1] != "llama":
        raise BenchError(f"--random {preset}: an answer's words can be foretold of Llama shapes only")
    with changed_preset(preset, tie_word_embeddings=False):
        model = random_model(preset, dtype)
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = linear.weight * 1e-3
    head = model.lm_head.weight
    model.lm_head.weight = mx.where(mx.arange(head.shape[0])[:, None] < WORDS, head, 0)
    mx.eval(model.parameters())
    return model


def successors(model: Any) -> list[int]:
    """The most likely word after each of the words."""
    return mx.argmax(model(mx.arange(WORDS, dtype=mx.uint32)[:, None])[:, -1], axis=-1).tolist()  # type: ignore


def random_work(model: Any, prompt: int) -> list[Work]:
    """For a :func:`successor_model`: prompts that hold the greedy answer, and samples of a few words each."""
    following = successors(model)
    rng = np.random.default_rng(SEED)

    def copies(batch: int) -> list[list[int]]:
        starts = rng.permutation(WORDS)[:batch].tolist()
        prompts = []
        for start in starts:
            words = [start]
            while len(words) < prompt:
                words.append(following[words[-1]])
            prompts.append([*words, start])
        return prompts

    def prose(batch: int) -> list[list[int]]:
        return rng.integers(0, WORDS, (batch, prompt)).tolist()  # type: ignore[no-any-return]

    return [Work("copy", copies, greedy_sampler), Work("prose", prose, make_sampler(temp=1.0, top_k=LIKELY))]


def text_work(tokenizer: Any) -> list[Work]:
    """For a model that was trained to chat."""

    def chats(wish: str) -> Callable[[int], list[list[int]]]:
        def prompts(batch: int) -> list[list[int]]:
            wishes = [
                wish.format(text=TEXT.format(name=n), name=n) for n in (NAMES[i % len(NAMES)] for i in range(batch))
            ]
            chat = [[{"role": "user", "content": each}] for each in wishes]
            return [list(tokenizer.apply_chat_template(each, add_generation_prompt=True)) for each in chat]

        return prompts

    return [Work("copy", chats(COPY), greedy_sampler), Work("prose", chats(PROSE), make_sampler(temp=0.8))]
