"""The activation ledger: which tensors a forward pass holds, step by step, and what an engine reserves for them.

Analytic (:func:`steps`, :func:`peak`) for any shape, and measured (:func:`measured_peak`) on the stack of
:mod:`kvbench.model.layers`, whose order of births and deaths the steps repeat. eLLM (DAC 2026, sections 1 and 2) takes
its motive from this: an engine that prefills whole prompts reserves the peak of its longest one.

Counted are the tensors of the forward pass. Not counted, on either side: token ids, KV cache, weights, and scratch
inside one fused kernel (attention tiles that do not grow with the tokens). Norm statistics, a value or two a token,
have no step: the projection behind a norm always holds more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvbench.errors import UsageError
from kvbench.model.layers import LayerShape, load_torch

FLOAT = 4  # bytes of a log-sum-exp and of a final logit, whatever the model's dtype
WHOLE = 0  # a chunk of no tokens: the prompt is prefilled as a whole


@dataclass(frozen=True, slots=True)
class Step:
    """The tensors alive while one step of the forward pass runs, its outputs included: name -> bytes."""

    name: str
    live: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.live.values())


def steps(shape: LayerShape, tokens: int, *, element_bytes: int, past: bool = False, rows: int = 1) -> tuple[Step, ...]:
    """Return what is alive in each step of a forward pass over ``tokens`` tokens (in decode: one a sequence).

    ``past``: earlier tokens are in the cache and this is a prefill (a later chunk), so that attention comes in two
    parts. ``rows``: tokens whose logits are wanted. All layers are alike, so one stands for all.

    Liveness, in elements a token (h hidden, H query and K kv heads of d, f inner width, u = f or, gated, 2f): the
    residual h lives throughout; beside it, step by step, the normalised input h and qkv (H + 2K)d; qkv and the attended
    Hd; the attended and its projection h; the normalised h and u; u and the activation f; f and its projection h. With
    a plain MLP of f = 4h the peak is h + 4h + 4h = 9h; gated it is h + 3f. Raises UsageError for counts below 1.
    """
    for name, value in (("tokens", tokens), ("element_bytes", element_bytes), ("rows", rows)):
        if value < 1:
            raise UsageError(f"{name} below 1", where="activation ledger", got=value, expected="1 or more")
    if rows > tokens:
        raise UsageError(
            "more rows of logits than tokens", where="activation ledger", got=rows, expected=f"1..{tokens}"
        )

    def wide(width: int) -> int:
        return tokens * width * element_bytes

    x, attended, qkv = wide(shape.hidden), wide(shape.attended), wide(shape.qkv)
    up, inner = wide(shape.up), wide(shape.ffn)
    lse = tokens * shape.heads * FLOAT
    attention = {"residual": x, "qkv": qkv, "attended": attended, "lse": lse}
    if past:
        attention |= {"attended_past": attended, "lse_past": lse}
    head = rows * shape.vocab
    logits = {"residual": x, "logits": head * element_bytes}
    if element_bytes != FLOAT:
        logits["logits_float"] = head * FLOAT
    found = [
        Step("qkv", {"residual": x, "normed": x, "qkv": qkv}),
        Step("attention", attention | ({"share": lse} if past else {})),
        Step("projection", {"residual": x, "attended": attended, "projected": x}),
        Step("up", {"residual": x, "normed": x, "up": up}),
        Step("activation", {"residual": x, "up": up, "inner": inner}),
        Step("down", {"residual": x, "inner": inner, "projected": x}),
        Step(
            "head", {"residual": x, "normed": rows * shape.hidden * element_bytes, "logits": head * element_bytes}
        ),
        Step("logits", logits),
    ]  # fmt: skip
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive at once, the step where, and the tensors that make them."""

    nbytes: int
    step: str
    live: Mapping[str, int]


def peak(shape: LayerShape, tokens: int, *, element_bytes: int = 2, past: bool = False, rows: int = 1) -> Peak:
    """Return the peak of :func:`steps`; errors as there."""
    most = max(steps(shape, tokens, element_bytes=element_bytes, past=past, rows=rows), key=lambda step: step.nbytes)
    return Peak(most.nbytes, most.name, most.live)


def prefill_peak(shape: LayerShape, prompt: int, chunk: int = WHOLE, *, element_bytes: int = 2) -> Peak:
    """Return the peak of prefilling ``prompt`` tokens, whole or ``chunk`` tokens at a time; errors as :func:`steps`."""
    if chunk < 0:
        raise UsageError("a chunk below 0", where="activation ledger", got=chunk, expected="0 (whole) or more")
    first = min(prompt, chunk or prompt)
    peaks = [peak(shape, first, element_bytes=element_bytes)]
    if prompt > first:
        # every later full chunk is alike: no tensor of the pass grows with the tokens before it
        peaks.append(peak(shape, min(first, prompt - first), element_bytes=element_bytes, past=True))
    return max(peaks, key=lambda found: found.nbytes)


