"""A real headless Chromium driven over its debugging pipe: no package, no port, no network."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--no-sandbox", "--hide-scrollbars", "--mute-audio", "--window-size=1280,900",
)  # fmt: skip
DEADLINE = 60.0


def find() -> str | None:
    """Return the browser: ``KVBENCH_TEST_CHROMIUM``, the first on the PATH, or one Playwright brought; else None."""
    own = os.environ.get("KVBENCH_TEST_CHROMIUM")
    if own:
        return own
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache/ms-playwright"))
        found = next(map(str, sorted(cache.glob("chromium-*/chrome-linux*/chrome"))), None)
    return found


def missing() -> str | None:
    """Return why no page can be opened in a browser, None where one is there."""
    return None if find() else "no Chromium (chromium or google-chrome on the PATH, or KVBENCH_TEST_CHROMIUM)"


class Page:
    """One tab. ``events`` are all protocol events so far; use as a context manager, which ends the browser."""

    def __init__(self, profile: Path) -> None:
        binary = find()
        assert binary is not None, "ask missing() first"
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def wire() -> None:
            # first out of the way: one end may itself be 3 or 4
            ends = os.dup(to_read), os.dup(to_write)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=wire, start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._next = 0
        self.events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self._call("Browser.close", {}, wait=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a protocol method on the tab and return its result."""
        return self._call(method, parameters, session=self._session)

    def _call(
        self, method: str, parameters: dict[str, Any], *, session: str | None = None, wait: bool = True
    ) -> dict[str, Any]:
        self._next += 1
        number = self._next
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while wait:
            found = self._receive()
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result
        return {}

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + DEADLINE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path: Path) -> None:
        """Load a file and wait until its script has run."""
        self.call("Page.navigate", url=path.as_uri())
        end = time.monotonic() + DEADLINE
        while self.run("document.documentElement?.dataset.ready") != "yes":
            if time.monotonic() > end:
                raise TimeoutError(f"{path} did not become ready")
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the mouse there, in pixels of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name: str, text: str = "") -> None:
        """Press and release a key; ``text`` is what it types."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def write(self, words: str) -> None:
        """Type ``words`` where the focus is."""
        self.call("Input.insertText", text=words)

    def picture(self, path: Path) -> None:
        """Save what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def of(self, *methods: str) -> list[dict[str, Any]]:
        """Return the parameters of the events called ``methods`` so far."""
        return [event["params"] for event in self.events if event["method"] in methods]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Page]:
    """Yield a tab that shows ``path``; its profile lives as long as it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Page(Path(profile)) as page:
        page.open(path)
        yield page
