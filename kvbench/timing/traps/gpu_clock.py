"""T10, T11, T17, T18, T20, T36, T37, T40, T41, T54: does the event clock time all of the work, from where it says?"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from kvbench import children
from kvbench.errors import KvbenchError, Unavailable
from kvbench.memory.cuda.device import Launch, Stream
from kvbench.memory.cuda.driver import LIBRARY, CudaError
from kvbench.timing.clock import now_ns
from kvbench.timing.gpu_session import GpuSession
from kvbench.timing.traps.bed import Bed
from kvbench.timing.traps.gpu_bed import gpu, median, reader, zeroed
from kvbench.timing.traps.record import Finding, Number, check, unknown
from kvbench.units import GiB, MiB, format_bytes, format_value

CACHE_MULTIPLE, CACHE_SPEEDUP = 4, 1.3  # traps.md T10
COLD_LEAST = 1.1
ISOLATED = 1.2  # traps.md T17
QUEUE = 2.0
FALL_OFF = 0.9
OVERLAP = 0.95  # traps.md T37
SUBMITTED = 0.95
CHILD_S = 120.0


def _needs(session: GpuSession, nbytes: int) -> None:
    free, _ = session.device.memory()
    if free < nbytes + nbytes // 8:
        raise Unavailable(f"{format_bytes(nbytes)} of GPU memory are needed, {format_bytes(free)} are free")


def _l2(session: GpuSession) -> int:
    size = session.device.facts.l2_bytes
    if not size:
        raise Unavailable("the driver reports no L2 size")
    return size


def beyond_l2() -> Finding:
    """T10: the rate of a hot read of four L2 against eight."""
    with gpu() as session:
        near = CACHE_MULTIPLE * _l2(session)
        _needs(session, 2 * near)
        with zeroed(session, 2 * near) as address:
            times = [median(session.clock.hot(reader(session.service, address, n)), 4) / n for n in (near, 2 * near)]
    return judge_beyond(1.0 / times[0], 1.0 / times[1], near)


def judge_beyond(near: float, far: float, nbytes: int) -> Finding:
    """Judge the rates in B/s at ``nbytes``, four L2 as the driver reports it, and at twice that."""
    ratio = near / far
    return check(
        ratio <= CACHE_SPEEDUP, Number(f"rate at {format_bytes(nbytes)} / rate at twice that", ratio, "1"),
        Number("both from memory", 1.0, "1"), f"at most {CACHE_SPEEDUP}",
        f"{ratio:.2f} x faster: the L2 is larger than the driver says, and cache is shown as memory",
        f"{format_value(near, 'B/s')} against {format_value(far, 'B/s')}",
    )  # fmt: skip


def flush_flushes() -> Finding:
    """T11: a read of half an L2 after a flush, against the same read in a row."""
    with gpu() as session:
        nbytes = _l2(session) // 2
        with zeroed(session, nbytes) as address:
            read = reader(session.service, address, nbytes)
            cold, hot = median(session.clock.cold(read)), median(session.clock.isolated(read))
    return judge_flush(cold, hot, nbytes)


def judge_flush(cold: float, hot: float, nbytes: int) -> Finding:
    """Judge seconds of a read of ``nbytes``, less than the L2, with and without a flush before it."""
    return check(
        cold >= COLD_LEAST * hot, Number(f"read of {format_bytes(nbytes)} after a flush", cold, "s"),
        Number("the same read in a row", hot, "s"), f"at least {COLD_LEAST:g} x",
        f"a flush changes nothing ({cold / hot:.2f} x): cold rows are hot ones",
    )  # fmt: skip


def launch_gaps(nbytes: int = 32 * MiB) -> Finding:
    """T17: one read between two events of its own, against its share of many between one pair."""
    with gpu() as session, zeroed(session, nbytes) as address:
        read = reader(session.service, address, nbytes)
        alone, streamed = median(session.clock.isolated(read), 8), median(session.clock.hot(read), 32)
        grain = session.clock.quantum.seconds
    return judge_gaps(alone, streamed, grain)


def judge_gaps(alone: float, streamed: float, grain: float) -> Finding:
    """Judge seconds of a kernel alone between events and as one of many; ``grain``: what one window is uncertain by."""
    return check(
        alone <= ISOLATED * streamed + grain, Number("alone between two events", alone, "s"),
        Number("one of many", streamed, "s"), f"at most {ISOLATED:g} x and what events resolve",
        f"{alone / streamed:.2f} x: the time of a launch is between the events",
        f"events resolve {format_value(grain, 's')}",
    )  # fmt: skip


def queue_depth(few: int = 100) -> Finding:
    """T18: the host's time to queue one operation when as many wait as the clock allows, against when few do."""
    with gpu() as session:
        clock, stream = session.clock, session.clock.stream
        with zeroed(session, 4096) as address:
            costs = {}
            for count in (few, clock.depth - 2):
                best = float("inf")
                for _ in range(3):
                    clock.blocker.arm(stream)
                    try:
                        begin = now_ns()
                        for _ in range(count):
                            stream.set_bytes(address, 0, 8)
                        best = min(best, (now_ns() - begin) * 1e-9 / count)
                    finally:
                        clock.blocker.release()
                    stream.synchronize()
                costs[count] = best
            refused = False
            try:
                clock.hot(lambda to: to.set_bytes(address, 0, 8), operations=4 * clock.depth)
            except Unavailable:
                refused = True
    return judge_queue(costs[few], costs[clock.depth - 2], clock.depth, refused=refused)


