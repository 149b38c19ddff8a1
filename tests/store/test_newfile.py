"""``--force`` replaces a file and nothing else: as root a rename takes a device away from the whole machine."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.store.bundle import BundleWriter
from kvbench.store.engine import Store
from kvbench.store.formats import FORMATS, export
from kvbench.store.newfile import new_file
from tests.store.factories import make_row, make_run


def special(folder: Path) -> dict[str, Path]:
    """Make one of each kind of file that is none; a device can only be found."""
    made = {name: folder / name for name in ("pipe", "link", "dangling", "socket")}
    os.mkfifo(made["pipe"])
    (folder / "kept").write_text("kept\n")
    made["link"].symlink_to("kept")
    made["dangling"].symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(made["socket"]))
    return {**made, "folder": folder, "device": Path("/dev/full"), "stdout": Path("/dev/stdout")}


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path, force: bool) -> None:
    for name, path in special(tmp_path).items():
        before = os.lstat(path)
        with pytest.raises(UsageError, match=r"this is a .*nothing was changed") as caught, new_file(path, force=force):
            pytest.fail(f"{name} was taken")
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)
        after = os.lstat(path)
        assert (stat.S_IFMT(after.st_mode), after.st_ino) == (stat.S_IFMT(before.st_mode), before.st_ino), name
    assert (tmp_path / "kept").read_text() == "kept\n"


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "parquet"])
def test_export_with_force_replaces_a_file_and_no_link(store: Store, tmp_path: Path, form: str) -> None:
    run = make_run(label="x")
    store.begin_run(run)
    store.add_results(run.uuid, [make_row(0)], 0)
    links = special(tmp_path)
    for path in (links["link"], links["pipe"], Path("/dev/full")):
        with pytest.raises(UsageError, match="this is a"):
            export(store, "x", path, form, force=True)
    assert (tmp_path / "kept").read_text() == "kept\n"
    assert export(store, "x", tmp_path / "kept", form, force=True).rows == 1
    assert run.hw_class in (tmp_path / "kept").read_text()
    with pytest.raises(UsageError, match="there already"):
        export(store, "x", tmp_path / "kept", form)


def test_a_file_that_becomes_a_link_while_it_is_written_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def replace_it() -> None:
        with new_file(path, force=True) as temporary:
            temporary.write_text("new")
            path.unlink()
            path.symlink_to("elsewhere")

    with pytest.raises(UsageError, match="symbolic link"):
        replace_it()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]
    assert path.is_symlink()


def test_a_bundle_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("made")
    for path in (tmp_path / "link", Path("/dev/full"), Path("/dev/stdout")):
        with pytest.raises(UsageError):
            BundleWriter(path)
    assert not (tmp_path / "made").exists()
