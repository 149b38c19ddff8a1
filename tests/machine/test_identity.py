"""A dead run is told from a live one, and never the other way round."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.machine import identity
from tests.machine.conftest import Tree
from tests.machine.trees import write


def test_this_process_is_alive_and_a_reused_pid_is_not() -> None:
    me = identity.identity()
    assert me.pid == os.getpid()
    assert me.pid_start.isdigit()
    assert identity.process_alive(me.boot_id, me.pid, me.pid_start)
    assert not identity.process_alive(me.boot_id, me.pid, str(int(me.pid_start) + 1))


def test_another_boot_is_over() -> None:
    me = identity.identity()
    assert not identity.process_alive("00000000-0000-0000-0000-000000000000", me.pid, me.pid_start)
    assert not identity.process_alive("", me.pid, me.pid_start)


def test_a_process_that_ended_is_dead_as_zombie_and_after() -> None:
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    start, boot = identity.process_start(child.pid), identity.boot_id()
    assert identity.process_alive(boot, child.pid, start)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped: a zombie
    assert not identity.process_alive(boot, child.pid, start)
    child.communicate()
    assert not identity.process_alive(boot, child.pid, start)


def test_a_process_of_another_pid_namespace_counts_as_alive(tree: Tree) -> None:
    root = tree("vm")
    boot = identity.boot_id(root)
    assert boot == "11111111-2222-3333-4444-555555555555"
    namespace = root / "proc/self/ns/pid"
    namespace.parent.mkdir(parents=True)
    namespace.symlink_to("pid:[4026532999]")
    assert identity.boot_id(root) == f"{boot}/pid:[4026532999]"
    assert identity.process_alive(boot, 77, "5", root)
    namespace.unlink()
    namespace.symlink_to("pid:[4026531836]")
    assert identity.boot_id(root) == boot
    assert not identity.process_alive(boot, 77, "5", root)


def test_names_with_spaces_and_parentheses(tmp_path: Path) -> None:
    fields = "S " + " ".join(str(n) for n in range(4, 53))
    write(tmp_path, "/proc/9/stat", f"9 (a) b) S (c) {fields}\n")
    assert identity.process_start(9, tmp_path) == "22"
    write(tmp_path, "/proc/9/stat", "9 (a")
    assert identity.process_start(9, tmp_path) == ""


def test_hosts_of_one_name_differ_by_machine_id(tree: Tree) -> None:
    root = tree("vm")
    assert identity.host_name(root) == "guest"
    write(root, "/etc/machine-id", "a" * 32)
    one = identity.host_name(root)
    write(root, "/etc/machine-id", "b" * 32)
    assert one != identity.host_name(root)
    assert one.startswith("guest-")
    assert "aaaa" not in one


def _git(folder: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def test_revision_and_dirty_flag(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "kvbench").mkdir(parents=True)
    (checkout / "kvbench" / "a.py").write_text("1\n")
    assert identity.git_state(checkout).revision is None
    try:
        _git(checkout, "init", "-q")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    assert identity.git_state.__wrapped__(checkout).label is None  # no commit yet
    _git(checkout, "add", ".")
    _git(checkout, "commit", "-q", "-m", "x")
    clean = identity.git_state.__wrapped__(checkout)
    assert clean.dirty is False
    assert clean.label == clean.revision
    (checkout / "notes.txt").write_text("not code\n")
    assert identity.git_state.__wrapped__(checkout).dirty is False
    (checkout / "kvbench" / "b.py").write_text("new code\n")
    dirty = identity.git_state.__wrapped__(checkout)
    assert dirty.label == f"{clean.revision}-dirty"


def test_a_package_inside_somebody_elses_repository_has_no_revision(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    site = tmp_path / ".venv" / "site-packages"
    (site / "kvbench").mkdir(parents=True)
    assert identity.git_state(site).revision is None
