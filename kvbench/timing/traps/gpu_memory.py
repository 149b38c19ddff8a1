"""T7, T8, T9, T26, T27, T35, T38, T39, T47, T48, T56, T62: is GPU memory what it is called, and did bytes arrive?"""

from __future__ import annotations

import itertools
from contextlib import ExitStack

from kvbench.memory import numa, payload
from kvbench.memory.cuda.buffers import HOWS, GpuBuffer, hbm, managed, pageable, pinned, pointer_facts
from kvbench.memory.cuda.device import Event, allocate
from kvbench.timing.clock import now_ns
from kvbench.timing.gpu_session import GpuSession
from kvbench.timing.traps.bed import Bed
from kvbench.timing.traps.gpu_bed import gpu, median, reader
from kvbench.timing.traps.memory import mapping_bytes
from kvbench.timing.traps.record import Finding, Number, check, unknown
from kvbench.units import KiB, MiB, format_value

ASYNC_SHARE = 0.5  # of the copy's time that submitting it may take: a staged copy is over when the call returns
COMBINED = 1e9  # B/s: a CPU reads write-combined memory slower than this, anything else faster
PLAIN_SHARE = 0.5
FIRST_COPY = 1.5
MIGRATED = 1.2
SHARED_GRANULE = 2 * MiB  # the driver hands memory out in pages of this size


def _copy_seconds(session: GpuSession, target: int, source: int, nbytes: int) -> tuple[float, float]:
    """Return the host's seconds of one copy from an idle device: until the call returns, and until it is done."""
    stream = session.clock.stream
    session.device.synchronize()
    begin = now_ns()
    stream.copy(target, source, nbytes)
    returned = now_ns() - begin
    stream.synchronize()
    return returned * 1e-9, (now_ns() - begin) * 1e-9


def pinned_is_pinned(nbytes: int = 64 * MiB) -> Finding:
    """T7: buffers called pinned that the driver calls so, and how soon a copy of each returns."""
    with gpu() as session, hbm(session.service, nbytes) as near:
        right, shares = 0, []
        for how in HOWS:
            with pinned(session.service, nbytes, how=how) as buffer:
                right += pointer_facts(session.device, buffer.host_address or 0).tier == "pinned"
                pairs = [_copy_seconds(session, near.copy_address, buffer.copy_address, nbytes) for _ in range(3)]
                shares.append(min(returned / done for returned, done in pairs))
        with pageable(session.service, 64 * KiB) as plain:
            stranger = pointer_facts(session.device, plain.host_address or 0).tier
    return judge_pinned(right, shares, stranger)


def judge_pinned(right: int, shares: list[float], stranger: str) -> Finding:
    """Judge how many buffers the driver calls pinned, the share of each copy spent submitting, other memory's tier."""
    threshold = f"all of them; a copy returns within {ASYNC_SHARE:.0%} of its time; ordinary memory is not pinned"
    found, expected = (
        Number("buffers the driver calls pinned", right, "buffers"),
        Number("made", len(shares), "buffers"),
    )
    note = f"submitting takes {', '.join(f'{share:.0%}' for share in shares)} of a copy; other memory is {stranger}"
    wrong = ["the driver calls a pinned buffer something else"] if right != len(shares) else []
    wrong += ["a copy returns only when it is done: it is staged, not direct"] if max(shares) > ASYNC_SHARE else []
    wrong += [f"the driver calls ordinary memory {stranger}"] if stranger != "pageable" else []
    return check(not wrong, found, expected, threshold, "; ".join(wrong), note)


