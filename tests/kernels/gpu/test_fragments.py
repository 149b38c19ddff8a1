"""The Triton kernels under the interpreter, on CPU tensors, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.gpu.interpreter import interpreted

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def said() -> dict[str, str | None]:
    return interpreted("interpreted")


def test_copies_and_sums_agree_with_the_reference(said: dict[str, str | None]) -> None:
    wrong = {case: text for case, text in said.items() if text is not None and case != "stray"}
    assert wrong == {}
    assert sum(case.startswith("copy") for case in said) == 6
    assert sum(case.startswith("sum") for case in said) == 4


def test_a_store_outside_its_array_is_noticed(said: dict[str, str | None]) -> None:
    assert said["stray"] == "a canary of k_dst died"
