"""The rules of conftest.py and needs.py, each in the state where it must skip and in the state where it must fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import needs

HOME_BEFORE = os.environ.get("HOME")


def test_require_goes_on_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_REQUIRE", "gcc")
    needs.require("gcc", None)


def test_require_skips_what_nobody_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_REQUIRE", "gcc, postgres")
    with pytest.raises(pytest.skip.Exception, match="no card"):
        needs.require("gpu", "no card")


def test_require_fails_what_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_REQUIRE", "gcc, postgres")
    with pytest.raises(pytest.fail.Exception, match="names postgres, but no server"):
        needs.require("postgres", "no server")


def test_a_marked_test_obeys_the_rule(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_TEST_POSTGRES", raising=False)
    root = Path(__file__).resolve().parents[1]
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(root)!r})\nfrom tests.conftest import pytest_runtest_setup\n"
    )
    pytester.makepyfile("import pytest\n@pytest.mark.postgres\ndef test_a(): pass\n")
    pytester.makeini("[pytest]\nmarkers = postgres: needs a server\n")
    monkeypatch.delenv("KVBENCH_REQUIRE", raising=False)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(skipped=1)
    monkeypatch.setenv("KVBENCH_REQUIRE", "postgres")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(errors=1)


def test_home_is_the_tests_own(own_home: Path, shared_cache: Path) -> None:
    assert os.environ["HOME"] == str(own_home) != HOME_BEFORE
    assert os.environ["XDG_DATA_HOME"].startswith(str(own_home))
    assert os.environ["XDG_CACHE_HOME"] == str(shared_cache)
    assert not [
        n for n in os.environ if n.startswith("KVBENCH_") and not n.startswith(("KVBENCH_REQUIRE", "KVBENCH_TEST_"))
    ]


@settings(max_examples=2)
@given(st.integers())
def test_isolation_is_compatible_with_property_tests(number: int) -> None:
    assert isinstance(number, int)
    assert os.environ["HOME"] != HOME_BEFORE


@pytest.mark.parametrize(("text", "missing"), [("0\n", True), ("0-1\n", False), ("0,2\n", False), ("", True)])
def test_numa(tmp_path: Path, text: str, missing: bool) -> None:
    (tmp_path / "has_memory").write_text(text)
    assert (needs.missing_numa(tmp_path) is not None) is missing


def test_numa_without_sysfs(tmp_path: Path) -> None:
    assert "unknown" in (needs.missing_numa(tmp_path / "none") or "")


@pytest.mark.parametrize(("free", "missing"), [(0, True), (3, False)])
def test_hugepages(tmp_path: Path, free: int, missing: bool) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nHugePages_Free:        {free}\n")
    assert (needs.missing_hugepages(meminfo) is not None) is missing


def test_modules_and_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert needs.missing_module("json") is None
    assert "not installed" in (needs.missing_module("no_such_module_of_kvbench") or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in (needs.missing_gcc() or "")
