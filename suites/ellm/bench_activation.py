"""What activations take: the reservation a maximum context costs, and how little of it a phase uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

if TYPE_CHECKING:
    from kvbench.model.layers import LayerShape

CHUNKS = {"whole": 0, "chunk512": 512, "chunk2048": 2048}
FLOPS = 4e10  # of a measured forward pass on the host: about a second on two cores
SEQUENCES = 256  # whose logits an engine has to have room for: vLLM's default
PAST = 255  # tokens before a measured decode step; no activation depends on them
# Of the modelled bytes. On the host every tensor is known; a GPU's allocator rounds up and its kernels need scratch.
TOLERANCE = {"host": 0.0, "cuda": 0.02}


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether the values describe a case of their own: only decode has a batch."""
    return axes["phase"] == "decode" or axes["batch"] == 1


@bench(
    version=1, metric="activation", unit="B", better="lower", basis="modelled", where=exists, limit=120.0,
    extra_metrics=["measured", "share", "utilisation", "utilisation_2k"],
    seconds={"smoke": 0.1, "quick": 0.1, "full": 0.4},
    model=axis.choice(
        "mpt-30b", "llama-3-8b", "opt-13b", "qwen2.5-14b", smoke=["mpt-30b"], quick=["mpt-30b", "llama-3-8b"]
    ),
    context=axis.integer(
        smoke=["2048", "204800"], quick=["2048", "32768", "204800"],
        full=["2048", "8192", "32768", "65536", "131072", "204800", "262144"], low=256, high=1 << 24,
    ),
    prefill=axis.choice("whole", "chunk512", "chunk2048", smoke=["whole", "chunk512"]),
    phase=axis.choice("prefill", "decode"),
    batch=axis.integer(smoke=["1", "256"], quick=["1", "256"], full=["1..256"], high=4096),
    form=axis.choice("model", "host", "cuda"),
    memory=axis.bytes(smoke=["80GiB"], quick=["80GiB"], full=["80GiB"], low="1GiB", high="1TiB"),
)  # fmt: skip
def activation(case: Case, measure: Measure) -> None:
    """Peak bytes of activations: of the longest prompt (prefill), or of one decode step of `batch` sequences.

    The primary row is the ledger's formula, which names each tensor alive: form model for the full shape in 16 bits,
    form host for the shape divided by 32 in float32, form cuda for one full layer in bfloat16. The latter two are also
    run: `measured` are the peak bytes of the tensors really made, and it is suspect where they differ from the formula.
    share: of `memory` (80 GiB: what a board sold as 80 GB has). utilisation: of what an engine that prefills in this
    way reserves for `context` and 256 sequences; utilisation_2k: what a prompt of 2,048 tokens uses of it.
    """
    from kvbench.model.layers import shape
    from kvbench.systems.ellm import ledger

    chunk = CHUNKS[case.prefill]
    of = shape(case.model, "tiny" if case.form == "host" else "full")
    element = 4 if case.form == "host" else 2
    engine = ledger.Engine(case.context, chunk, max(SEQUENCES, case.batch), element)
    reserved = engine.reserved(of)
    used = engine.prefill(of, case.context) if case.phase == "prefill" else engine.decode(of, case.batch)
    run = None if case.form == "model" else forward(case, measure, of, chunk)
    basis = "ledger: tensors alive, step by step"
    measure.model(
        float(used.nbytes), source=basis,
        detail={
            "step": used.step, "alive": " ".join(used.live), "reserved": reserved.nbytes, "element_bytes": element,
            "sequences": engine.sequences, "hidden": of.hidden, "preset": of.preset, "shape": of.source,
            "per_token": used.nbytes / (min(case.context, chunk or case.context) if case.batch == 1 else case.batch),
        },
    )  # fmt: skip
    if run is not None:
        add_measured(case, measure, run, used.nbytes)

    def add(metric: str, value: float) -> None:
        measure.extra(metric, value, unit="1", better="lower", basis="modelled", kernel=basis)

    if case.form == "model":
        add("share", used.nbytes / case.memory)
    if case.phase == "decode":
        add("utilisation", used.nbytes / reserved.nbytes)
    elif case.context > 2048:
        add("utilisation_2k", engine.prefill(of, 2048).nbytes / reserved.nbytes)


def forward(case: Case, measure: Measure, of: LayerShape, chunk: int) -> Callable[[], Any]:
    """Return the forward pass to measure; skips the case where it cannot be run."""
    from kvbench.errors import MissingExtra
    from kvbench.model.layers import Stack, load_torch

    tokens = min(case.context, chunk or case.context) if case.phase == "prefill" else case.batch
    past = case.context - tokens if case.phase == "prefill" else PAST
    flops = of.layer_flops(tokens, past if case.phase == "prefill" else 0) + 2.0 * of.hidden * of.vocab
    device = "cpu"
    if case.form == "cuda":
        from kvbench.timing.gpu_session import open_driver

        open_driver()
        device = "cuda:0"
    elif flops > FLOPS:
        measure.skip(
            f"one layer over {tokens} tokens behind {past} is {flops:.1e} operations, {FLOPS:.0e} are run here; "
            "form=model has the formula"
        )
    try:
        torch = load_torch("running a layer stack")
    except MissingExtra as error:
        measure.skip(str(error))
    if device != "cpu":
        if not torch.cuda.is_available():
            measure.skip("this build of torch has no CUDA; install the extra gpu-cu12 or gpu-cu13")
        need = 2 * of.layer_weights + 4 * of.vocab * of.hidden + of.kv_bytes(past + tokens, 2) + 4 * tokens * of.up
        free, _ = torch.cuda.mem_get_info(0)
        if need > 0.9 * free:
            measure.skip(f"about {need / 1e9:.0f} GB of GPU memory for one layer, {free / 1e9:.0f} GB are free")
    seed = measure.context.seed
    stack = Stack(of, layers=1, dtype="float32" if device == "cpu" else "bfloat16", device=device, seed=seed)
    ids = stack.ids(tokens, seed)
    measure.note("past", past)
    if case.phase == "decode":
        kv = stack.make_kv(past + 1, tokens, seed=seed)
        return lambda: stack.decode(ids, kv, past)
    kv = stack.make_kv(past + tokens, seed=seed)
    if not past:
        return lambda: stack.prefill(ids, kv)

    def first_and_last() -> None:
        stack.prefill(ids, kv)  # all chunks between are like the last one
        stack.prefill(ids, kv, past)

    return first_and_last


def add_measured(case: Case, measure: Measure, run: Callable[[], Any], modelled: int) -> None:
    """Run it and add the row of what it really took."""
    from kvbench.systems.ellm import ledger

    found = ledger.measured_peak(run, "cpu" if case.form == "host" else "cuda:0")
    error = found.nbytes / modelled - 1.0
    off = abs(error) > TOLERANCE[case.form]
    measure.extra(
        "measured", float(found.nbytes), unit="B", better="lower", n=1, kernel=found.source,
        status="suspect" if off else "ok",
        reason=f"{found.nbytes} bytes, {modelled} by the formula ({error:+.2%})" if off else "",
        detail={"modelled": modelled, "error": error, "tensors": found.tensors},
    )  # fmt: skip
