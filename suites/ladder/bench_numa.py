"""Memory of one NUMA node read from the cores of another."""

from kvbench import Case, Measure, axis, bench

NODES = [str(node) for node in range(8)]


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", seconds={"smoke": 0.1, "quick": 0.5, "full": 4.0},
    extra_metrics=["latency"],
    cpu_node=axis.integer(smoke=["0", "1"], quick=["0", "1"], full=NODES, low=0, high=255),
    memory_node=axis.integer(smoke=["0", "1"], quick=["0", "1"], full=NODES, low=0, high=255),
    bytes=axis.bytes(smoke=["256MiB"], quick=["256MiB"], full=["1GiB"], low="1MiB", high="64GiB"),
)  # fmt: skip
def numa(case: Case, measure: Measure) -> None:
    """Read bandwidth of all cores of `cpu_node` from memory bound to `memory_node`, and one chase's latency there."""
    from kvbench.kernels.chase import Chase
    from kvbench.kernels.stream import Stream

    topology = measure.context.topology
    with_cpus = {node.id: node.cpus for node in topology.nodes if node.cpus}
    if len(with_cpus) < 2:
        measure.skip(
            f"this machine shows {len(with_cpus) or 'no'} NUMA node with CPUs: there is no other node to read from"
        )
    for name in ("cpu_node", "memory_node"):
        if case.axes[name] not in with_cpus:
            measure.skip(f"{name}={case.axes[name]}: this machine has nodes {' '.join(map(str, sorted(with_cpus)))}")
    allowed = tuple(cpu for cpu in topology.affinity if cpu in with_cpus[case.cpu_node])
    if not allowed:
        measure.skip(f"no CPU of node {case.cpu_node} is in the affinity mask")
    team = measure.team_on(topology.measuring_cpus("all", allowed))
    buffer = measure.sources(1, case.bytes, "thp", node=case.memory_node)[0]
    measure.working_set(case.bytes)
    work = Stream("read", [buffer.address], case.bytes, team)
    row = measure(work.run, link=work.link_bytes, verify=work.verify, kernel=work.kernel)
    chased = measure.target(case.bytes, "thp", node=case.memory_node)
    chase = Chase(chased.address, case.bytes, measure.team_on(team.cpus[:1]), seed=measure.context.seed)
    hops = 100_000
    seconds = sorted(chase.run(hops) / hops for _ in range(6))
    chase.verify()
    measure.extra(
        "latency", (seconds[2] + seconds[3]) / 2, low=seconds[0], high=seconds[-1], n=len(seconds), unit="s",
        better="lower", status=row.status, reason=row.reason, kernel=chase.kernel,
    )  # fmt: skip
