"""Turns the benches of a ``bench_*.py`` file into pytest items. Loaded only when such a file is collected."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvbench.contract.axis import PROFILES, Profile
from kvbench.contract.bench import Bench
from kvbench.contract.case import Case
from kvbench.contract.discover import load_file
from kvbench.contract.result import Result
from kvbench.errors import KvbenchError

Timed = Callable[[], None]


class VirtualClock:
    """A timer for pytest-benchmark that advances by what kvbench measured, so both report the same seconds."""

    __name__ = "kvbench_measured_seconds"

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def __repr__(self) -> str:  # the repr lands in pytest-benchmark's JSON: an address there would differ every time
        return self.__name__

    def advance(self, seconds: float) -> None:
        self._now += seconds


class CaseItem(pytest.Function):
    """One case. Reported by its whole name: the default location of a function leaves the axes out."""

    case: tuple[Bench, Case]

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        return self.path, None, self.name


class BenchFile(pytest.Module):
    """One ``bench_*.py``; its items are the cases of the chosen profile."""

    def _getobj(self) -> Any:
        module, problem = load_file(self.path.parent.name, self.path)
        if module is None:
            raise self.CollectError(problem)
        return module

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        config = self.config
        wanted: str = config.getoption("--kvbench-profile")
        profile: Profile = next(p for p in PROFILES if p == wanted)
        given = dict(text.partition("=")[::2] for text in config.getoption("--kvbench-axis"))
        with_benchmark = config.pluginmanager.hasplugin("benchmark")
        for found in vars(self.obj).values():
            if not isinstance(found, Bench):
                continue
            member = found.in_suite(self.path.parent.name, str(self.path))
            try:
                override = {
                    name: member.axes[name].parse_list(text, f"--kvbench-axis {name}")
                    for name, text in given.items() if name in member.axes
                }  # fmt: skip
            except KvbenchError as error:
                # raised here it would be a collection error with a traceback: see plugin.pytest_collection_finish
                config._kvbench_usage = str(error)  # type: ignore[attr-defined]
                return
            for case in member.cases(profile, override):
                axes = "-".join(f"{name}={member.axes[name].format(value)}" for name, value in case.axes.items())
                clock = VirtualClock()
                item = CaseItem.from_parent(
                    self, name=f"{member.name}[{axes}]", callobj=_body(member, case, clock, config)
                )  # fmt: skip
                item.case = (member, case)
                item.add_marker(pytest.mark.kvbench)
                if with_benchmark:
                    item.add_marker(pytest.mark.benchmark(timer=clock, group=f"{member.suite}/{member.name}"))
                yield item


def _body(member: Bench, case: Case, clock: VirtualClock, config: pytest.Config) -> Callable[..., None]:
    def measure(request: pytest.FixtureRequest) -> None:
        from kvbench.worker import measure_case

        session = PytestSession.of(config)
        with session.locked():
            rows = measure_case(member, dict(case.axes), session.context())
        session.keep(rows)
        primary = rows[0]
        if primary.status == "skipped":
            pytest.skip(primary.reason)
        if primary.status in ("failed", "invalid"):
            pytest.fail(f"{primary.status}: {primary.reason}", pytrace=False)
        if config.pluginmanager.hasplugin("benchmark") and primary.samples:
            _feed(request, primary, rows, clock)

    functools.update_wrapper(measure, member.body, assigned=("__name__", "__doc__", "__module__"), updated=())
    del measure.__wrapped__  # type: ignore[attr-defined]  # pytest would read the fixtures of the wrapped signature
    return measure


def _feed(request: pytest.FixtureRequest, primary: Result, rows: list[Result], clock: VirtualClock) -> None:
    """Give pytest-benchmark the measured seconds; its own loop times nothing. Fetched late: an unused fixture warns."""
    benchmark = request.getfixturevalue("benchmark")
    left = iter(primary.samples)

    def step() -> None:
        clock.advance(next(left))

    benchmark.pedantic(step, rounds=len(primary.samples), iterations=1)
    benchmark.extra_info.update(
        metric=primary.metric, unit=primary.unit, value=primary.value, status=primary.status, basis=primary.basis,
        axes=json.dumps(primary.axes), bytes=primary.bytes.link, digest=primary.digest,
    )  # fmt: skip
    for row in rows[1:]:
        benchmark.extra_info[row.metric] = row.value


class PytestSession:
    """What all kvbench items of one pytest session share: the measuring context, the lock, the stored run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._context: Any = None
        self._store: Any = None
        self._run: Any = None
        self._rows: list[Result] = []
        self._position = 0
        self._collected: list[tuple[Bench, Case]] = []

    @classmethod
    def of(cls, config: pytest.Config) -> PytestSession:
        found = getattr(config, "_kvbench_session", None)
        if found is None:
            found = cls(config)
            config._kvbench_session = found  # type: ignore[attr-defined]
        return found

    def context(self) -> Any:
        """Return the measuring context; made once, because it compiles kernels and reads the machine."""
        if self._context is None:
            from kvbench.context import Context

            profile = self._config.getoption("--kvbench-profile")
            self._context = Context.create(profile=profile, scratch=None, seed=0)
        return self._context

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the machine for one case: two xdist workers, or a test and a `kvbench run`, never measure together."""
        from kvbench.locks import acquire, machine_resources

        with acquire(machine_resources(), wait=True, notify=lambda line: None):
            yield

    def keep(self, rows: list[Result]) -> None:
        """Store ``rows`` when --kvbench-db was given."""
        if self._store is None:
            return
        if self._run is None:
            from kvbench.runner import Plan, new_runs

            worker = os.environ.get("PYTEST_XDIST_WORKER")
            flags = ("pytest", f"xdist:{worker}") if worker else ("pytest",)
            plan = Plan(tuple(self._collected), self._config.getoption("--kvbench-profile"), 0.0, 0)
            self._run = new_runs(plan, 1, "pytest", flags=flags)[0]
            self._store.begin_run(self._run)
        self._store.add_results(self._run.uuid, rows, self._position)
        self._position += 1
        self._rows.extend(rows)

    def collected(self, cases: list[tuple[Bench, Case]]) -> None:
        """Check, before anything is measured, what was asked for on the command line; raises pytest.UsageError."""
        self._collected = cases
        for text in self._config.getoption("--kvbench-axis"):
            name, equals, _ = text.partition("=")
            if not equals or not any(name in member.axes for member, _ in cases):
                raise pytest.UsageError(
                    f"--kvbench-axis {text!r}: expected AXIS=VALUE with an axis of a selected bench"
                )
        target = self._config.getoption("--kvbench-db")
        if target is not None and self._store is None:
            from kvbench.store import open_store

            try:
                self._store = open_store(target)
                self._store.check_writable()
            except KvbenchError as error:
                raise pytest.UsageError(f"--kvbench-db: {error}") from None

    def finish(self) -> None:
        """Close the run of this session."""
        if self._store is None:
            return
        if self._run is None:
            self._store.close()
            return
        from kvbench.runner import now, status_of

        # an xdist worker gets only its share of the cases, and no telling which
        planned = () if "PYTEST_XDIST_WORKER" in os.environ else tuple(case.digest for _, case in self._collected)
        self._store.finish_run(self._run.uuid, status_of(planned, self._rows), now())
        self._store.close()
