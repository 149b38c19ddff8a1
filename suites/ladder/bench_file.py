"""The file tier: what a KV block costs to read from storage."""

from collections.abc import Mapping

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file a case writes (a word such as 4xllc is not known here: none)."""
    size = axes["bytes"]
    return size if isinstance(size, int) else 0


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", disk=scratch_bytes,
    seconds={"smoke": 0.8, "quick": 1.4, "full": 8.0}, limit=300.0,
    method=axis.choice("pread", "direct", "mmap", quick=["pread", "direct"]),
    block=axis.bytes(
        smoke=["1MiB"], quick=["16KiB", "64KiB", "256KiB", "1MiB"], full="4KiB..16MiB", low="512", high="1GiB"
    ),
    depth=axis.integer(smoke=["4"], quick=["4"], full="1..32", high=256),
    bytes=axis.bytes(smoke=["32MiB"], quick=["32MiB"], full=["1GiB"], low="1MiB", high="1TiB"),
)  # fmt: skip
def file_read(case: Case, measure: Measure) -> None:
    """Blocks of a scratch file in random order, each once a pass; `depth` threads keep as many reads in flight.

    pread goes through the page cache, dropped before each pass outside the timed window; direct is O_DIRECT; mmap sums
    the mapped pages in place. The rate counts the file once; link bytes are what the kernel says storage delivered.
    """
    from kvbench.memory.file import ScratchFile, scratch_dir
    from kvbench.memory.readers import FileReader

    file = measure.enter(ScratchFile(case.bytes, scratch_dir(measure.context.scratch), measure.context.seed))
    measure.note("file_system", file.system.kind)
    reader = measure.enter(FileReader(file, case.method, case.block, case.depth, seed=measure.context.seed))
    measure.threads(reader.tids)
    if case.depth >= len(measure.context.topology.affinity):
        measure.crowded()  # the thread that starts a pass and watches it wants a CPU too
    row = measure(
        reader.run, unique=reader.unique_bytes, rate_of="unique", verify=reader.verify, kernel=reader.kernel,
        transport={"pread": "cpu", "direct": "batch", "mmap": "direct"}[case.method], link=lambda: reader.link_bytes,
    )  # fmt: skip
    for flag in reader.flags:
        measure.flag(flag)
    if row.bytes.link is None:
        measure.flag("link_unmeasured")
        measure.note("link_reason", reader.link_reason)
