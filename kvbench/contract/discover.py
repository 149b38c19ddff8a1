"""Finds suites: folders of ``bench_*.py`` that ship with kvbench or come from entry point ``kvbench.suites``."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from kvbench import data
from kvbench.contract.bench import Bench
from kvbench.errors import UsageError, nearest, printable


@dataclass(frozen=True, slots=True)
class Suites:
    """What was found: ``benches[suite][bench]``, and one line for each file or plug-in that could not be loaded."""

    benches: Mapping[str, Mapping[str, Bench]]
    problems: tuple[str, ...] = ()

    def find(self, suite: str, bench: str) -> Bench:
        """Return the bench; raises UsageError with the nearest name."""
        if suite not in self.benches:
            raise UsageError(
                "unknown suite", got=suite, expected="one of " + " ".join(sorted(self.benches)),
                mend=nearest(suite, self.benches, "kvbench list shows them all"),
            )  # fmt: skip
        if bench not in self.benches[suite]:
            raise UsageError(
                "unknown bench", where=f"suite {suite}", got=bench,
                expected="one of " + " ".join(sorted(self.benches[suite])),
                mend=nearest(bench, self.benches[suite], "kvbench list shows them all"),
            )  # fmt: skip
        return self.benches[suite][bench]

    def select(self, selects: Sequence[str]) -> list[Bench]:
        """Return the benches ``suite`` and ``suite/bench`` words name, each once; no words = all of them."""
        chosen: dict[tuple[str, str], Bench] = {}
        for word in selects or sorted(self.benches):
            suite, _, name = word.partition("/")
            if "/" in word and not name:
                raise UsageError("no bench after the slash", got=word, expected="SUITE or SUITE/BENCH")
            if name:
                found: Iterable[Bench] = [self.find(suite, name)]
            else:
                if suite not in self.benches:
                    owner = [s for s, members in self.benches.items() if suite in members]
                    if owner:
                        raise UsageError("unknown suite", got=suite, mend=f"did you mean {owner[0]}/{suite}?")
                    self.find(suite, "")
                found = self.benches[suite].values()
            for member in found:
                chosen[member.suite, member.name] = member
        return list(chosen.values())


def load_suites() -> Suites:
    """Load every suite by path, without pytest, numba or torch. A broken plug-in is reported and skipped.

    Besides the suites that ship, ``$KVBENCH_SUITES`` (folders, separated like ``$PATH``) names suites under
    development; workers inherit it. Installed plug-ins come by entry point ``kvbench.suites``: a folder, a list of
    folders, or a function returning either.
    """
    problems: list[str] = []
    folders: list[tuple[str, Path]] = [("kvbench", data.root("suites"))]
    for text in filter(None, os.environ.get("KVBENCH_SUITES", "").split(os.pathsep)):
        if Path(text).is_dir():
            folders.append(("$KVBENCH_SUITES", Path(text)))
        else:
            problems.append(f"$KVBENCH_SUITES: {printable(text)} is not a folder")
    for point in entry_points(group="kvbench.suites"):
        try:
            given = point.load()
            given = given() if callable(given) else given
            paths = [given] if isinstance(given, (str, Path)) else list(given)
            folders += [(f"plug-in {point.name}", Path(path)) for path in paths]
        except BaseException as error:  # a plug-in may raise anything at import, SystemExit included
            if isinstance(error, KeyboardInterrupt):
                raise
            problems.append(_problem(f"plug-in {point.name}", error))
    benches: dict[str, dict[str, Bench]] = {}
    for origin, root in folders:
        for folder in _suite_folders(root):
            for file in sorted(folder.glob("bench_*.py")):
                _add_file(origin, folder.name, file, benches, problems)
    return Suites(benches, tuple(problems))


def _suite_folders(root: Path) -> list[Path]:
    if any(root.glob("bench_*.py")):
        return [root]
    return [child for child in sorted(root.iterdir()) if child.is_dir()] if root.is_dir() else []


def load_file(suite: str, file: Path) -> tuple[ModuleType | None, str]:
    """Return the module of a bench file and "", or None and one line saying why it could not be loaded."""
    name = f"kvbench_suites.{suite}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return None, f"{suite}/{printable(file.name)} cannot be loaded as Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and numba look a function's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # a third party's file may raise anything, SystemExit included
        if isinstance(error, KeyboardInterrupt):
            raise
        return None, _problem(f"{suite}/{file.name}", error)
    return module, ""


def _add_file(origin: str, suite: str, file: Path, benches: dict[str, dict[str, Bench]], problems: list[str]) -> None:
    module, problem = load_file(suite, file)
    if module is None:
        problems.append(f"{origin}: {problem}")
        return
    for found in vars(module).values():
        if not isinstance(found, Bench):
            continue
        if suite == "canary" or found.name in benches.get(suite, {}):
            problems.append(f"{origin}: {suite}/{found.name} in {file.name} is already taken; the first one is kept")
            continue
        benches.setdefault(suite, {})[found.name] = found.in_suite(suite, str(file))


def _problem(where: str, error: BaseException) -> str:
    return printable(f"{where} was skipped: {type(error).__name__}: {error}", 300)
