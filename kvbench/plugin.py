"""pytest plug-in: the same bench functions become test items, in-process, at smoke, storing nothing unless asked.

Only the standard library is imported at load: pytest loads every installed plug-in in every project of the user.
With pytest-benchmark installed each case also appears there, fed with the seconds kvbench measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvbench")
    group.addoption("--kvbench-db", metavar="PATH|URL", default=None, help="store what the kvbench items measure")
    group.addoption("--kvbench-profile", default="smoke", choices=["smoke", "quick", "full"], help="default: smoke")
    group.addoption(
        "--kvbench-axis", action="append", default=[], metavar="AXIS=V1,V2", help="like -a of kvbench run",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kvbench: a kvbench case (measures; never run in parallel)")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not (file_path.name.startswith("bench_") and file_path.suffix == ".py"):
        return None
    from kvbench.pytest_items import BenchFile

    made: pytest.Collector = BenchFile.from_parent(parent, path=file_path)
    return made


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check the kvbench options once it is known which cases will run."""
    wrong = getattr(session.config, "_kvbench_usage", None)
    if wrong:
        import pytest

        raise pytest.UsageError(wrong)
    cases = [item.case for item in session.items if hasattr(item, "case") and item.get_closest_marker("kvbench")]
    if cases:
        from kvbench.pytest_items import PytestSession

        PytestSession.of(session.config).collected(cases)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Close the session's run, if one was stored."""
    store = getattr(session.config, "_kvbench_session", None)
    if store is not None:
        store.finish()