def judge_queue(few: float, many: float, depth: int, *, refused: bool) -> Finding:
    """Judge seconds to queue one operation, and whether more than ``depth`` were ``refused``."""
    wrong = [] if many <= QUEUE * few else [f"queuing takes {many / few:.1f} x longer: the queue is full below {depth}"]
    wrong += [] if refused else [f"more than {depth} operations behind the blocker are not refused"]
    return check(
        not wrong, Number(f"queuing one of {depth - 2}", many, "s"), Number("queuing one of few", few, "s"),
        f"at most {QUEUE:g} x, and more are refused", "; ".join(wrong),
    )  # fmt: skip


def escaped_work(milliseconds: int = 10) -> Finding:
    """T20: pieces of work on another stream that the clock refuses: one counted by kvbench, one behind its back."""
    refused = 0
    with gpu() as session, Stream(session.device) as other, zeroed(session, 256) as words:
        # waits for a word that never comes, so it lasts as long on every device
        arguments = [ctypes.c_uint64(words), ctypes.c_uint64(words + 128), ctypes.c_uint32(1)]
        wait = Launch(session.service.block, 1, 1, [*arguments, ctypes.c_uint64(milliseconds * 1_000_000)])

        def counted(stream: Stream) -> None:
            other.launch(wait)

        def behind(stream: Stream) -> None:
            stream.set_bytes(words + 192, 0, 8)
            session.device.call(
                "cuLaunchKernel", wait.function, 1, 1, 1, 1, 1, 1, 0, other.handle, wait.packed, None
            )  # fmt: skip

        for submit in (counted, behind):
            try:
                session.clock.hot(submit)
            except (Unavailable, CudaError):
                raise
            except KvbenchError:
                refused += 1
            session.device.synchronize()
    return judge_escapes(refused, 2)


def judge_escapes(refused: int, made: int) -> Finding:
    """Judge how many of ``made`` pieces of work outside the clock's stream were refused."""
    return check(
        refused == made, Number("work on another stream that was refused", refused, "1"), Number("tried", made, "1"),
        "all of it", "work on another stream is not timed, and its row looks fast",
    )  # fmt: skip


def large_buffers(small: int = GiB, large: int = 16 * GiB) -> Finding:
    """T36: the rate of a read of 16 GiB of GPU memory against 1 GiB."""
    with gpu() as session:
        _needs(session, large)
        with zeroed(session, large) as address:
            rates = [n / median(session.clock.hot(reader(session.service, address, n))) for n in (small, large)]
    return judge_fall_off(rates[0], rates[1])


def judge_fall_off(small: float, large: float) -> Finding:
    """Judge rates in B/s of a small and of a large buffer."""
    return check(
        large >= FALL_OFF * small, Number("rate of the large buffer", large, "B/s"),
        Number("rate of the small one", small, "B/s"), f"at least {FALL_OFF:.0%}",
        f"large buffers get {large / small:.2f} of it (translation misses): a rate holds for its size only",
        mend="quote the size with the rate; compare rows of one size",
    )  # fmt: skip


