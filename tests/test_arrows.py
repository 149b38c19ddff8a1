"""The architecture of design 3, read from the sources: who may import whom, file sizes, what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvbench

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvbench"
MAX_LINES = 500

BASE = frozenset({"units", "errors", "children", "data", "contract"})
MACHINE = BASE | {"machine"}
BYTES = MACHINE | {"model", "kernels", "memory"}
MOVERS = BYTES | {"transport", "attention"}
# What each layer may import. A layer that is not listed stands above all listed ones, so none of these may import it.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "units": frozenset({"errors"}),
    "errors": frozenset(),
    "children": frozenset(),
    "data": frozenset({"units", "errors"}),
    "contract": BASE,
    "machine": MACHINE,
    "memory": BYTES - {"model"},
    "kernels": BYTES - {"model"},
    "model": BYTES,
    "transport": MOVERS,
    "attention": MOVERS,
    "systems": MOVERS,  # a mechanism knows no clock, store or command line
    "timing": BYTES - {"model"},  # how a number is taken knows nothing of the systems it is taken of
    "analysis": MACHINE | {"timing", "store", "analysis"},
    "locks": MACHINE,
    "store": MACHINE | {"locks"},
    "report": MACHINE | {"analysis", "timing", "store"},
    "replay": MOVERS | {"systems", "analysis"},
    "suites": MOVERS | {"systems", "timing", "analysis", "replay", "measure"},
}
FRONT = frozenset({"cli", "plugin", "__main__"})  # nobody but themselves imports these


def sources() -> list[Path]:
    return sorted(p for folder in (PACKAGE, ROOT / "suites") for p in folder.rglob("*.py"))


def layer_of(path: Path) -> str:
    """Return ``suites``, or the first name below kvbench/ (``cli``, ``runner``; ``kvbench`` for its __init__)."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "suites" if parts[0] == "suites" else "kvbench" if parts[1] == "__init__" else parts[1]


def imports(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted module) for each import of kvbench in ``text``, those inside functions included.

    Imports for type checkers alone (``if TYPE_CHECKING:``) couple nothing at run time and are left out.
    """
    inside = path.relative_to(ROOT).with_suffix("").parts
    tree = ast.parse(text)
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "kvbench")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(inside[: len(inside) - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            if module.split(".")[0] == "kvbench":
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def home(dotted: str) -> str | None:
    """Return the layer of ``kvbench.<...>``; public names come from where kvbench/__init__.py takes them."""
    parts = dotted.split(".")
    if len(parts) == 1 or parts[1] in ("__version__", "__file__"):
        return None
    public: dict[str, str] = {"axis": "kvbench.contract", **kvbench._HOMES}
    return public[parts[1]].split(".")[1] if parts[1] in public else parts[1]


def violations(path: Path, text: str) -> list[str]:
    found = []
    layer = layer_of(path)
    for line, dotted in imports(path, text):
        target = home(dotted)
        where = f"{path.relative_to(ROOT)}:{line}: imports {dotted}"
        if target is None or (target == layer and layer != "systems"):
            continue
        if target in FRONT and layer not in FRONT:
            found.append(f"{where}: nothing below the command line may")
        elif layer == "systems" and target == "systems":
            own = path.relative_to(PACKAGE).parts[1].removesuffix(".py")
            if dotted.split(".")[2:3] != [own] and own != "__init__":
                found.append(f"{where}: systems do not import each other")
        elif layer in MAY_IMPORT and target not in MAY_IMPORT[layer]:
            found.append(f"{where}: {layer} may import {', '.join(sorted(MAY_IMPORT[layer])) or 'nothing of kvbench'}")
    return found


def test_imports_follow_the_arrows() -> None:
    found = [line for path in sources() for line in violations(path, path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kvbench/systems/neo/schedule.py", "from kvbench.timing import clock"),
        ("kvbench/systems/neo/schedule.py", "def f():\n    import kvbench.store.engine"),
        ("kvbench/systems/neo/schedule.py", "from kvbench.systems.ellm import pool"),
        ("kvbench/systems/neo/schedule.py", "from ..ellm import pool"),
        ("kvbench/timing/sampler.py", "from kvbench.systems import neo"),
        ("kvbench/timing/sampler.py", "from kvbench import runner"),
        ("kvbench/machine/topology.py", "from kvbench.memory import host"),
        ("kvbench/memory/host.py", "from ..timing import clock"),
        ("kvbench/units.py", "from kvbench.machine import topology"),
        ("kvbench/runner.py", "from kvbench.cli.output import say"),
        ("kvbench/store/write.py", "from kvbench import runner"),
        ("suites/ladder/bench_x.py", "from kvbench import open_store"),
        ("suites/ladder/bench_x.py", "from kvbench.runner import make_plan"),
    ],
)
def test_a_wrong_arrow_is_found(path: str, text: str) -> None:
    assert len(violations(ROOT / path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kvbench/systems/neo/schedule.py", "from kvbench.systems.neo import pool\nfrom . import traffic"),
        ("kvbench/systems/neo/schedule.py", "from kvbench.transport import staged"),
        ("kvbench/cli/main.py", "from kvbench import __version__, runner\nfrom kvbench.cli import output"),
        ("suites/ladder/bench_x.py", "from kvbench import Case, axis, bench\nimport kvbench.timing.sampler"),
        (
            "kvbench/timing/sampler.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvbench.runner import Runner",
        ),
    ],
)
def test_a_right_arrow_passes(path: str, text: str) -> None:
    assert violations(ROOT / path, text) == []


def test_plugin_imports_only_the_standard_library_at_load() -> None:
    tree = ast.parse((PACKAGE / "plugin.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "." * node.level]
        else:
            continue
        assert {n.split(".")[0] for n in names} <= sys.stdlib_module_names, f"plugin.py:{node.lineno}: {names}"


def test_files_stay_short_and_named_for_their_job() -> None:
    scripts = [p for p in (ROOT / "scripts").iterdir() if p.is_file()]
    files = [*sources(), *scripts, *(ROOT / "tests").rglob("*.py")]
    assert len(files) > len(scripts)
    long = {str(p.relative_to(ROOT)): n for p in files if (n := p.read_bytes().count(b"\n")) > MAX_LINES}
    assert long == {}
    assert [p for p in files if p.stem in ("utils", "util", "common", "helpers", "misc")] == []


# Refuses each heavy package by name, so that the first module to import one is the one the error names.
BLOCKED_IMPORT = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "llvmlite", "scipy", "torch", "triton", "pandas", "pyarrow", "cupy"}:
            raise ImportError(f"{name} is heavy")
sys.meta_path.insert(0, Refuse())
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
print(*failed, sep="\\n")
sys.exit(bool(failed))
"""


def test_modules_outside_kernels_import_without_heavy_packages() -> None:
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        # Alembic executes the migration environment itself; __main__ runs the program.
        if layer_of(path) == "kernels" or "migrations" in parts or parts[-1] == "__main__":
            continue
        names.append(".".join(parts).removesuffix(".__init__"))
    assert "kvbench.cli.main" in names
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
