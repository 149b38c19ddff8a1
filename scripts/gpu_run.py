"""The measurement behind ``scripts/gpu``; see docs/gpu-box.md. Called by it with the Python it chose.

Standard library and kvbench's own files only: the box may have neither SQLAlchemy nor an installed kvbench.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from kvbench.contract.bench import Bench  # noqa: E402
from kvbench.contract.discover import Suites, load_suites  # noqa: E402
from kvbench.contract.result import Result  # noqa: E402
from kvbench.errors import (  # noqa: E402
    EXIT_NO_DATA,
    EXIT_OK,
    EXIT_USAGE,
    KvbenchError,
    UsageError,
    printable,
)
from kvbench.units import format_bytes  # noqa: E402
from scripts import gpu_preflight as preflight  # noqa: E402
from scripts.gpu_bundle import Contents, collect  # noqa: E402
from scripts.gpu_stage import GRACE_S, Ended, Log, Stop, run  # noqa: E402

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
MOST_S = 24 * 3600.0
LEAST_S = 5.0
TESTS_SHARE, SANITIZER_SHARE = 0.25, 0.15
LEAST_RUN_S = 3.0  # less than a worker needs to start
SANITIZER_FAILED = 86
BUNDLE, LOG = "kvbench.jsonl", "log.txt"
_DRIVES_GPU = re.compile(
    r"kvbench\.(?:memory\.cuda|kernels\.cuda|kernels\.gpu|transport\.gpu)|kvbench\.transport import gpu"
)
_MARKED_GPU = re.compile(r"^\s*(?:@|pytestmark\s*=.*)pytest\.mark\.gpu\b", re.MULTILINE)
_ON_GPU = re.compile(r"(?:^|[:@])hbm(?:$|[:@])")


def parse_budget(text: str) -> float:
    """Return the seconds of ``8m``, ``90s``, ``1h`` or ``1.5m``. Raises UsageError for anything else."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])", text)
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not LEAST_S <= seconds <= MOST_S:
        raise UsageError("no budget", where="--budget", got=text, expected="5s to 24h, as 90s, 8m or 1h")
    return seconds


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. ``driver`` is the library taken for the driver: only tests give another."""

    budget_s: float
    out: Path
    wheels: Path | None
    selects: tuple[str, ...]
    driver: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where="scripts/gpu", mend="scripts/gpu --help")


def parse(words: Sequence[str]) -> Options:
    """Return the options. Raises UsageError; prints help and ends for ``--help``."""
    parser = _Parser(
        prog="scripts/gpu", allow_abbrev=False,
        description="Measure a GPU box without network: gpu tests, every suite at smoke, then quick while the budget "
        "lasts, tiny shapes under compute-sanitizer where it is there. Leaves one bundle below 16 MiB and a log. "
        "PYTHON= names the interpreter.",
    )  # fmt: skip
    parser.add_argument("select", nargs="*", metavar="SELECT", help="suites, or suite/bench (default: all)")
    parser.add_argument("--budget", default="8m", metavar="TIME", help="all of it ends within this: 90s, 8m, 1h (8m)")
    parser.add_argument("--out", default="gpu-out", metavar="DIR", help="where it is left (./gpu-out)")
    parser.add_argument("--wheels", metavar="DIR", help="wheels for what the Python here lacks; no network is used")
    parser.add_argument("--driver", default=preflight.DRIVER, help=argparse.SUPPRESS)
    found = parser.parse_args(list(words))
    out, wheels = Path(found.out), Path(found.wheels) if found.wheels else None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(
            "there is something already", where=f"--out {out}", mend="give another --out; nothing was changed"
        )
    if wheels is not None and not any(wheels.glob("*.whl")):
        raise UsageError("no wheel there", where=f"--wheels {wheels}", expected="a folder with *.whl files")
    return Options(parse_budget(found.budget), out, wheels, tuple(found.select), found.driver)


def install(wheels: Path, target: Path, log: Log, limit_s: float) -> None:
    """Unpack every wheel of ``wheels`` into ``target`` by pip, offline. Raises UsageError with pip's last word."""
    files = sorted(map(str, wheels.glob("*.whl")))
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir",
        "--disable-pip-version-check", "--target", str(target), *files,
    ]  # fmt: skip
    env = {**os.environ, "PIP_USER": "0"}  # `user = true` in a pip.conf contradicts --target
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise UsageError("installing the wheels took all of the budget", where=f"--wheels {wheels}") from None
    log.write((done.stdout + done.stderr).encode("utf-8", "replace"))
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
        raise UsageError(
            "the wheels could not be installed", where=f"--wheels {wheels}",
            got=lines[-1].strip() if lines else f"pip ended with code {done.returncode}",
            expected="one version of each package, built for this Python and machine",
        )  # fmt: skip


