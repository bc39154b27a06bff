"""However MLX cuts kernels into command buffers, and whatever streams they are on, blocks are read after they are
written and written after they are read."""

from typing import Any

import pytest

from mlx_paged.cli.doctor import ordering as doctor_ordering
from mlx_paged.cli.doctor.ordering import difference, ordering_stress
from mlx_paged.cli.doctor.process import Outcome
from mlx_paged.kernels import build as kernel_build

STEPS = 200


def tokens_with(seed: int, steps: int, **variables: str) -> dict[str, list[int]]:
    """Of mlx_paged/cli/doctor/ordering.py in a process of its own."""
    outcome = doctor_ordering.tokens_with(seed, steps, **variables)
    assert outcome.error is None, outcome.error
    tokens, paths = outcome.values
    kernels_run = kernel_build.backend() is not None and variables.get("MLX_PAGED_KERNEL") != "off"
    assert bool(paths.get("kernel")) == kernels_run, paths
    assert len({token for listed in tokens.values() for token in listed}) > 10
    result: dict[str, list[int]] = tokens
    return result


def test_two_streams_give_what_gather_gives() -> None:
    """On a GPU the kernels' tokens are those of gathered blocks; elsewhere both are gathered."""
    assert tokens_with(0, 60) == tokens_with(0, 60, MLX_PAGED_KERNEL="off")


def test_the_reference_does_not_run_the_kernels() -> None:
    """A demanded kernel is an error without a GPU: the program reads the variable."""
    if kernel_build.backend() is not None:
        pytest.skip("MLX has a GPU")
    outcome = doctor_ordering.tokens_with(0, 5, MLX_PAGED_KERNEL="on")
    assert outcome.values == [] and outcome.error is not None and "kernel=on" in outcome.error


def test_what_the_stress_says_of_equal_other_and_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: int, steps: int, **variables: str) -> Outcome:
        if "MLX_PAGED_KERNEL" in variables:
            return reference
        return others[variables["MLX_MAX_OPS_PER_BUFFER"]]

    monkeypatch.setattr(doctor_ordering, "tokens_with", run)
    paths = {"kernel": 9}
    reference = Outcome([{"0": [1, 2], "1": [3, 4, 5]}, {"gather": 9}], None)
    others: dict[str, Any] = {
        "1": Outcome([{"0": [1, 2], "1": [3, 4, 9]}, paths], None),
        "1000": Outcome([reference.values[0], paths], None),
    }
    assert list(ordering_stress().values()) == [
        "tokens differ in 1 of 2 requests, first in request 1 at token 2",
        "same",
    ]
    others["1000"] = reference
    assert list(ordering_stress().values())[1] == "same, but the kernels did not run"
    others["1000"] = Outcome([], "ended with -6: crashed")
    assert list(ordering_stress().values())[1] == "ended with -6: crashed"
    reference = Outcome([], "did not end within 300 s")
    assert ordering_stress() == {"gathered blocks": "did not end within 300 s"}


def test_where_tokens_differ() -> None:
    assert difference({"0": [1, 2]}, {"0": [1, 2]}) is None
    assert "1 of 1 requests, first in request 0 at token 1" in str(difference({"0": [1, 2]}, {"0": [1]}))
    assert "request 0 at token 0" in str(difference({"0": [1, 2]}, {}))


@pytest.mark.gpu
@pytest.mark.skipif(kernel_build.backend() is None, reason="MLX sees no GPU")
@pytest.mark.parametrize("seed", range(2))
def test_tokens_do_not_depend_on_command_buffers(seed: int) -> None:
    expected = tokens_with(seed, STEPS, MLX_PAGED_KERNEL="off")
    assert sum(map(len, expected.values())) > 200
    for most in ("1", "1000"):
        assert tokens_with(seed, STEPS, MLX_MAX_OPS_PER_BUFFER=most) == expected, f"{most} operations in a buffer"