def pageable_race(sizes: tuple[int, ...] = (64 * KiB, MiB, 4 * MiB), reps: int = 200) -> Finding:
    """T8: copies of pageable memory that another stream read whole after kvbench waited for them."""
    right = unguarded = 0
    with gpu() as session, ExitStack() as stack:
        service = session.service  # its stream is another one than the clock's
        for size in sizes:
            near = allocate(session.device, size, stack)
            far = stack.enter_context(pageable(service, size))
            wanted = payload.checksum(far.array())
            for _ in range(-(-reps // len(sizes))):
                service.stream.set_bytes(near, 0, size)
                service.stream.synchronize()
                session.clock.stream.copy(near, far.copy_address, size)
                session.clock.stream.synchronize()
                right += service.checksum(near, size) == wanted
                unguarded += 1
    return judge_arrivals(right, unguarded, "copies of pageable memory read whole by another stream")


def judge_arrivals(right: int, made: int, what: str) -> Finding:
    """Judge how many of ``made`` copies arrived."""
    return check(
        right == made and made > 0, Number(what, right, "copies"), Number("made", made, "copies"), "all of them",
        f"{made - right} of {made} were read before they had arrived: waiting for a copy does not wait for it",
    )  # fmt: skip


def source_overwritten(nbytes: int = 16 * MiB) -> Finding:
    """T9: copies whose source changes while they wait are seen as wrong, copies that were waited for are right."""
    with gpu() as session, hbm(session.service, nbytes) as near, pinned(session.service, nbytes) as far:
        service, clock, stream = session.service, session.clock, session.clock.stream
        view, wanted = far.array(), payload.checksum(far.array())
        with Event(session.device) as done:
            stream.copy(near.copy_address, far.copy_address, nbytes)
            stream.record(done)
            done.synchronize()
            view ^= 0xFF
            guarded = service.checksum(near.copy_address, nbytes) == wanted
        view ^= 0xFF
        clock.blocker.arm(stream)
        try:
            stream.copy(near.copy_address, far.copy_address, nbytes)
            view ^= 0xFF  # the engine has not begun: it is behind the blocker
        finally:
            clock.blocker.release()
        stream.synchronize()
        noticed = service.checksum(near.copy_address, nbytes) != wanted
        view ^= 0xFF
    return judge_overwritten(guarded, noticed)


def judge_overwritten(guarded: bool, noticed: bool) -> Finding:
    """Judge whether a waited-for copy is right, and whether the check notices one whose source was overwritten."""
    wrong = [] if guarded else ["a copy that was waited for holds what was written to its source later"]
    wrong += [] if noticed else ["the payload check does not notice a source that was overwritten under the copy"]
    return check(
        not wrong, Number("copies judged rightly", guarded + noticed, "copies"), Number("made", 2, "copies"), "both",
        "; ".join(wrong),
    )  # fmt: skip


def host_placement(nbytes: int = 5 * MiB + 4096) -> Finding:
    """T26: bytes of a pinned buffer on the GPU's node; its size is what was asked, not a power of two."""
    with gpu() as session, pinned(session.service, nbytes) as far:
        wanted = session.device.facts.node
        nodes = numa.histogram(far.host_address or 0, nbytes // 4096 * 4096).value
        size = far.array().nbytes
    if wanted.value is None or not nodes:
        return unknown(wanted.reason or "the kernel does not tell where the pages are", "all of it, exactly as large")
    return judge_host_placement(nodes.get(wanted.value, 0), size, nbytes // 4096 * 4096, nbytes)


def judge_host_placement(there: int, size: int, pages: int, asked: int) -> Finding:
    """Judge bytes on the GPU's node of ``pages`` whole pages, and the buffer's ``size`` against ``asked``."""
    wrong = [] if there >= pages else [f"{pages - there} bytes lie on another node"]
    wrong += [] if size == asked else [f"{size} bytes were made for {asked}"]
    return check(
        not wrong, Number("bytes on the GPU's node", there, "bytes"), Number("bytes of whole pages", pages, "bytes"),
        "all of it, exactly as large as asked", "; ".join(wrong),
    )  # fmt: skip


def separate_blocks(count: int = 8, nbytes: int = MiB) -> Finding:
    """T27: buffers alive at once that share no byte."""
    with gpu() as session, ExitStack() as stack:
        starts = [stack.enter_context(hbm(session.service, nbytes, seed=i + 1)).copy_address for i in range(count)]
    return judge_separate(starts, nbytes)


def judge_separate(starts: list[int], nbytes: int) -> Finding:
    """Judge the addresses of buffers of ``nbytes``."""
    ordered = sorted(starts)
    apart = 1 + sum(b - a >= nbytes for a, b in itertools.pairwise(ordered))
    return check(
        apart == len(starts), Number("buffers of their own", apart, "buffers"), Number("alive", len(starts), "buffers"),
        "all of them", "two buffers share memory: one is read out of the cache that the other filled",
    )  # fmt: skip


def write_combined(nbytes: int = 64 * MiB) -> Finding:
    """T35: the rate at which a core reads pinned memory, against plain memory."""
    from kvbench.kernels.stream import Stream as HostStream

    bed = Bed()
    with gpu() as session, bed.team() as team, bed.buffer(nbytes) as plain:
        rates: dict[str, float] = {}
        for how in HOWS:
            with pinned(session.service, nbytes, how=how) as far:
                work = HostStream("read", [far.host_address or 0], nbytes, team)
                rates[how] = nbytes / min(work.run() for _ in range(3))
        work = HostStream("read", [plain.address], nbytes, team)
        beside = nbytes / min(work.run() for _ in range(3))
    return judge_combined(rates, beside)


def judge_combined(rates: dict[str, float], plain: float) -> Finding:
    """Judge a core's read rates of pinned memory, by how it was made, against ``plain`` memory; B/s."""
    how = min(rates, key=lambda name: rates[name])
    bad = rates[how] < COMBINED or rates[how] < PLAIN_SHARE * plain
    return check(
        not bad, Number(f"a core reads pinned memory ({how})", rates[how], "B/s"),
        Number("plain memory", plain, "B/s"), f"at least {PLAIN_SHARE:.0%} of it and {format_value(COMBINED, 'B/s')}",
        "pinned memory is write-combined or uncached: every host step over it crawls",
    )  # fmt: skip


def right_labels(nbytes: int = MiB) -> Finding:
    """T38: buffers of every tier whose name is the driver's, and copies either way that moved the far or near bytes."""
    right = made = 0
    with gpu() as session, ExitStack() as stack:
        service, stream = session.service, session.clock.stream
        far = stack.enter_context(pinned(service, nbytes, seed=1))
        near = stack.enter_context(hbm(service, nbytes, seed=2))
        tiers: list[GpuBuffer] = [far, near, stack.enter_context(pageable(service, nbytes))]
        if session.device.attribute("MANAGED_MEMORY"):
            tiers.append(stack.enter_context(managed(service, nbytes)))
        for buffer in tiers:
            address = buffer.host_address if buffer.tier in ("pageable", "pinned") else buffer.device_address
            right += pointer_facts(session.device, address or 0).tier == buffer.tier
            made += 1
        theirs, ours = far.checksum(), near.checksum()
        stream.copy(near.copy_address, far.copy_address, nbytes)  # fetch: far to near
        stream.synchronize()
        right += near.checksum() == theirs and far.checksum() == theirs
        near.refill(2)
        stream.copy(far.copy_address, near.copy_address, nbytes)  # evict: near to far
        stream.synchronize()
        right += far.checksum() == ours and near.checksum() == ours
    return judge_labels(right, made + 2)


def judge_labels(right: int, made: int) -> Finding:
    """Judge how many of ``made`` tiers and directions are what they are called."""
    return check(
        right == made, Number("tiers and directions as they are called", right, "1"), Number("looked at", made, "1"),
        "all of them", "a tier or a direction has another's name: two rows are swapped",
    )  # fmt: skip


def device_alias(nbytes: int = MiB) -> Finding:
    """T39: pinned buffers that the device reads right at the address kvbench hands to kernels."""
    right, same = 0, 0
    with gpu() as session:
        for how in HOWS:
            with pinned(session.service, nbytes, how=how) as far:
                alias = far.device_address or 0
                right += session.service.checksum(alias, nbytes) == payload.checksum(far.array())
                same += alias == far.host_address
    return check(
        right == len(HOWS), Number("pinned buffers the device reads right", right, "buffers"),
        Number("made", len(HOWS), "buffers"), "all of them",
        "the device reads something else at the address it is given", f"{same} of {len(HOWS)} have the host's address",
    )  # fmt: skip


def first_copy(nbytes: int = 64 * MiB) -> Finding:
    """T47: the first copy of a fresh pinned buffer, against later ones."""
    with gpu() as session, hbm(session.service, nbytes) as near, pinned(session.service, nbytes) as far:
        spans = [_copy_seconds(session, near.copy_address, far.copy_address, nbytes)[1] for _ in range(6)]
    return judge_first_copy(spans[0], sorted(spans[1:])[2])


def judge_first_copy(first: float, later: float) -> Finding:
    """Judge seconds of the first copy against the median of later ones."""
    return check(
        first <= FIRST_COPY * later, Number("first copy", first, "s"), Number("later copies", later, "s"),
        f"at most {FIRST_COPY:g} x", f"the first copy takes {first / later:.2f} x later ones: pinning is in it",
    )  # fmt: skip


def resident_source(nbytes: int = 16 * MiB) -> Finding:
    """T48: bytes of a registered buffer that are in memory before its first copy."""
    with gpu() as session, pinned(session.service, nbytes) as far:
        there = mapping_bytes(far.host_address or 0, "Rss")
    threshold = "all of it"
    if there is None:
        return unknown("no /proc/self/smaps here, so nobody knows what is in memory", threshold, mend="mount /proc")
    return check(
        there >= nbytes, Number("in memory before the first copy", there, "B"), Number("size", nbytes, "B"), threshold,
        "pages are missing: the first copy waits for the kernel to make them",
    )  # fmt: skip


def pages_that_move(nbytes: int = 64 * MiB) -> Finding:
    """T56: a kernel's first read of managed memory that the host wrote last, against its second."""
    with gpu() as session, managed(session.service, nbytes) as far:
        read = reader(session.service, far.copy_address, nbytes)
        once = session.clock.submission(read)  # making it reads once: the pages are the device's now
        payload.fill(far.array(), 1)
        first = once(1)
        later = median(once)
    return judge_migration(first, later)


def judge_migration(first: float, later: float) -> Finding:
    """Judge seconds of the first and of later reads of managed memory."""
    threshold = f"at least {MIGRATED:g} x: the first read finds the pages on the host"
    found, expected = Number("first read", first, "s"), Number("later reads", later, "s")
    if first < MIGRATED * later:
        reason = "the first read is no slower: coherent memory that stays, or pages that had already moved"
        return unknown(reason, threshold, found, expected)
    note = f"{first / later:.1f} x: managed cases bring pages back to the host before every pass"
    return check(True, found, expected, threshold, "", note)


def free_memory(nbytes: int = 64 * MiB) -> Finding:
    """T62: by how much free memory falls for a buffer, and that it comes back."""
    with gpu() as session:
        before = session.device.memory()[0]
        with hbm(session.service, nbytes):
            during = session.device.memory()[0]
        after = session.device.memory()[0]
    return judge_free(before, during, after, nbytes)


def judge_free(before: int, during: int, after: int, nbytes: int) -> Finding:
    """Judge free bytes before, while and after ``nbytes`` were held."""
    taken, lost = before - during, before - after
    good = nbytes <= taken <= nbytes + 2 * SHARED_GRANULE and lost <= SHARED_GRANULE
    reason = f"free memory fell by {taken} bytes for {nbytes}: it is stale, or others use this GPU now"
    if nbytes <= taken <= nbytes + 2 * SHARED_GRANULE:
        reason = f"{lost} bytes did not come back"
    return check(
        good, Number("free memory fell by", taken, "B"), Number("bytes held", nbytes, "B"),
        f"within {SHARED_GRANULE // MiB} MiB pages, and it comes back", reason,
    )  # fmt: skip
