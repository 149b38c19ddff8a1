"""Scratch files: where they go, that they leave nothing behind, what they hold, and what a failing disk does."""

from __future__ import annotations

import errno
import os
import pwd
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError
from kvbench.machine.probe import Fact
from kvbench.memory import file as file_module
from kvbench.memory import libc, payload
from kvbench.memory.file import FileSystem, ScratchFile, file_system, scratch_dir
from tests.memory.test_limits import tree

SIZE = 256 << 10


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_scratch_dir_prefers_xdg_then_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    chosen = scratch_dir()
    assert chosen == tmp_path / "xdg/kvbench"
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert scratch_dir() == tmp_path / "home/.cache/kvbench"


def test_scratch_dir_without_home_asks_the_user_database_then_temp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    (tmp_path / "db").mkdir()
    entry = list(pwd.getpwuid(os.getuid())) if os.getuid() == 0 else ["u", "x", os.getuid(), 0, "", "", "/bin/sh"]
    entry[5] = str(tmp_path / "db")
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: pwd.struct_passwd(entry))
    monkeypatch.chdir(tmp_path)
    # neither a relative HOME nor one that is not there makes a folder anywhere
    for home in (None, "relative", str(tmp_path / "gone")):
        monkeypatch.delenv("HOME", raising=False)
        if home is not None:
            monkeypatch.setenv("HOME", home)
        assert scratch_dir() == tmp_path / "db/.cache/kvbench"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["db"]

    def unknown(_uid: int) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert scratch_dir() == tmp_path / f"kvbench-{os.getuid()}"


def test_a_planted_link_in_the_temporary_directory_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"kvbench-{os.getuid()}").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(file_module, "_candidates", lambda: iter([tmp_path / f"kvbench-{os.getuid()}"]))
    with pytest.raises(UsageError, match="another user"):
        scratch_dir()


def test_an_unusable_chosen_directory_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    with pytest.raises(UsageError, match="plain"):
        scratch_dir(tmp_path / "plain")
    with pytest.raises(UsageError, match="plain/below"):
        scratch_dir(tmp_path / "plain/below")


def test_the_file_has_no_name_and_holds_the_payload(tmp_path: Path) -> None:
    fds = open_fds()
    with ScratchFile(SIZE + 4096, tmp_path, seed=3) as file:
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(file.fd).st_nlink == 0
        assert os.fstat(file.fd).st_size == SIZE + 4096
        content = np.frombuffer(os.pread(file.fd, SIZE + 4096, 0), np.uint8)
        assert np.array_equal(content, payload.expected(SIZE + 4096, 3))
        assert np.array_equal(file.expected(8192, 100), content[8192:8292])
        mapped = file.map()
        assert mapped[:4096] == content[:4096].tobytes()
        mapped.close()
    file.close()
    assert open_fds() == fds


def test_dropping_the_cache_is_seen(tmp_path: Path) -> None:
    with ScratchFile(SIZE, tmp_path) as file:
        os.pread(file.fd, SIZE, 0)
        assert file.cached_bytes().value == SIZE
        if file.system.kind in file_module.MEMORY_FILE_SYSTEMS:
            pytest.skip("the cache of a memory file system is the file")
        file.drop_cache()
        assert file.cached_bytes().value == 0


def test_direct_reads_are_proven_to_pass_the_cache_by(tmp_path: Path) -> None:
    with ScratchFile(SIZE, tmp_path) as file:
        if file.direct.works is not True:
            assert file.direct.reason
            pytest.skip(file.direct.reason)
        assert file.direct_fd is not None
        assert 4096 % file.direct.offset_align == 0
        assert file.direct.memory_align > 0


def test_a_file_system_that_reads_through_the_cache_has_no_direct_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def buffered(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(int(os.environ["KVBENCH_TEST_FD"]), buffers, offset)

    class Through(ScratchFile):
        def _probe_direct(self) -> file_module.Direct:
            if self.direct_fd is None or self.system.kind in file_module.MEMORY_FILE_SYSTEMS:
                pytest.skip("needs a disk that opens O_DIRECT")
            monkeypatch.setenv("KVBENCH_TEST_FD", str(self.fd))
            monkeypatch.setattr(os, "preadv", buffered)
            return super()._probe_direct()

    with Through(SIZE, tmp_path) as file:
        assert file.direct.works is False
        assert "page cache" in file.direct.reason
        assert file.direct_fd is None


def test_uncountable_cache_leaves_direct_reads_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScratchFile, "cached_bytes", lambda _self: Fact(None, "no mincore"))
    with ScratchFile(SIZE, tmp_path) as file:
        if file.direct.works is False:
            pytest.skip(file.direct.reason)
        assert file.direct.works is None
        assert "no mincore" in file.direct.reason


def test_a_memory_file_system_has_no_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "file_system", lambda _path: FileSystem("tmpfs", "tmpfs", "0:1"))
    with ScratchFile(SIZE, tmp_path) as file:
        assert (file.direct.works, file.direct_fd) == (False, None)
        assert "tmpfs" in file.direct.reason


def test_refusal_stated_by_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "dio_alignment", lambda _fd: (0, 0))
    with ScratchFile(SIZE, tmp_path) as file:
        assert (file.direct.works, file.direct_fd) == (False, None)
        assert file.direct.reason


@pytest.mark.parametrize("nbytes", [0, -4096, 100, 4097])
def test_sizes_that_are_no_whole_pages(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(UsageError, match="4096"):
        ScratchFile(nbytes, tmp_path)


def test_twice_the_size_must_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "free_bytes", lambda _directory: 2 * SIZE - 1)
    with pytest.raises(Unavailable, match="twice the file") as caught:
        ScratchFile(SIZE, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_failing_disk_names_the_directory_and_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    fds = open_fds()
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(Unavailable) as caught:
        ScratchFile(SIZE, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert open_fds() == fds


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:5000], offset))
    with ScratchFile(SIZE, tmp_path) as file:
        assert os.pread(file.fd, SIZE, 0) == payload.expected(SIZE).tobytes()


def test_the_longest_and_latest_mount_names_the_file_system(tmp_path: Path) -> None:
    here = os.path.realpath(tmp_path)
    escaped = here.replace(" ", "\\040")
    lines = [
        "1 0 8:1 / / rw - ext4 /dev/root rw",
        f"2 1 0:5 / {escaped} rw shared:1 - xfs /dev/old rw",
        f"3 1 0:6 / {escaped} rw shared:1 - btrfs /dev/new rw",
        f"4 1 0:7 / {escaped}-other rw - nfs host:/x rw",
        "bad line",
    ]
    root = tree(tmp_path / "root", {"proc/self/mountinfo": "\n".join(lines)})
    found = file_system(tmp_path, root)
    assert (found.kind, found.source) == ("btrfs", "/dev/new")
    assert ":" in found.device


def test_without_mountinfo_statfs_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system(tmp_path, tmp_path).kind
    monkeypatch.setattr(libc, "statfs_magic", lambda _path: 0xABCDEF)
    assert file_system(tmp_path, tmp_path).kind == "0xabcdef"
