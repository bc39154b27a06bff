"""The server's models: the next one is checked before the present one goes."""

from __future__ import annotations

import base64
import gc
import json
import logging
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import server as upstream

from mlx_paged.errors import ModelFolderError
from mlx_paged.model_folder import check_weight_files
from mlx_paged.patches.server import model_switch
from mlx_paged.patches.server.model_switch import Candidate
from mlx_paged.patches.server.prepared_request import RenderedTokenizer
from mlx_paged.serve.model_names import ModelNames
from tests.support.models.tiny_model import make_tiny_model

pytestmark = pytest.mark.demo_model

# One pixel.
PNG = (
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d494441"
    "5478da6364f8cf500f00038601805a347d6b0000000049454e44ae426082"
)


def provider_of(model: str) -> Any:
    args = SimpleNamespace(
        model=model,
        adapter_path=None,
        draft_model=None,
        pipeline=False,
        trust_remote_code=False,
        chat_template="",
        use_default_chat_template=False,
    )
    return upstream.ModelProvider(args)


@pytest.fixture(scope="module")
def folders(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    at = tmp_path_factory.mktemp("models")
    return [str(make_tiny_model(at / str(seed), demo_model_folder, seed=seed)) for seed in range(2)]


@pytest.mark.parametrize("room", [True, False])
def test_a_candidate_takes_the_present_models_place(
    folders: list[str], room: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provider = provider_of(folders[0])
    provider.load_default()
    before = weakref.ref(provider.model)
    candidate = Candidate(provider, (folders[1], None, None))
    assert provider.model is before() and provider.model_key == (folders[0], None, None)
    monkeypatch.setattr(model_switch, "free_memory", lambda: 1 << 60 if room else 1000)
    there: list[bool] = []
    eval_now = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *a: (there.append(before() is not None), eval_now(*a)))
    with caplog.at_level(logging.WARNING):
        candidate.take_over()
    assert there[0] == room  # whether both were in memory while the new one was read
    assert ("memory does not hold two models" in caplog.text) == (not room)
    assert provider.model_key == (folders[1], None, None) and provider.model is not None
    expected = mx.load(folders[1] + "/model.safetensors")
    assert isinstance(expected, dict)
    name = "lm_head.weight"
    assert mx.array_equal(provider.model.lm_head.weight, expected[name])
    gc.collect()
    assert before() is None


def test_a_candidate_that_is_none_changes_nothing(folders: list[str], tmp_path: Path) -> None:
    provider = provider_of(folders[0])
    provider.load_default()
    model = provider.model
    for key in ((None, None, None), (str(tmp_path), None, None), (folders[1], str(tmp_path), None)):
        with pytest.raises(ValueError):
            Candidate(provider, key)
    assert provider.model is model and provider.tokenizer is not None


def test_weight_files_that_are_cut_off_are_found(folders: list[str], tmp_path: Path) -> None:
    whole = (Path(folders[0]) / "model.safetensors").read_bytes()
    file = tmp_path / "model.safetensors"
    file.write_bytes(whole)
    check_weight_files(tmp_path)
    for content in (whole[:-1], whole[:100], whole[:4], b"", b"\xff" * 50, (2).to_bytes(8, "little") + b"[]"):
        file.write_bytes(content)
        with pytest.raises(ModelFolderError):
            check_weight_files(tmp_path)
    header = json.dumps({"x": {"data_offsets": 3}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelFolderError):
        check_weight_files(tmp_path)


def test_names_lead_to_the_default_model_and_its_adapter(folders: list[str]) -> None:
    provider = provider_of(folders[0])
    provider._adapter_map["default_model"] = "adapter"
    ModelNames(folders[0], ["alias"]).teach(provider)
    for name in ("alias", "0"):
        assert (provider._model_map[name], provider._adapter_map[name]) == (folders[0], "adapter")
    assert ModelNames("org/name").names == ["name"]
    assert ModelNames(None, []).find("default_model", 0) is None


def test_a_rendered_prompt_with_images_is_encoded_by_mlx_lm() -> None:
    """mlx-lm's code, with a stand-in for a processor: the chat template is not rendered again."""
    seen: list[str] = []

    def processor(text: str, images: list[Any]) -> tuple[str, list[mx.array]]:
        seen.append(text)
        return text + "<image>", [mx.zeros((1,)) for _ in images]

    processor.image_token = "<image>"  # type: ignore[attr-defined]
    tokenizer = SimpleNamespace(
        has_chat_template=True,
        has_tool_calling=False,
        has_thinking=False,
        response_initial_state=None,
        encode=lambda text, add_special_tokens: [7] * len(text.split()) + [9],
        convert_tokens_to_ids=lambda token: 9,
    )
    png = base64.b64encode(bytes.fromhex(PNG)).decode()
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}}]
    request = upstream.CompletionRequest("chat", "", [{"role": "user", "content": content}], None, None)
    owner = SimpleNamespace(
        model_provider=SimpleNamespace(processor=processor, cli_args=SimpleNamespace(chat_template_args={}))
    )
    pytest.importorskip("PIL")
    args = SimpleNamespace(chat_template_kwargs={"padding": 3})
    result = upstream.ResponseGenerator._tokenize(owner, RenderedTokenizer(tokenizer, "look at it"), request, args)
    assert seen == ["look at it"] and result[0] == [7, 7, 7, 9] and result[4].starts == [3]
