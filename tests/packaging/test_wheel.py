"""The wheel alone, in a fresh venv outside the checkout: what travels with it, and that it measures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run ``command`` with nothing in the environment that could lead back to the checkout."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVBENCH_", "VIRTUAL_ENV"))}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    if importlib.util.find_spec("hatchling"):
        build = f"import hatchling.build as b; print(b.build_wheel({str(out)!r}))"
        done = run(sys.executable, "-c", build, cwd=ROOT)
    else:  # pip fetches hatchling for the build
        done = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, ROOT, cwd=out)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("kvbench-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a venv that holds kvbench from the wheel and borrows its dependencies from this interpreter."""
    place = tmp_path_factory.mktemp("outside") / "venv"
    assert ROOT not in place.parents
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin/python"
    done = run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    site = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    # A folder named in a .pth file is searched after the venv's own, and .pth files inside it (an editable kvbench)
    # are not read.
    borrowed = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return place / "bin"


def data_files(name: str) -> set[str]:
    """Return the files of the checkout's folder ``name`` that git would carry, as paths from the checkout."""
    return {
        str(p.relative_to(ROOT))
        for p in (ROOT / name).rglob("*")
        if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".pyc"
    }


def test_suites_and_results_travel_with_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("suites", "results"):
        expected = {f"kvbench/_data/{path}" for path in data_files(folder)}
        assert expected, f"{folder}/ is empty"
        assert {n for n in names if n.startswith(f"kvbench/_data/{folder}/")} == expected
    assert "kvbench/py.typed" in names
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "kvbench").rglob("*.py")}
    assert {n for n in names if n.endswith(".py") and "/_data/" not in n} == sources
    assert not [n for n in names if n.endswith((".pyc", ".db")) or n.startswith(("tests/", "scripts/"))]


def test_it_is_the_wheel_that_runs(installed: Path, tmp_path: Path) -> None:
    probe = (
        "import kvbench; from kvbench import data; print(kvbench.__file__, data.root('suites'), data.root('results'))"
    )
    done = run(installed / "python", "-c", probe, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    places = done.stdout.split()
    assert len(places) == 3
    for place in places:
        assert place.startswith(str(installed.parent)), place


def test_list_shows_every_suite(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "kvbench", "list", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    shown = {bench["suite"] for bench in document["benches"]}
    assert shown == {p.parent.name for p in (ROOT / "suites").glob("*/bench_*.py")}
    assert document["problems"] == []


def test_one_case_is_measured_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    case = ("ladder/host_bandwidth", "-a", "op=read", "-a", "bytes=1MiB", "-a", "threads=1", "-a", "pages=4k")
    done = run(
        installed / "kvbench", "run", *case, "--profile", "smoke", "--no-db", "--json", cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert rows
    assert rows[0]["status"] in ("ok", "suspect", "tainted"), rows[0]["reason"]
    assert rows[0]["value"] > 0
    assert list(tmp_path.iterdir()) == []
