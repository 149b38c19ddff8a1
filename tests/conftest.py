"""Every test starts away from the user's home, settings and database, and skips only for what it says it needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.needs import MARKERS, require

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("KVBENCH_REQUIRE", "KVBENCH_TEST_")


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """XDG_CACHE_HOME of the whole session: kernels compile once, not once a test.

    In a checkout with a .venv it lies in there and outlives the session. kvbench keys compiled kernels by all of its
    sources (kernels/cache.py), so an old entry cannot serve a new source.
    """
    venv = ROOT / ".venv"
    chosen = os.environ.get("KVBENCH_TEST_CACHE")
    path = Path(chosen) if chosen else venv / "test-cache" if venv.is_dir() else tmp_path_factory.mktemp("cache")
    path.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(path)
    return path


@pytest.fixture(autouse=True)
def own_home(shared_cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of this test's own; no KVBENCH_* setting of the user reaches it."""
    home = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        if name.startswith("KVBENCH_") and not name.startswith(KEPT):
            monkeypatch.delenv(name)
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    return home


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, missing in MARKERS.items():
        if item.get_closest_marker(name):
            require(name, missing())
