"""The one table of parameters, and what is made of it."""

from __future__ import annotations

import jsonschema
import pytest

from mlx_paged.serve.api.openapi import description
from mlx_paged.serve.api.parameters import ENDPOINTS, Support, endpoint_of
from mlx_paged.serve.refusal import RequestRefused
from scripts.clients.write_api_tables import PAGE, updated

SAMPLES = [
    "disabled",
    "medium",
    True,
    False,
    0,
    1,
    7,
    -3,
    1.5,
    300,
    "",
    "x",
    "auto",
    [],
    ["x"],
    [1],
    [[1, 2]],
    [{}],
    {},
    {"type": "x"},
]
SAMPLES += [
    {"1": 2},
    {"x": 2},
    ["text"],
    [{"role": "user", "content": "x"}],
    [{"role": "user"}],
    {"include_usage": True},
    {"include_usage": {}},
]


def test_the_page_has_the_table_that_is_checked() -> None:
    assert updated(PAGE.read_text()) == PAGE.read_text(), "run scripts/clients/write_api_tables.py"


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_passes_is_what_is_described(path: str) -> None:
    """Whatever a check lets pass, the description does; what is refused as a whole, both refuse."""
    schema = description("1")["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == set(ENDPOINTS[path].parameters)
    for name, parameter in ENDPOINTS[path].parameters.items():
        validator = jsonschema.Draft202012Validator(schema["properties"][name])
        passed = 0
        for value in SAMPLES:
            try:
                parameter.check(name, value)
            except RequestRefused as refusal:
                assert refusal.status == 400 and str(refusal.param).startswith(name)
            else:
                passed += 1
                # What is written into a field may be less than what a client can read: content of messages may be None.
                assert validator.is_valid(value) or name == "messages", (name, value)
        assert (passed == 0) == (parameter.support is Support.REFUSED), name


def test_every_path_is_described_once() -> None:
    described = description("1", has_keys=True)
    assert endpoint_of("/chat/completions") is ENDPOINTS["/v1/chat/completions"]
    assert endpoint_of("/nothing") is None
    assert set(ENDPOINTS) < set(described["paths"]) and described["security"]
