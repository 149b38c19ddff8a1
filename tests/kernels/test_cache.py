"""The kernel cache: keyed by every source, chosen before numba, usable without a home directory."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvbench.errors import KvbenchError
from kvbench.kernels import cache

KERNEL = "from numba import njit\nfrom callee import f\n\n@njit(cache=True)\ndef k():\n    return f()\n"
CALLEE = "from numba import njit\n\n@njit\ndef f():\n    return {value}\n"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that has not prepared its cache nor loaded numba, with its temporary directory in ``tmp_path``."""
    monkeypatch.setattr(cache, "_prepared", None)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_an_edit_to_a_callee_in_another_file_runs_the_new_code(tmp_path: Path) -> None:
    """The trap itself (T24): numba alone sees only the file of the kernel."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "kernel.py").write_text(KERNEL)
    results, digests = [], []
    for value in (1, 2):
        (sources / "callee.py").write_text(CALLEE.format(value=value))
        digests.append(cache.source_digest([sources]))
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / digests[-1]), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", "import kernel; print(kernel.k())"]
        done = subprocess.run(command, cwd=sources, env=env, capture_output=True, text=True, check=True)
        results.append(done.stdout.strip())
    assert results == ["1", "2"]
    assert digests[0] != digests[1]
    assert any((tmp_path / digests[0]).rglob("*.nbi")), "nothing was cached, so nothing was shown"


def test_digest_sees_names_contents_and_places(tmp_path: Path) -> None:
    first = tmp_path / "a.py"
    first.write_text("x = 1\n")
    before = cache.source_digest([tmp_path])
    assert cache.source_digest([tmp_path]) == before
    first.rename(tmp_path / "b.py")
    renamed = cache.source_digest([tmp_path])
    (tmp_path / "notes.txt").write_text("not a source")
    assert cache.source_digest([tmp_path]) == renamed != before


def test_digest_sees_the_cpu_and_numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = cache.source_digest([tmp_path])
    monkeypatch.setattr(cache, "cpu_features", lambda: "x86_64 none")
    other_cpu = cache.source_digest([tmp_path])
    monkeypatch.setattr(cache.metadata, "version", lambda name: "0.0")
    assert len({before, other_cpu, cache.source_digest([tmp_path])}) == 3


def test_digest_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match="no source file"):
        cache.source_digest([tmp_path])


def test_roots_are_the_package_and_the_suites() -> None:
    names = [root.name for root in cache.source_roots()]
    assert names[0] == "kvbench"
    assert names[1:] == ["suites"]


def test_prepare_sets_the_directory_and_is_idempotent(fresh: Path) -> None:
    info = cache.prepare()
    assert os.environ["NUMBA_CACHE_DIR"] == str(info.path)
    assert info.path == fresh / "cache" / "kvbench" / "numba" / info.digest
    assert info.path.is_dir()
    assert info.reason is None
    assert cache.prepare() is info


def test_numba_loaded_with_another_directory_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = types.ModuleType("numba")
    loaded.config = types.SimpleNamespace(CACHE_DIR="/other")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numba", loaded)
    with pytest.raises(KvbenchError, match="imported before kvbench") as caught:
        cache.prepare()
    assert "/other" in str(caught.value)
    assert "\n" not in str(caught.value)
    loaded.config.CACHE_DIR = str(fresh / "cache" / "kvbench" / "numba" / cache.source_digest(cache.source_roots()))
    assert str(cache.prepare().path) == loaded.config.CACHE_DIR


def test_unwritable_cache_falls_back_and_says_so(fresh: Path) -> None:
    (fresh / "cache").write_text("a file where the directory should be")
    info = cache.prepare()
    assert info.reason is not None
    assert "temporary directory" in info.reason
    assert info.path.is_dir()
    assert info.path == fresh / f"kvbench-numba-{os.getuid()}" / info.digest
    assert info.path.parent.stat().st_mode & 0o077 == 0


def test_fallback_refuses_a_directory_others_can_write(fresh: Path) -> None:
    (fresh / "cache").write_text("")
    shared = fresh / f"kvbench-numba-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    assert shared not in cache.prepare().path.parents


def test_home_unset(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")

    def unknown(_uid: int) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    info = cache.prepare()
    assert info.reason == "kernel cache in a temporary directory: no home directory"
    assert info.path.is_dir()


def test_old_siblings_are_dropped(fresh: Path) -> None:
    home = fresh / "cache" / "kvbench" / "numba"
    for name, age in (("old", 40), ("recent", 2)):
        (home / name).mkdir(parents=True)
        stamp = cache.time.time() - age * 86400
        os.utime(home / name, (stamp, stamp))
    info = cache.prepare()
    assert sorted(p.name for p in home.iterdir()) == sorted(["recent", info.digest])
