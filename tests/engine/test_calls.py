"""The functions of this package that a decode step calls: the host's time between tokens."""

from scripts.count_calls import LAYERS, ROWS, calls_in_a_step

MOST_CALLS = 195


def test_a_decode_step_calls_few_functions() -> None:
    calls = calls_in_a_step(on_device=False)
    assert calls.total() <= MOST_CALLS, calls.most_common(30)
    by_row_and_layer = [name for name, count in calls.items() if count >= ROWS * LAYERS]
    assert not by_row_and_layer, "work for each row in each layer"
