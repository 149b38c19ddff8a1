"""The near side as real torch layers: on a GPU with one stream a lane and events between them, on a CPU in order.

On a GPU this is compiled only: no machine with one has run it yet. Kernels are queued ahead by the thread that also
does the CPU's attention, so what it takes to queue them is part of an iteration, as in NEO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.attention.shapes import Array
from kvbench.errors import UsageError, VerifyError
from kvbench.model.layers import Layer, LayerShape, attend_decode, attend_prefill, load_torch
from kvbench.systems.neo.schedule import Batch, Schedule, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.systems.neo.far import FarSide

TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
AGREE = 0.02  # norm of the difference of two passes' outputs over the norm: 16-bit sums in another order


def make_layers(of: LayerShape, count: int, dtype: str, device: str, seed: int) -> list[Layer]:
    """Return ``count`` layers with random weights; ``dtype`` bf16 | fp16 | fp32."""
    torch = load_torch("real layers")
    generator = torch.Generator(device=device).manual_seed(seed)
    return [Layer(of, getattr(torch, TORCH[dtype]), device, generator) for _ in range(count)]


def pinned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a page-locked numpy array that torch allocated: transfers to and from it run beside kernels."""
    torch = load_torch("pinned buffers")
    raw = torch.empty(int(np.prod(shape)) * dtype.itemsize, dtype=torch.uint8, pin_memory=True)
    array: Array = raw.numpy().view(dtype).reshape(shape)
    return array


