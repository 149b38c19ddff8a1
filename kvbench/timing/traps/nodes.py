"""T28, T30: is host memory on the node that was asked for, and does the nearer node read faster?"""

from __future__ import annotations

from collections.abc import Mapping

from kvbench.errors import Unavailable
from kvbench.memory import numa
from kvbench.timing.traps.bed import SEED, Bed
from kvbench.timing.traps.record import Finding, NotApplicable, Number, check, unknown
from kvbench.units import MiB, format_value

SLACK = 1.05  # local memory may read this much slower than remote memory by noise alone


def remote_memory(nbytes: int = 64 * MiB) -> Finding:
    """T28: the rate of reads from a core's own node against the fastest other one, for every node that has both."""
    bed = Bed()
    with_cpus = [node.id for node in bed.context.topology.nodes if node.cpus]
    if len(with_cpus) < 2:
        raise NotApplicable("one NUMA node with CPUs: there is no other node to read from")
    matrix: dict[tuple[int, int], float] = {}
    for cpu in with_cpus:
        for memory in with_cpus:
            row = bed.case("ladder", "numa", cpu_node=cpu, memory_node=memory, bytes=nbytes)
            matrix[cpu, memory] = row.value or 0.0
    return judge_matrix(matrix)


def judge_matrix(matrix: Mapping[tuple[int, int], float]) -> Finding:
    """Judge rates in B/s by (node of the cores, node of the memory); at least two nodes."""
    nodes = sorted({cpu for cpu, _ in matrix})
    rest = {node: max(matrix[node, other] for other in nodes if other != node) for node in nodes}
    worst = min(nodes, key=lambda node: matrix[node, node] / rest[node])
    table = "; ".join(
        f"node {cpu} from " + ", ".join(f"{memory}: {format_value(matrix[cpu, memory], 'B/s')}" for memory in nodes)
        for cpu in nodes
    )
    return check(
        matrix[worst, worst] * SLACK >= rest[worst],
        Number(f"node {worst} reads its own memory", matrix[worst, worst], "B/s"),
        Number("fastest other node's memory", rest[worst], "B/s"),
        f"own memory at least as fast, within {SLACK - 1:.0%}",
        "local memory is slower than remote memory: pages are not where the row says, or nodes are numbered otherwise",
        table,
    )  # fmt: skip


def bound_memory(nbytes: int = 8 * MiB) -> Finding:
    """T30: bytes of buffers made for each node that the kernel says are there."""
    from kvbench.memory.host import host_buffer

    listed = numa.dram_nodes().value or ()
    if len(listed) < 2:
        raise NotApplicable("one NUMA node with memory: nothing can be on another one")
    placed: dict[int, int | None] = {}
    for node in listed:
        try:
            with host_buffer(nbytes, "4k", node.number, kind="bits", seed=SEED) as buffer:
                found = numa.histogram(buffer.address, nbytes).value
        except Unavailable:
            continue  # a node that is full tells nothing about the others
        placed[node.number] = None if found is None else found.get(node.number, 0)
    return judge_placement(placed, nbytes)


def judge_placement(placed: Mapping[int, int | None], nbytes: int) -> Finding:
    """Judge the bytes found on the node asked for, by node; None where the kernel does not tell."""
    threshold = "all of every buffer on its own node"
    known = {node: count for node, count in placed.items() if count is not None}
    if not known:
        return unknown("the kernel does not tell where pages are (move_pages refused)", threshold)
    wrong = [node for node, count in known.items() if count < nbytes]
    return check(
        not wrong, Number("bytes on the node asked for", sum(known.values()), "bytes"),
        Number("bytes asked for", nbytes * len(known), "bytes"), threshold,
        f"buffers for node {', '.join(map(str, wrong))} lie elsewhere: remote memory is measured in the name of local",
        f"nodes looked at: {', '.join(map(str, sorted(known)))}",
    )  # fmt: skip