def drives_gpu(bench: Bench) -> bool:
    """Return whether the file of ``bench`` drives a GPU: by its name, or by what it imports inside the bench."""
    source = Path(bench.source)
    if "gpu" in source.stem:
        return True
    try:
        return bool(_DRIVES_GPU.search(source.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return False


def needs_gpu(row: Result, gpu_benches: frozenset[tuple[str, str]]) -> bool:
    """Return whether a row's case needs a GPU: a pair of tiers with hbm, or a bench of the GPU without such an axis."""
    words = [value for value in row.axes.values() if isinstance(value, str)]
    if any(_ON_GPU.search(word) for word in words):
        return True
    return (row.suite, row.bench) in gpu_benches and "pair" not in row.axes


@dataclass(slots=True)
class Session:
    """One call of the script: the budget, the environment of its commands, and what they came to."""

    options: Options
    suites: Suites
    log: Log
    stop: Stop
    env: Mapping[str, str]
    probe: preflight.Probe
    deadline: float
    parts: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds of the budget that a command may still use; what ending it takes is kept back."""
        return self.deadline - time.monotonic() - min(GRACE_S, 0.1 * self.options.budget_s)

    @property
    def over(self) -> bool:
        return self.stop.signal is not None or self.left < LEAST_RUN_S

    def command(self, what: str, words: Sequence[str], seconds: float) -> Ended:
        """Run one command for at most ``seconds`` of what is left."""
        limit = min(seconds, self.left)
        self.log.say(f"== {what}, at most {limit:.0f} s")
        grace = min(GRACE_S, 0.1 * self.options.budget_s)
        ended = run(words, env=self.env, cwd=ROOT, seconds=limit, log=self.log, stop=self.stop, grace=grace)
        how = {"ended": f"exit {ended.code}", "budget": "stopped: its time is over", "signal": "stopped by a signal"}
        self.log.say(f"== {what}: {how[ended.how]}, {ended.seconds:.1f} s")
        return ended

    def tests(self) -> None:
        """The tests marked gpu. Other test files need packages that a GPU box has no reason to carry."""
        files = [
            str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))
            if _MARKED_GPU.search(path.read_text(encoding="utf-8"))
        ]  # fmt: skip
        if not files:
            self.notes.append("tests: none of this tree is marked gpu")
        elif self.probe.packages["pytest"].problem:
            self.notes.append("tests: not run, pytest is missing")
        elif self.options.driver != preflight.DRIVER:
            self.notes.append("tests: not run, the driver is a stand-in")
        else:
            words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
            ended = self.command("tests marked gpu", words, TESTS_SHARE * self.options.budget_s)
            summary = next((line for line in reversed(ended.tail) if " in " in line and "s" in line), "no summary")
            if ended.how == "ended" and ended.code not in (0, 5):  # 5: nothing collected
                self.problems.append(f"tests marked gpu: {summary.strip('= ')}")
            else:
                self.notes.append(f"tests marked gpu: {summary.strip('= ')}")

    def measure(self, profile: str, name: str, selects: Sequence[str]) -> None:
        """One run into a part of its own. Every case is on disk before the next begins, so an end loses nothing."""
        part = self.options.out / "parts" / f"{name}.jsonl"
        self.parts.append(part)
        words = [
            sys.executable, "-m", "kvbench.cli.main", "run", *selects, "--profile", profile, "--no-db",
            "--bundle", str(part.resolve()), *self._scratch(),
        ]  # fmt: skip
        ended = self.command(f"{profile} of {' '.join(selects) or 'all suites'}", words, self.left)
        if ended.how == "budget":
            self.notes.append(f"{name}: cut by the budget; the cases before are kept")
        elif ended.how == "ended" and ended.code not in (EXIT_OK, EXIT_NO_DATA):
            last = next((line for line in reversed(ended.tail) if line.strip()), "")
            self.problems.append(f"{name}: kvbench ended with code {ended.code}: {printable(last.strip())}")

    def _scratch(self) -> list[str]:
        """Scratch files go where there is more room: homes on such boxes are often small."""
        from kvbench.memory.file import free_bytes, scratch_dir

        try:
            if free_bytes(scratch_dir()) >= free_bytes(self.options.out):
                return []
        except (KvbenchError, OSError):
            pass
        folder = self.options.out / "parts"
        return ["--scratch", str(folder.resolve())]

    def sanitize(self, benches: Sequence[Bench]) -> None:
        """The smallest shapes of each GPU bench under memcheck. Their times are worthless and go into no bundle."""
        tool = self.probe.sanitizer
        if tool is None or not benches:
            self.notes.append(f"compute-sanitizer: {'not here' if tool is None else 'no GPU bench to run under it'}")
            return
        until = time.monotonic() + SANITIZER_SHARE * self.options.budget_s
        clean = 0
        for bench in benches:
            if self.over or time.monotonic() >= until:
                self.notes.append(f"compute-sanitizer: {clean} of {len(benches)} benches, then its time was over")
                return
            words = [tool, "--error-exitcode", str(SANITIZER_FAILED), sys.executable, "-m", "kvbench.cli.main", "run",
                     f"{bench.suite}/{bench.name}", "--profile", "smoke", "--no-db"]  # fmt: skip
            sizes = bench.axes.get("bytes")
            if sizes is not None:
                numbers = [value for value in sizes.values("smoke") if isinstance(value, int)]
                words += ["-a", f"bytes={sizes.format(min(numbers))}"] if numbers else []
            ended = self.command(f"compute-sanitizer {bench.suite}/{bench.name}", words, until - time.monotonic())
            summaries = [line for line in ended.tail if "ERROR SUMMARY" in line]
            if ended.code == SANITIZER_FAILED or any(not re.search(r"SUMMARY: 0 errors", line) for line in summaries):
                self.problems.append(f"compute-sanitizer found errors in {bench.suite}/{bench.name}; the log has them")
            elif not summaries:
                self.notes.append(f"compute-sanitizer {bench.suite}/{bench.name}: no verdict ({ended.how})")
            else:
                clean += 1
        self.notes.append(f"compute-sanitizer: {clean} of {len(benches)} GPU benches without an error")

    def everything(self) -> None:
        """All stages in their order, until the budget or a signal ends them."""
        chosen = self.suites.select(list(self.options.selects))
        gpu = [bench for bench in chosen if drives_gpu(bench)]
        rest = [bench for bench in chosen if bench not in gpu]
        self.tests()
        if not self.over:
            self.measure("smoke", "smoke", self.options.selects)
        if not self.over:
            self.sanitize(gpu)
        # what only this box can tell comes first: the budget may end before the rest
        for name, members in (("quick-gpu", gpu), ("quick-host", rest)):
            if members and not self.over:
                self.measure("quick", name, [f"{bench.suite}/{bench.name}" for bench in members])
        if self.over and self.stop.signal is None:
            self.notes.append("the budget is used up")

    def finish(self) -> int:
        """Put the bundle together, say what is where, and return the exit code."""
        gpu = frozenset((b.suite, b.name) for b in self.suites.select(list(self.options.selects)) if drives_gpu(b))
        target = self.options.out / BUNDLE
        contents: Contents | None = None
        try:
            contents = collect(self.parts, target, lambda row: needs_gpu(row, gpu))
            self._drop_parts(contents)
            self._judge(contents)
        except KvbenchError as error:
            self.problems.append(str(error))
        for line in self.notes:
            self.log.say(line)
        for line in self.problems:
            self.log.say(f"PROBLEM: {line}")
        self._say_where(contents, target)
        if self.stop.signal is not None:
            return 128 + self.stop.signal
        return EXIT_NO_DATA if self.problems else EXIT_OK

    def _judge(self, contents: Contents) -> None:
        """Nothing measured is never success, and neither is a GPU box measured without its GPU."""
        failed, invalid = contents.having("failed"), contents.having("invalid")
        if failed or invalid:
            self.problems.append(f"{failed} cases failed, {invalid} are invalid: no number of them counts")
        if not contents.with_value:
            self.problems.append("nothing was measured")
        elif contents.gpu and not contents.gpu_with_value:
            self.problems.append("no case that needs the GPU has a value: the rows say why")

    def _drop_parts(self, contents: Contents) -> None:
        if contents.samples_a_row is None:  # the bundle has all of it
            shutil.rmtree(self.options.out / "parts", ignore_errors=True)
        else:
            self.notes.append(
                f"the bundle has {contents.samples_a_row} samples a row to stay below 16 MiB; all of them are in "
                f"{self.options.out / 'parts'}"
            )

    def _say_where(self, contents: Contents | None, target: Path) -> None:
        lines = []
        if contents is not None:
            total = len(contents.cases)
            lines.append(f"bundle  {target} ({format_bytes(target.stat().st_size)}, {contents.runs} runs)")
            lines.append(
                f"cases   {contents.with_value} of {total} with a value, {contents.having('skipped')} skipped; on the "
                f"GPU {contents.gpu_with_value} of {len(contents.gpu)}"
            )
        lines.append(f"log     {self.log.path}")
        if contents is not None:
            lines.append(f"next    where the database is: kvbench import {target}")
            lines.append(f"        as a reference: python scripts/gpu_reference.py {target}")
        for line in lines:
            self.log.say(line)
        try:
            print("\n".join(lines), flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads; the log has it


def environment(site: Path | None) -> dict[str, str]:
    """Return the environment of the commands: kvbench by path, no database, no setting of a former session."""
    env = {name: value for name, value in os.environ.items() if name != "KVBENCH_DB"}
    paths = [str(site)] if site is not None else []
    env["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT), *filter(None, [env.get("PYTHONPATH", "")])])
    env["PYTHONUNBUFFERED"] = "1"
    return env


def main(words: Sequence[str] | None = None) -> int:
    """Run ``scripts/gpu`` and return its exit code."""
    began = time.monotonic()
    try:
        options = parse(sys.argv[1:] if words is None else words)
        missing = preflight.driver_missing(options.driver)
        if missing is not None:
            raise UsageError(missing, mend="run this on the GPU box; scripts/bench measures a machine without one")
        suites = load_suites()
        suites.select(list(options.selects))
        (options.out / "parts").mkdir(parents=True)
    except KvbenchError as error:
        print(f"kvbench: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"kvbench: error: --out cannot be used: {printable(str(error), 300)}", file=sys.stderr)
        return EXIT_USAGE
    stop = Stop()
    log = Log(options.out / LOG)
    with stop.installed(), tempfile.TemporaryDirectory(prefix="kvbench-wheels-") as private:
        try:
            site = Path(private) if options.wheels is not None else None
            if options.wheels is not None:
                install(options.wheels, Path(private), log, options.budget_s)
            env = environment(site)
            probe = preflight.look(ROOT, env, options.driver, options.budget_s)
            for line in preflight.report(probe):
                log.say(line)
            in_the_way = preflight.obstacle(probe)
            if in_the_way is not None:
                raise UsageError(in_the_way)
            for problem in suites.problems:
                log.say(f"warning: {problem}")
        except KvbenchError as error:
            log.say(f"kvbench: error: {error}")
            # nothing was measured, and the next try shall not find the folder taken
            shutil.rmtree(options.out, ignore_errors=True)
            log.close()
            return error.exit_code
        session = Session(options, suites, log, stop, env, probe, began + options.budget_s)
        try:
            session.everything()
            return session.finish()
        finally:
            log.close()


if __name__ == "__main__":
    sys.exit(main())
