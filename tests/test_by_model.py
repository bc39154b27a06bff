"""Values kept per model are dropped with the model and never returned for another one."""

import mlx.nn as nn

from mlx_paged import by_model
from mlx_paged.by_model import ByModel, kept_of
from tests.support.without_collector import without_collector


def test_value_belongs_to_one_model_and_is_dropped_with_it() -> None:
    values: ByModel[list[int]] = ByModel("numbers")
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert values.get(first) is None
    assert values.put(first, [1]) is values.get(first)
    values.put(first, [2])
    assert values.get(first) == [2] and values.get(second) is None and values.models() == [first]
    with without_collector():
        del first
        assert not values.models()
    values.put(second, [3])
    values.clear()
    assert values.get(second) is None
    values.put(second, [4])
    with without_collector():
        del second
        assert not values.models()


def test_model_that_reuses_a_dead_models_id_has_no_value() -> None:
    values: ByModel[int] = ByModel("a number")
    model = nn.Linear(2, 2)
    values.put(model, 1)
    by_model._kept[id(other := nn.Linear(2, 2))] = by_model._kept[id(model)]
    assert values.get(other) is None and values.get(model) == 1
    del by_model._kept[id(other)]


def test_kept_of_returns_all_values_of_a_model() -> None:
    numbers: ByModel[int] = ByModel("a number")
    texts: ByModel[str] = ByModel("a text")
    model = nn.Linear(2, 2)
    assert kept_of(model) == {}
    numbers.put(model, 1)
    texts.put(model, "one")
    assert kept_of(model) == {"a number": 1, "a text": "one"}
    kept_of(model).clear()
    numbers.clear()
    assert kept_of(model) == {"a text": "one"} and (numbers.models(), texts.models()) == ([], [model])
    texts.clear()
    assert kept_of(model) == {}
