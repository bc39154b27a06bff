"""Identities that name a server's models on disk: weights, draft model and arguments."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_paged.prefix.identity import identity_of
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
