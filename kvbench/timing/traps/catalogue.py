"""Which traps there are, how one is run, and what the list looks like for people and for programs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from kvbench.errors import EXIT_NO_DATA, EXIT_OK, KvbenchError, Unavailable, VerifyError, printable
from kvbench.timing.traps import compiled, counting, environment, memory, sampling
from kvbench.timing.traps.catalogue_gpu import GPU_TRAPS
from kvbench.timing.traps.catalogue_host import MORE_TRAPS
from kvbench.timing.traps.record import Finding, NotApplicable, Trap, TrapResult, not_applicable, unknown
from kvbench.timing.traps.words import BUG, QUIET
from kvbench.units import format_value

SCHEMA = "kvbench.traps/1"
# Units of numbers that are shown as they are, without a prefix.
COUNTED = frozenset({
    "pages", "words", "faults", "threads", "CPUs", "bytes", "1", "buffers", "copies", "rows", "tools", "boards", "W",
})  # fmt: skip
VERDICTS = ("pass", "fail", "unknown", "not applicable")

HOST_TRAPS: tuple[Trap, ...] = (
    Trap("T1", "GB and GiB confused", "every rate shown is 7 % off", BUG, lambda: counting.decimal_units()),
    Trap("T2", "bytes of a copy counted once or twice", "rates of copies are off by a factor of 2 against reads", BUG,
         lambda: counting.bytes_per_pass()),
    Trap("T4", "memory never written reads one shared page of zeros", "a cache is measured in the name of memory", BUG,
         lambda: memory.never_written()),
    Trap("T5", "constant payload", "merged, compressed or cheaper-to-move data makes results too good", BUG,
         lambda: memory.constant_payload()),
    Trap("T6", "the first pass includes page faults", "the page allocator is measured in the name of memory", BUG,
         lambda: memory.first_touch()),
    Trap("T12", "a working set that lives in the last-level cache", "cache speed is shown as memory speed",
         "trust only rows of 16 x the size that doctor states, and report the machine",
         lambda: counting.last_level_cache()),
    Trap("T16", "samples shorter than the clock resolves", "values are multiples of a clock tick", BUG,
         lambda: sampling.clock_grain()),
    Trap("T19", "only the submit is timed", "rates beyond what the hardware can do", BUG,
         lambda: sampling.submit_only()),
    Trap("T23", "loading or compiling inside the first sample", "the first of few samples bends the result", BUG,
         lambda: sampling.cold_first_sample()),
    Trap("T24", "compiled late, or stale machine code", "the compiler is timed, or code that no longer exists", BUG,
         lambda: compiled.compiled_late()),
    Trap("T25", "allocation inside the timed region", "the allocator is timed with the work", BUG,
         lambda: sampling.allocations()),
    Trap("T29", "NUMA balancing moves pages", "cases differ from pass to pass and are marked migrated",
         "sudo sysctl kernel.numa_balancing=0", lambda: environment.pages_migrated()),
    Trap("T31", "threads on wrong cores or on siblings", "threads share a core: bandwidth and compute read low", BUG,
         lambda: environment.own_cores()),
    Trap("T32", "a CPU quota stops the group", "cases with more threads than the quota are stopped and tainted",
         "docker run without --cpus (Kubernetes: no cpu limit), or taskset to as many CPUs as the quota allows",
         lambda: environment.cpu_quota()),
    Trap("T33", "a core stolen by another thread", "disturbed samples count as if nothing had happened", QUIET,
         lambda: environment.stolen_core()),
    Trap("T34", "other pages than the row says", "4k and thp rows are compared by labels that are not true",
         "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled", lambda: memory.huge_pages()),
    Trap("T53", "an unstable clock source", "every time on this machine is wrong by an unknown factor",
         "echo tsc | sudo tee /sys/devices/system/clocksource/clocksource0/current_clocksource",
         lambda: sampling.clock_source()),
    Trap("T55", "32-bit sizes in kernels", "large buffers are only partly read or written, so rates are too high", BUG,
         lambda: memory.beyond_32_bits()),
    Trap("T57", "differences below the noise floor", "an effect smaller than the floor is not an effect", QUIET,
         lambda: sampling.same_twice()),
)  # fmt: skip

TRAPS: tuple[Trap, ...] = tuple(sorted((*HOST_TRAPS, *MORE_TRAPS, *GPU_TRAPS), key=lambda trap: int(trap.id[1:])))


def examine(trap: Trap) -> TrapResult:
    """Run one trap. What the measured path raises is a finding too, never an exception: nothing may end the list."""
    began = time.perf_counter()
    try:
        finding = trap.look()
    except NotApplicable as absent:
        finding = not_applicable(str(absent))
    except Unavailable as error:
        finding = unknown(str(error), "not looked at", mend=error.mend)
    except VerifyError as error:
        finding = Finding("fail", None, None, "the payload check passes", f"payload check failed: {error}")
    except KvbenchError as error:
        finding = Finding("fail", None, None, "the measured path gives a number", str(error))
    except Exception as error:  # a self-test that breaks has found something, but nobody knows what
        finding = Finding("fail", None, None, "the self-test ends", f"it broke: {type(error).__name__}: {error}")
    silent = finding.verdict == "not applicable" or (finding.verdict == "unknown" and trap.mend == BUG)
    mend = finding.mend or ("" if silent else trap.mend)
    return TrapResult(trap.id, trap.title, finding, trap.means, mend, time.perf_counter() - began)


def exit_code(results: Sequence[TrapResult]) -> int:
    """Return 0 when no trap fails and at least one passes: a list of unknowns has shown nothing."""
    verdicts = [result.verdict for result in results]
    return EXIT_OK if "fail" not in verdicts and "pass" in verdicts else EXIT_NO_DATA


def to_document(results: Sequence[TrapResult]) -> dict[str, Any]:
    """Return the ``kvbench.traps/1`` document."""
    counts = {word.replace(" ", "_"): sum(result.verdict == word for result in results) for word in VERDICTS}
    return {
        "schema": SCHEMA, "traps": [result.to_json() for result in results], "counts": counts,
        "exit_code": exit_code(results), "seconds": round(sum(result.seconds for result in results), 3),
    }  # fmt: skip


def render_text(results: Sequence[TrapResult]) -> str:
    """Return the list for reading: each trap with the two numbers it compared, the causes of what did not pass.

    What is not applicable here stands at the end, a line each under the reason it shares.
    """
    lines: list[str] = []
    absent: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == "not applicable":
            absent.setdefault(result.finding.reason, []).append(f"  {result.id:4} {result.title}")
        else:
            lines += _entry(result)
    for reason, entries in absent.items():
        lines += [f"not applicable: {reason}", *entries]
    counts = to_document(results)["counts"]
    lines.append(
        f"{counts['pass']} passed, {counts['fail']} failed, {counts['unknown']} unknown, "
        f"{counts['not_applicable']} not applicable"
    )
    return "\n".join(printable(line, 500) for line in lines)


def _entry(result: TrapResult) -> Iterable[str]:
    finding = result.finding
    yield f"{result.id:4} {finding.verdict.upper() if finding.verdict == 'fail' else finding.verdict:8} {result.title}"
    pad = " " * 14
    for number in (finding.found, finding.expected):
        if number is not None:
            yield f"{pad}{number.label}: {_shown(number.value, number.unit)}"
    yield f"{pad}must hold: {finding.threshold}"
    for note in finding.notes:
        yield f"{pad}({note})"
    if finding.verdict != "pass":
        yield f"{pad}because: {finding.reason}"
        if finding.verdict == "fail":
            yield f"{pad}for results: {result.means}"
        if result.mend:
            yield f"{pad}mend: {result.mend}"


def _shown(value: float, unit: str) -> str:
    if unit in COUNTED:
        number = f"{value:.4g}" if value != int(value) else f"{int(value)}"
        return number if unit == "1" else f"{number} {unit}"
    return format_value(value, unit)