def decode_peak(shape: LayerShape, batch: int, *, element_bytes: int = 2) -> Peak:
    """Return the peak of one decode step of ``batch`` sequences, logits for each; errors as :func:`steps`."""
    return peak(shape, batch, element_bytes=element_bytes, rows=batch)


@dataclass(frozen=True, slots=True)
class Engine:
    """What decides an engine's activation reserve: the longest prompt in tokens, how it is prefilled (``chunk`` tokens
    at a time, WHOLE: at once), for how many sequences logits may be due in one step, and the bytes of an element."""

    context: int
    chunk: int = WHOLE
    sequences: int = 256
    element_bytes: int = 2

    def reserved(self, shape: LayerShape) -> Peak:
        """Return what is set aside: the larger peak of the longest prompt and of a decode step of all sequences."""
        both = (self.prefill(shape, self.context), self.decode(shape, self.sequences))
        return max(both, key=lambda found: found.nbytes)

    def prefill(self, shape: LayerShape, prompt: int) -> Peak:
        """Return what a prompt of ``prompt`` tokens uses. Raises UsageError beyond the context; as :func:`steps`."""
        if prompt > self.context:
            raise UsageError(
                "the prompt exceeds the context", where="activation ledger", got=prompt, expected=f"1..{self.context}"
            )
        return prefill_peak(shape, prompt, self.chunk, element_bytes=self.element_bytes)

    def decode(self, shape: LayerShape, batch: int) -> Peak:
        """Return what a decode step of ``batch`` sequences uses. Raises UsageError beyond ``sequences``."""
        if batch > self.sequences:
            raise UsageError(
                "more sequences than reserved for", where="activation ledger", got=batch,
                expected=f"1..{self.sequences}",
            )  # fmt: skip
        return decode_peak(shape, batch, element_bytes=self.element_bytes)


# -- measured ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """Most bytes of tensors made inside the run and alive at once, how many were made, and how it is known."""

    nbytes: int
    tensors: int | None
    source: str


def measured_peak(run: Callable[[], Any], device: str = "cpu") -> MeasuredPeak:
    """Run ``run`` once and return the peak of the tensors it makes; its result counts while it lives.

    On the CPU every storage an operation returns is counted from its birth to the collection of its last tensor (views
    share one); on a GPU torch's allocator tells (rounded up to 512 bytes a tensor, scratch of kernels included).
    Raises MissingExtra without torch; what ``run`` raises.
    """
    torch = load_torch("the activation ledger")
    if device != "cpu":
        torch.cuda.synchronize(device)
        before = int(torch.cuda.memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        kept = run()
        torch.cuda.synchronize(device)
        nbytes = int(torch.cuda.max_memory_allocated(device)) - before
        del kept
        return MeasuredPeak(nbytes, None, "torch.cuda.max_memory_allocated")
    with _tracker() as tracker:
        kept = run()
        del kept
    return MeasuredPeak(tracker.peak, tracker.made, "storages born and collected under a dispatch mode")


def _tracker() -> Any:
    """Return a dispatch mode that counts the storages alive; a class of its own per call, as torch comes late."""
    tensor_type: Any = load_torch("the activation ledger").Tensor
    mode: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode
    tree_leaves: Any = import_module("torch.utils._pytree").tree_leaves

    class Tracker(mode):  # type: ignore[misc]  # Any on purpose: typed or not, torch may be missing where this is checked
        def __init__(self) -> None:
            super().__init__()
            self.now = self.peak = self.made = 0
            self._known: dict[int, weakref.ref[Any]] = {}

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # nothing is compiled here, and torch would load its compiler, seconds, to keep out of it

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # A storage an operation was given is an older one, of a weight or of KV as well: only new ones count.
            given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, tensor_type)}
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if isinstance(tensor, tensor_type):
                    self._born(tensor.untyped_storage(), given)
            return out

        def _born(self, storage: Any, given: set[int]) -> None:
            key, nbytes = int(storage._cdata), int(storage.nbytes())
            if key in given or key in self._known:
                return

            def died(_: Any) -> None:
                del self._known[key]
                self.now -= nbytes

            self._known[key] = weakref.ref(storage, died)
            self.made += 1
            self.now += nbytes
            self.peak = max(self.peak, self.now)

    return Tracker()
