"""What names the models of a server on disk: those that are loaded now, with their drafts and configurations."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

from mlx_paged.serve.identities import Identities, loaded_configs, noting_configs
from tests.support.models.builders import build, perturbed

KEY = ("model", None, None)


def provider(model: Any, draft: Any = None, key: Any = KEY) -> Any:
    return SimpleNamespace(model=model, draft_model=draft, model_key=key)


def test_target_and_draft_both_count() -> None:
    target, draft = build("llama"), perturbed("llama", 0.1)
    found = {
        Identities(provider(*models))(KEY)
        for models in [(target, None), (draft, None), (target, draft), (draft, target), (target, target)]
    }
    assert len(found) == 5 and None not in found


def test_nothing_is_remembered_under_a_name() -> None:
    models = provider(build("llama"))
    identities = Identities(models)
    first = identities(KEY)
    models.model = build("llama", seed=9)
    assert identities(KEY) != first
    models.model = build("llama")
    assert identities(KEY) == first
    assert identities(("another", None, None)) is None
    models.model = None
    assert identities(KEY) is None


def test_the_configuration_as_it_was_loaded_counts() -> None:
    config = {"rope_scaling": None}
    load = noting_configs(lambda name, return_config: (build("llama"), "tokenizer", config))
    model, tokenizer = load("name")
    assert tokenizer == "tokenizer" and load("name", return_config=True)[2] is config
    first = Identities(provider(model))(KEY)
    assert first == Identities(provider(load("name")[0]))(KEY) != Identities(provider(build("llama")))(KEY)
    config["rope_scaling"] = {"factor": 2.0}  # what is read later is not what the first one was built from
    assert first == Identities(provider(model))(KEY) != Identities(provider(load("name")[0]))(KEY)


def test_a_configuration_goes_with_its_model() -> None:
    model, _ = noting_configs(lambda name, return_config: (build("llama"), "tokenizer", {}))("name")
    gone, known = weakref.ref(model), len(loaded_configs)
    gc.disable()
    try:
        del model
        assert gone() is None and len(loaded_configs) < known
    finally:
        gc.enable()


def test_a_model_whose_code_cannot_be_read_has_no_name(monkeypatch: Any) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError("no")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    assert Identities(provider(build("llama")))(KEY) is None
