"""Names of models: those of other suites mean the same shape here."""

from __future__ import annotations

import pytest

from kvbench.errors import UsageError
from kvbench.model.geometry import MODELS as GEOMETRIES
from kvbench.replay.models import ALIASES, MODELS, model, token_bytes


@pytest.mark.parametrize("name", sorted({*GEOMETRIES} - {"Mistral-24B", "DeepSeek-V3"}))
def test_the_names_of_geometries_are_taken_for_the_same_shape(name: str) -> None:
    shape, geometry = model(name), GEOMETRIES[name]
    assert shape is MODELS[shape.name]
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (geometry.layers, geometry.kv_heads, geometry.head_dim)
    assert token_bytes(shape) == geometry.token_bytes()


@pytest.mark.parametrize("name", [*MODELS, *ALIASES])
def test_upper_and_lower_case_are_one(name: str) -> None:
    assert model(name.upper()) is model(name.lower()) is model(name)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Mistral-24B", "llama", "llama-3.1-70b", "", "LLAMA-3-8"])
def test_a_model_that_has_no_shape_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown model.*llama-3-8b"):
        model(name)
