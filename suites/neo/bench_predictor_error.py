"""What a cost table of equal-length batches says about skewed ones (N9)."""

from __future__ import annotations

from typing import Any

from kvbench import Case, Measure, axis, bench

PAGE = 16
LEAST_BYTES = 128 << 20
ROUNDS = 3  # of each corner of the table


@bench(
    version=1, metric="attention_time", unit="s", better="lower", limit=180.0,
    extra_metrics=["predicted_time", "predictor_error", "skew_error"],
    seconds={"smoke": 0.9, "quick": 2.5, "full": 20.0},
    split=axis.choice("pages", "sequences"),
    skew=axis.choice("equal", "tail", "one_long", smoke=["one_long"], quick=["equal", "one_long"]),
    requests=axis.integer(smoke=["16"], quick=["16"], full=["4", "16", "64"], high=4096),
    tokens=axis.integer(smoke=["16384"], quick=["16384"], full=["16384", "65536"], low=64, high=1 << 22),
    model=axis.choice("llama-3-8b", "qwen2.5-14b", "opt-13b", smoke=["llama-3-8b"], quick=["llama-3-8b"]),
    threads=axis.threads(smoke=["all"], quick=["all"], full=["all"]),
)  # fmt: skip
def predictor_error(case: Case, measure: Measure) -> None:
    """Seconds a layer of decode attention over lengths that differ, against what NEO's table says of them.

    `split`: work cut by pages over the whole batch, or whole sequences to each thread. Reference, in turns: the same
    tokens in sequences of one length. predicted_time: bilinear in the four cells around the batch, each of equal
    lengths, measured before; predictor_error: measured over predicted - 1, above 0 where the table promises too much;
    skew_error: the same against the reference, so without the error of interpolating. Skew: equal, tail (log-normal),
    one_long (one sequence has four fifths of the tokens).
    """
    from functools import partial

    from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
    from kvbench.attention.shapes import Shape
    from kvbench.measure import Reference
    from kvbench.model.layers import shape
    from kvbench.systems.neo.costs import Plane
    from kvbench.systems.neo.lengths import lengths

    of, seed = shape(case.model), measure.context.seed
    kv = Shape("bf16", of.heads, of.kv_heads, of.head_dim, PAGE)
    if case.tokens < 2 * case.requests or case.requests < 2:
        measure.skip(f"{case.tokens} tokens in {case.requests} requests leave no room for a skew")
    team = measure.team(case.threads)
    least = max(LEAST_BYTES, 4 * measure.context.llc)

    r, n = case.requests, case.tokens
    corners = [(requests, tokens) for requests in (r // 2, 2 * r) for tokens in (n // 2, 2 * n)]
    shapes = [lengths("equal", *corner, seed) for corner in corners]
    shapes += [lengths("equal", r, n, seed), lengths(case.skew, r, n, seed)]
    layers = [layers_for(kv, sequences, least) for sequences in shapes]
    # all of them read the same memory: what it holds does not matter, and each has its own table
    buffer = measure.target(max(map(partial(nbytes_for, kv), shapes, layers)), "thp")
    works = [
        DecodeWork(kv, sequences, count, team, buffer.address, seed=seed, split=case.split)
        for sequences, count in zip(shapes, layers, strict=True)
    ]
    cells = [min(work.run(1) for _ in range(ROUNDS)) / count for work, count in zip(works[:4], layers[:4], strict=True)]
    equal, skewed = works[4:]
    table = Plane("cdec", (r // 2, 2 * r), (n // 2, 2 * n), ((cells[0], cells[1]), (cells[2], cells[3])))
    told = table.at(r, n).seconds
    measure.working_set(min(work.nbytes for work in works))
    measure.note("longest", max(shapes[5]))
    measure.note("layers", layers[5])
    row = measure.pair(
        skewed.run, Reference("equal lengths, same tokens", equal.run, float(layers[4]), equal.verify),
        ops=float(layers[5]), link=skewed.kv_bytes, unique=skewed.kv_bytes, verify=skewed.verify, kernel=skewed.kernel,
    )  # fmt: skip
    even = row.ceilings[0].value if row.ceilings else None
    if row.value is None or even is None or told is None:
        return
    measure.note("kv_bandwidth", skewed.kv_bytes / layers[5] / row.value)
    status: dict[str, Any] = {"status": row.status, "reason": row.reason, "n": row.n}
    measure.extra(
        "predicted_time", told, unit="s", better="lower", basis="modelled",
        kernel="bilinear in four cells of equal lengths",
        **status,
    )  # fmt: skip
    measure.extra("predictor_error", row.value / told - 1.0, unit="1", better="lower", **status)
    measure.extra("skew_error", row.value / even - 1.0, unit="1", better="lower", **status)
