"""Log-probabilities of a prompt's own tokens are those of one call of the model."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from mlx_paged.patches.server.answers import scoring
from mlx_paged.patches.server.answers.scoring import PromptScoring

ARGS = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "rms_norm_eps": 1e-5}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50, "tie_word_embeddings": False}


def slices(wanted: PromptScoring, model: llama.Model, tokens: list[int]) -> int:
    """Score a prompt to its end. Returns in how many slices."""
    number = 1
    while not wanted.step(model, tokens):
        number += 1
    return number


@pytest.mark.parametrize("length", [1, 2, 4, 5, 9, 14])
def test_chunks_make_no_difference(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK", 4)
    mx.random.seed(1)
    model = llama.Model(llama.ModelArgs.from_dict({**ARGS, **HEADS}))
    tokens = [(7 * place + 3) % 50 for place in range(length)]
    logits = model(mx.array([tokens]))[0]
    rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    wanted = PromptScoring(3)
    assert slices(wanted, model, tokens) == max(1, -(-(length - 1) // 4))
    assert wanted.logprobs is not None and len(wanted.logprobs) == len(wanted.top) == length - 1
    for place, (logprob, top) in enumerate(zip(wanted.logprobs, wanted.top, strict=True)):
        row = rows[place].tolist()
        assert logprob == pytest.approx(row[tokens[place + 1]], abs=1e-4)
        assert [token for token, _ in top] == sorted(range(50), key=lambda token: -row[token])[:3]
        assert [each for _, each in top] == pytest.approx(sorted(row, reverse=True)[:3], abs=1e-4)
    again = wanted.logprobs
    assert slices(wanted, model, tokens) == 1 and wanted.logprobs is again
    bare = PromptScoring(0)
    bare.step(model, tokens)
    bare.drop()
    slices(bare, model, tokens)
    assert bare.logprobs == pytest.approx(again, abs=1e-4) and not any(bare.top)
