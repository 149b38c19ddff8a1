"""A PostgreSQL server of the tests' own: a cluster in a temporary directory, on a free loopback port, no socket file.

PostgreSQL refuses to run as root: root's server runs as the user ``postgres``, anybody else's as themselves.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

START_S = 60.0
# crash tests kill processes, not the machine: what was written before the kill is in the kernel, synced or not
OPTIONS = (
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "fsync=off",
    "autovacuum=off",
    "max_connections=40",
)


def missing_server() -> str | None:
    """Return why no server can be started here, None when one can."""
    if binaries() is None:
        return "no PostgreSQL server binaries (initdb, postgres)"
    if os.geteuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            return "PostgreSQL does not run as root and there is no user postgres"
    return None


def binaries() -> Path | None:
    """Return the folder with initdb and postgres: ``PG_BIN``, the newest of Debian's, or the one on the PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name.zfill(8), reverse=True)
    found = shutil.which("initdb")
    for folder in (os.environ.get("PG_BIN"), *debian, Path(found).resolve().parent if found else None):
        if folder and all(os.access(Path(folder) / name, os.X_OK) for name in ("initdb", "postgres")):
            return Path(folder)
    return None


class Server:
    """A running server. ``url`` names its database ``postgres`` as the superuser ``kvbench``, without a password.

    ``options`` are further settings (``NAME=VALUE``); the cluster lies in ``parent`` (default: the temporary folder).
    """

    def __init__(self, *options: str, parent: Path | None = None) -> None:
        found = binaries()
        assert found is not None, "ask missing_server first"
        self._bin, self._options = found, (*OPTIONS, *options)
        self.folder = Path(tempfile.mkdtemp(prefix="kvbench-pg-", dir=parent))
        self._process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:
            shutil.chown(self.folder, "postgres")
        try:
            self._run("initdb", "-D", f"{self.folder}/data", "-U", "kvbench", "-A", "trust", "-E", "UTF8",
                      "--locale=C", "--no-sync", "--no-instructions")  # fmt: skip
            self.port = free_port()
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"postgresql://kvbench@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start the postmaster and wait until it takes connections. Raises RuntimeError with the end of its log.

        After a SIGKILL the backends of the old postmaster may hold its shared memory a moment longer: start again.
        """
        deadline = time.monotonic() + START_S
        while True:
            self._process = self._spawn()
            while self._process.poll() is None and time.monotonic() < deadline:
                if self._ready():
                    return
                time.sleep(0.02)
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"PostgreSQL did not start: {self._log()[-400:]}")
            if "Address already in use" in self._log():  # free when asked for, taken since
                self.port = free_port()
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the postmaster with SIGKILL, as the kernel does when memory runs out."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End the server; open connections are cut."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # immediate shutdown: the cluster is thrown away
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _user(self) -> str | None:
        return "postgres" if os.geteuid() == 0 else None

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._bin / program, *arguments], user=self._user(), cwd="/", capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr[-400:]}")

    def _spawn(self) -> subprocess.Popen[bytes]:
        settings = [word for option in (f"port={self.port}", *self._options) for word in ("-c", option)]
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                [self._bin / "postgres", "-D", f"{self.folder}/data", *settings],
                user=self._user(), cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def _ready(self) -> bool:
        # the postmaster writes this word once it takes connections (CreateDataDir lock file, line 8)
        try:
            lines = (self.folder / "data" / "postmaster.pid").read_text(encoding="ascii").splitlines()
        except OSError:
            return False
        assert self._process is not None
        return lines[:1] == [str(self._process.pid)] and len(lines) > 7 and lines[7].strip() == "ready"


def free_port() -> int:
    """Return a loopback port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