class TorchNear:
    """The near side of ``batches``; a batch's tokens are its prompt, its near decodes, its CPU decodes, in that order.

    ``far`` holds the CPU requests' KV and the host's buffers, ``context`` the tokens of every decode. The same ``seed``
    and the same requests give the same numbers however they are cut into batches. :meth:`spans`: seconds by events; on
    a CPU empty. Raises UsageError when ``far`` belongs to other batches.
    """

    def __init__(
        self, layers: Sequence[Layer], batches: Sequence[Batch], context: int, far: FarSide | None, *, dtype: str,
        device: str, seed: int = 0,
    ) -> None:  # fmt: skip
        torch = load_torch("real layers")
        self._torch, self._layers, self._batches, self._far = torch, list(layers), list(batches), far
        of = self._of = self._layers[0].shape
        self._dtype, self._cuda = getattr(torch, TORCH[dtype]), device.startswith("cuda")
        with_ends = {} if far is None else far.ends
        if any((b in with_ends) != (batch.cpu > 0) for b, batch in enumerate(batches)):
            raise UsageError("the far side belongs to other batches", where="near", got=sorted(with_ends))
        generator = torch.Generator(device=device).manual_seed(seed)

        def drawn(*form: int) -> Tensor:
            made: Tensor = torch.randn(form, dtype=torch.float32, device=device, generator=generator)
            return made.to(self._dtype)

        prompt, decodes = sum(b.prefill for b in batches), [sum(b.gpu for b in batches), sum(b.cpu for b in batches)]
        parts = [drawn(n, of.hidden) for n in (prompt, *decodes)]
        self._kv = [drawn(2, decodes[0], of.kv_heads, context, of.head_dim) for _ in layers]
        self._first: list[Tensor] = []
        self._rows: list[slice] = []
        at = [0, 0, 0]
        for batch in batches:
            counts = (batch.prefill, batch.gpu, batch.cpu)
            self._first.append(torch.cat([p[a : a + n] for p, a, n in zip(parts, at, counts, strict=True)]))
            self._rows.append(slice(at[1], at[1] + batch.gpu))
            at = [a + n for a, n in zip(at, counts, strict=True)]
        self._host = {b: tuple(self._tensor(a) for a in (e.q, e.k, e.v, e.out)) for b, e in with_ends.items()}
        self._streams = {lane: torch.cuda.Stream(device) for lane in ("near", "down", "up")} if self._cuda else {}
        self._events: dict[str, tuple[Any, Any]] = {}
        self._start: Any = None
        self._x: list[Tensor] = []
        self._qkv: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._attended: dict[int, Tensor] = {}
        self._held: list[Any] = []

    def _tensor(self, array: Array) -> Tensor:
        torch = self._torch
        if array.dtype == np.uint16:
            made: Tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            return made
        plain: Tensor = torch.from_numpy(array)
        return plain

    def begin(self, schedule: Schedule) -> None:
        """Begin a pass over the batches' tokens as drawn. Raises UsageError for a schedule of other batches."""
        if list(schedule.batches) != self._batches or schedule.layers != len(self._layers):
            raise UsageError("a schedule of other batches", where="near", got=list(schedule.batches))
        self._held.clear()
        self._x = [first.clone() for first in self._first]
        self._attended = {b: x.new_empty(x.shape[0], self._of.attended) for b, x in enumerate(self._x)}
        self._events = {}
        if self._cuda:
            self._torch.cuda.synchronize()
            self._start = self._torch.cuda.Event(enable_timing=True)
            self._start.record(self._streams["near"])

    def submit(self, stage: Stage) -> None:
        """Queue ``stage`` on its lane's stream behind its waits (on a CPU: do it)."""
        with self._torch.no_grad():
            if not self._cuda:
                self._do(stage)
                return
            stream = self._streams[stage.lane]
            with self._torch.cuda.stream(stream):
                for name in stage.after:
                    if name in self._events:  # a ca is over before anything behind it is submitted
                        stream.wait_event(self._events[name][1])
                ends = [self._torch.cuda.Event(enable_timing=True) for _ in range(2)]
                ends[0].record(stream)
                self._do(stage)
                ends[1].record(stream)
            self._events[stage.name] = (ends[0], ends[1])

    def _do(self, stage: Stage) -> None:
        b, layer = stage.batch, self._layers[stage.layer]
        batch, x = self._batches[b], self._x[b]
        near = batch.prefill + batch.gpu
        if stage.kind == "pr":
            self._qkv[b] = layer.pre_attention(x)
            self._held.append(self._qkv[b])  # other streams still read it when the next layer has replaced it
        elif stage.kind == "ga":
            self._attend(b, stage.layer)
        elif stage.kind == "qkv":
            for host, device in zip(self._host[b][:3], self._qkv[b], strict=True):
                host.copy_(device[near:], non_blocking=True)
        elif stage.kind == "o":
            moved = self._host[b][3].reshape(batch.cpu, -1).to(x.device, non_blocking=True)
            self._held.append(moved)
            self._attended[b][near:].copy_(moved)
        else:
            layer.post_attention(x, self._attended[b])

    def _attend(self, b: int, number: int) -> None:
        q, k, v = self._qkv[b]
        p, g = self._batches[b].prefill, self._batches[b].gpu
        out = self._attended[b]
        if p:
            out[:p] = attend_prefill(q[:p], k[:p].transpose(0, 1), v[:p].transpose(0, 1))
        if g:
            keys, values = self._kv[number][0, self._rows[b]], self._kv[number][1, self._rows[b]]
            keys[:, :, -1].copy_(k[p : p + g])
            values[:, :, -1].copy_(v[p : p + g])
            out[p : p + g] = attend_decode(q[p : p + g], keys, values)

    def arrived(self, name: str) -> None:
        """Wait for the stage called ``name``."""
        if self._cuda:
            self._events[name][1].synchronize()

    def finished(self, stage: Stage) -> None:
        """Nothing: what needs a ``ca`` is submitted after it."""

    def finish(self) -> None:
        """Wait for everything."""
        if self._cuda:
            self._torch.cuda.synchronize()

    def abort(self) -> None:
        self.finish()

    def spans(self) -> dict[str, tuple[float, float]]:
        """Return begin and end of every stage of the latest pass, seconds since it began, by the device's clock."""
        return {
            name: (self._start.elapsed_time(a) * 1e-3, self._start.elapsed_time(b) * 1e-3)
            for name, (a, b) in self._events.items()
        }

    def outputs(self) -> list[Tensor]:
        """Return what the latest pass left: prompt, near decodes, CPU decodes, each float32 (tokens, hidden), host."""
        kinds: list[list[Tensor]] = [[], [], []]
        for batch, x in zip(self._batches, self._x, strict=True):
            near = batch.prefill + batch.gpu
            for kind, part in zip(kinds, (x[: batch.prefill], x[batch.prefill : near], x[near:]), strict=True):
                kind.append(part)
        return [self._torch.cat(parts).float().cpu() for parts in kinds]


def agree(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Raise VerifyError unless two passes over the same requests left the same hidden states."""
    for name, a, b in zip(("prompt", "near decodes", "CPU decodes"), got, want, strict=True):
        if not b.numel():
            continue
        error = float((a - b).norm() / b.norm())
        if not error <= AGREE:
            raise VerifyError(
                "the pass left other numbers than one without overlap", where=name, got=f"error {error:.3g}",
                expected=f"at most {AGREE:g}",
            )  # fmt: skip
