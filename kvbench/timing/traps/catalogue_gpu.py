"""Traps that need a GPU."""

from __future__ import annotations

from kvbench.timing.traps.record import Finding, Trap
from kvbench.timing.traps.words import BUG

MOVED = "bytes are counted that did not arrive, or arrived in another order"
BOARD = "nvidia-smi -q shows the setting; docs/traps.md has the command"


def _memory(name: str) -> Finding:
    from kvbench.timing.traps import gpu_memory

    found: Finding = getattr(gpu_memory, name)()
    return found


def _clock(name: str) -> Finding:
    from kvbench.timing.traps import gpu_clock

    found: Finding = getattr(gpu_clock, name)()
    return found


def _board(name: str) -> Finding:
    from kvbench.timing.traps import gpu_board

    found: Finding = getattr(gpu_board, name)()
    return found


GPU_TRAPS: tuple[Trap, ...] = (
    Trap("T7", "pageable memory in the name of pinned", "copies are staged and block, under the wrong label", BUG,
         lambda: _memory("pinned_is_pinned")),
    Trap("T8", "a pageable copy that is read before it arrived", MOVED, BUG, lambda: _memory("pageable_race")),
    Trap("T9", "a pinned source overwritten under its copy", MOVED, BUG, lambda: _memory("source_overwritten")),
    Trap("T10", "a working set that lives in the L2", "cache speed is shown as memory speed",
         "trust only rows of 16 x the L2 that the driver states, and report the board", lambda: _clock("beyond_l2")),
    Trap("T11", "a flush that flushes nothing", "cold rows are hot ones", BUG, lambda: _clock("flush_flushes")),
    Trap("T15", "a power cap below the default, persistence off", "clocks fall sooner than on the board as it is sold",
         BOARD, lambda: _board("power_and_persistence")),
    Trap("T17", "launch gaps between the events", "short kernels read up to 3 x too long", BUG,
         lambda: _clock("launch_gaps")),
    Trap("T18", "a full launch queue", "the time of launching is taken for the kernel's", BUG,
         lambda: _clock("queue_depth")),
    Trap("T20", "work on another stream escapes the clock", "work that was not timed looks fast", BUG,
         lambda: _clock("escaped_work")),
    Trap("T26", "pinned memory on another node or rounded up", "the link of another socket is measured", BUG,
         lambda: _memory("host_placement")),
    Trap("T27", "one block of GPU memory under two names", "one buffer is read out of the cache the other filled", BUG,
         lambda: _memory("separate_blocks")),
    Trap("T35", "write-combined pinned memory", "host steps over pinned memory crawl, unexplained", BUG,
         lambda: _memory("write_combined")),
    Trap("T36", "large buffers beyond the reach of the TLB", "a rate of 1 GiB is expected of 16",
         "quote the size with the rate", lambda: _clock("large_buffers")),
    Trap("T37", "one direction in the name of both", "the total is that of one stream for part of the time", BUG,
         lambda: _clock("both_directions")),
    Trap("T38", "directions or tiers swapped", "fetch and evict rows carry each other's numbers", BUG,
         lambda: _memory("right_labels")),
    Trap("T39", "the host's address where the device has another", "kernels read somewhere else, or fault", BUG,
         lambda: _memory("device_alias")),
    Trap("T40", "the batched copy call with another interface", MOVED, "use transport ce; update the driver",
         lambda: _clock("batch_interface")),
    Trap("T41", "a device error that nobody hears", "numbers come out of work that broke", BUG,
         lambda: _clock("swallowed_error")),
    Trap("T42", "a wrong theoretical peak", "every fraction of a ceiling is off", "hold rows against measured ceilings",
         lambda: _board("stated_peak")),
    Trap("T43", "ECC modes compared with each other", "up to 10 % of bandwidth is taken for progress", BUG,
         lambda: _board("ecc_modes")),
    Trap("T44", "a slice of a board in the name of the board", "rows are held against ceilings of the whole board",
         BOARD, lambda: _board("whole_boards")),
    Trap("T45", "a slot, switch or IOMMU in the way", "the board's link is taken for what the machine can do",
         "another slot or firmware setting (lspci -vv shows every port)", lambda: _board("way_to_the_cpu")),
    Trap("T46", "the link asleep, or slower under load", "an idle link's state is taken for its rate", BOARD,
         lambda: _board("link_under_load")),
    Trap("T47", "the cost of pinning inside the first copy", "the first of few samples bends the result", BUG,
         lambda: _memory("first_copy")),
    Trap("T48", "a pinned source whose pages are not there yet", "the first copy waits for the kernel", BUG,
         lambda: _memory("resident_source")),
    Trap("T54", "the host stops its clock at the submit", "rates beyond what the link can do", BUG,
         lambda: _clock("waited_for")),
    Trap("T56", "managed pages that have already moved", "local memory is measured in the name of the link", BUG,
         lambda: _memory("pages_that_move")),
    Trap("T62", "free memory as it was a while ago", "sizes are skipped, or asked for that do not fit",
         "end other programs on this GPU", lambda: _memory("free_memory")),
)  # fmt: skip
