"""The documentation check: it passes on this tree, and each of its rules can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.contract import axis
from kvbench.contract.bench import Bench
from kvbench.contract.discover import Suites
from tests import docs_check
from tests.docs_check import Command, Surface


def _bench(suite: str, name: str) -> Bench:
    sizes = axis.bytes(smoke=["4KiB"], quick=["4KiB"], full="4KiB..1GiB")
    axes = {"op": axis.choice("read", "write"), "bytes": sizes}
    return Bench(name, 1, "bandwidth", "B/s", "higher", axes, lambda case, measure: None, suite=suite, doc="x")


RUN = Command({"-a": True, "--axis": True, "--db": True, "--json": False, "--help": False}, True, True)
SURFACE = Surface(
    commands={
        "": Command({"--version": False, "--help": False}),
        "run": RUN,
        "runs": Command({"--db": True}),
        "db": Command({}),
        "db upgrade": Command({"--db": True}),
    },
    suites=Suites({"ladder": {"host_bandwidth": _bench("ladder", "host_bandwidth")}}),
    metrics=frozenset({"bandwidth"}),
    statuses=frozenset({"ok"}),
    run_statuses=frozenset({"partial"}),
)
GOOD = """# kvbench
`bandwidth` is a metric.
```console
$ kvbench run ladder/host_bandwidth -a op=read,write -a bytes=4KiB..1MiB --db x.db --json | head -n 3
kvbench run [SELECT...] [-a AXIS=V1,V2]... [--db PATH]   # comment
KVBENCH_DB=x.db kvbench runs
scripts/bench ladder --axis op=read
scripts/bench
{"schema": "kvbench.results/1"}
kvbench db upgrade \\
    --db x.db
kvbench --version
```
| status | meaning |
|---|---|
| `ok` | fine |

| run status | meaning |
|---|---|
| `partial` | some |

| command | does |
|---|---|
| `kvbench db` | `anything` |
| `run` | measures; under pytest `--benchmark-json` |
"""


def check(text: str, surface: Surface = SURFACE) -> list[str]:
    return docs_check.problems({"README.md": text}, surface)


def test_a_sound_document_has_no_problem() -> None:
    assert check(GOOD) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("kvbench measure ladder", "no command 'measure'"),
        ("kvbench run nosuch", "unknown suite, got 'nosuch'"),
        ("kvbench run ladder/host_bandwith", "unknown bench"),
        ("kvbench run ladder -a opp=read", "ladder/host_bandwidth has no axis 'opp'"),
        ("kvbench run ladder -a op=reed", "unknown value"),
        ("kvbench run ladder -a bytes=64kb", "64kb"),
        ("kvbench run ladder -a op", "is not AXIS=VALUE"),
        ("kvbench run --jsn", "run has no option --jsn"),
        ("kvbench run --db", "--db of run needs a value"),
        ("kvbench runs latest", "runs takes no argument 'latest'"),
        ("scripts/bench nosuch", "unknown suite, got 'nosuch'"),
        ("scripts/bench runs --json", "runs has no option --json"),
        ("kvbench db upgrade --bd x", "db upgrade has no option --bd"),
        ("kvbench run 'ladder", "No closing quotation"),
    ],
)
def test_a_wrong_line_is_found_in_blocks_and_inline(line: str, problem: str) -> None:
    for text in (f"{GOOD}```\n{line}\n```\n", f"{GOOD}see `{line}`\n"):
        found = check(text)
        assert len(found) == 1, found
        assert found[0].startswith("README.md:")
        assert problem in found[0]


def test_line_numbers_point_at_the_line() -> None:
    assert check(f"{GOOD}`kvbench nosuch`\n")[0].startswith(f"README.md:{len(GOOD.splitlines()) + 1}: ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`--nowhere`", "no command has the option --nowhere"),
        ("| metric | x |\n|---|---|\n| `latencies` | y |", "no metric 'latencies'"),
        ("| status | x |\n|---|---|\n| `fine` | y |", "no status 'fine'"),
        ("| run status | x |\n|---|---|\n| `ok` | y |", "no run status 'ok'"),
        ("| command | x |\n|---|---|\n| `kvbench gone` | y |", "no command 'gone'"),
    ],
)
def test_a_name_that_does_not_exist_is_found(text: str, problem: str) -> None:
    assert any(problem in line for line in check(f"{GOOD}\n{text}\n"))


@pytest.mark.parametrize(
    ("surface", "problem"),
    [
        (replace(SURFACE, metrics=frozenset({"bandwidth", "latency"})), "the metric `latency`"),
        (replace(SURFACE, statuses=frozenset({"ok", "tainted"})), "the status `tainted`"),
        (replace(SURFACE, run_statuses=frozenset({"partial", "failed"})), "the status `failed`"),
        (replace(SURFACE, commands={**SURFACE.commands, "show": Command({})}), "the command `kvbench show`"),
        (replace(SURFACE, commands={**SURFACE.commands, "runs": Command({"--all": False})}), "the option `--all`"),
        (replace(SURFACE, plugin_options=frozenset({"--kvbench-db"})), "the option `--kvbench-db`"),
    ],
)
def test_what_no_document_names_is_found(surface: Surface, problem: str) -> None:
    assert check(GOOD, surface) == [f"no document names {problem}"]


def test_surface_is_that_of_the_application() -> None:
    surface = Surface.of_application()
    assert surface.commands["run"].takes_selects
    assert surface.commands["run"].options["--db"] is True
    assert surface.commands["run"].options["--json"] is False
    assert surface.commands["list"].takes_selects
    assert surface.metrics
    assert {"ok", "skipped"} <= surface.statuses


def test_missing_readme_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"README\.md"):
        docs_check.documents(tmp_path)


def test_documents_agree_with_the_application() -> None:
    assert docs_check.problems(docs_check.documents(), Surface.of_application()) == []