def both_directions(nbytes: int = 64 * MiB) -> Finding:
    """T37: the share of time in which both directions of a case were under way, and the bytes it counts."""
    with gpu():
        pass
    row = Bed().case(
        "ladder", "link", pair="hbm:pinned", alloc="register", transport="ce", direction="both", bytes=nbytes, pieces=1,
        pages="4k", node="near", device=0,
    )  # fmt: skip
    overlap = row.detail.get("overlap")
    return judge_both(
        float(overlap) if isinstance(overlap, int | float) else None, "overlap_partial" in row.flags,
        row.bytes.link or 0, 2 * nbytes,
    )  # fmt: skip


def judge_both(overlap: float | None, flagged: bool, counted: int, moved: int) -> Finding:
    """Judge the share of overlap, whether a partial one is flagged, and the bytes counted against those moved."""
    threshold = f"at least {OVERLAP:.0%} or flagged overlap_partial; bytes of both directions"
    if counted != moved:
        return check(
            False, Number("bytes counted", counted, "bytes"), Number("bytes moved", moved, "bytes"), threshold,
            "the total is not of both directions",
        )  # fmt: skip
    if overlap is None:
        return unknown("the row does not tell how long both were under way", threshold)
    return check(
        overlap >= OVERLAP or flagged, Number("both under way", overlap, "1"), Number("all of the time", 1.0, "1"),
        threshold, "one direction ran alone for part of the time, and no flag says so",
        *(("flagged overlap_partial",) if flagged else ()),
    )  # fmt: skip


def batch_interface(nbytes: int = MiB) -> Finding:
    """T40: bytes that the batched copy call moved to where they belong, by whichever interface this driver has."""
    with gpu():
        pass
    row = Bed().case(
        "ladder", "link", pair="hbm:pinned", alloc="register", transport="batch", direction="fetch", bytes=nbytes,
        pieces=64, pages="4k", node="near", device=0,
    )  # fmt: skip
    return check(
        row.bytes.unique == nbytes, Number("bytes moved and checked", row.bytes.unique or 0, "bytes"),
        Number("bytes asked for", nbytes, "bytes"), "all of them, compared after the copy",
        "the batched call counts something else", str(row.kernel),
    )  # fmt: skip


def swallowed_error(library: str | Path = LIBRARY, image: Path | None = None) -> Finding:
    """T41: phases after a broken kernel in which a process of its own was told; no number may come out."""
    with gpu():
        pass
    command = children.python("kvbench.timing.traps.gpu_poison", str(library), *([str(image)] if image else []))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S, check=False)
    except subprocess.TimeoutExpired:
        return unknown(f"the process with the broken kernel did not end within {CHILD_S:g} s", "told, and no number")
    return judge_error(done.stdout.split(), done.returncode)


def judge_error(words: list[str], code: int) -> Finding:
    """Judge what the process said, ``raised`` for each phase or ``number``, and its exit code."""
    threshold = "both: the phase itself and the one after it"
    if not words and code:
        return unknown(f"the process with the broken kernel could not begin (exit {code})", threshold)
    raised = sum(word == "raised" for word in words)
    return check(
        raised == 2 and "number" not in words, Number("phases told of a broken kernel", raised, "1"),
        Number("phases after it", 2, "1"), threshold, "a broken kernel gives a number: errors are swallowed",
    )  # fmt: skip


def waited_for(nbytes: int = 256 * MiB) -> Finding:
    """T54: a copy timed by the host until it is complete, against the device's own time of it."""
    with gpu() as session, zeroed(session, 2 * nbytes) as address:

        def copy(stream: Stream) -> None:
            stream.copy(address, address + nbytes, nbytes)

        host, device = median(session.clock.submission(copy)), median(session.clock.hot(copy))
        session.device.synchronize()
        begin = now_ns()
        copy(session.clock.stream)
        submit = (now_ns() - begin) * 1e-9
        session.clock.stream.synchronize()
    return judge_waited(host, device, submit)


def judge_waited(host: float, device: float, submit: float) -> Finding:
    """Judge seconds by the host, by the device, and of the submit alone."""
    return check(
        host >= SUBMITTED * device, Number("by the host, first submit to completion", host, "s"),
        Number("by the device", device, "s"), f"at least {SUBMITTED:.0%}",
        "the host's time ends before the device has done the work: only the submit is timed",
        f"the submit alone takes {format_value(submit, 's')}",
    )  # fmt: skip
