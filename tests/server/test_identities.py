"""Identities that name a server's models on disk: weights, draft model and configuration."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from mlx_paged.prefix.identity import identity_of, loaded_configs, noting_configs
from tests.support.models.builders import build, perturbed


def test_identity_depends_on_target_and_draft() -> None:
    target, draft = build("llama"), perturbed("llama", 0.1)
    found = {
        identity_of(models) for models in [(target,), (draft,), (target, draft), (draft, target), (target, target)]
    }
    assert len(found) == 5 and None not in found


@pytest.mark.parametrize(
    "changes",
    [{"seed": 9}, {"rope_theta": 1e6}, {"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rms_norm_eps": 1e-2}],
)
def test_equal_weights_and_configurations_have_one_identity(changes: dict[str, Any]) -> None:
    first = identity_of([build("llama")])
    assert first == identity_of([build("llama")]) != identity_of([build("llama", **changes)])


def test_identity_depends_on_the_configuration_as_loaded() -> None:
    config = {"rope_scaling": None}
    load = noting_configs(lambda name, return_config: (build("llama"), "tokenizer", config))
    model, tokenizer = load("name")
    assert tokenizer == "tokenizer" and load("name", return_config=True)[2] is config
    first = identity_of([model])
    assert first == identity_of([load("name")[0]]) != identity_of([build("llama")])
    config["rope_scaling"] = {"factor": 2.0}  # a later change does not affect the first model
    assert first == identity_of([model]) != identity_of([load("name")[0]])


def test_configuration_is_dropped_with_its_model() -> None:
    model, _ = noting_configs(lambda name, return_config: (build("llama"), "tokenizer", {}))("name")
    gone, known = weakref.ref(model), len(loaded_configs)
    gc.disable()
    try:
        del model
        assert gone() is None and len(loaded_configs) < known
    finally:
        gc.enable()
