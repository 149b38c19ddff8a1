"""The near side of an executed replay for real: a layer's products and its prompts' attention, by BLAS, on one core.

float32, random weights, no norms and no activation functions: what is left out takes less than a per cent of a layer.
There is no near KV: decodes whose attention would be near cannot be carried out here.
"""

from __future__ import annotations

import queue
import threading
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.errors import KvbenchError, UsageError, VerifyError
from kvbench.model.layers import LayerShape
from kvbench.systems.neo.costs import Line

if TYPE_CHECKING:
    from kvbench.replay.executor import Clock
    from kvbench.replay.policies.neo import Part

BACK_S = 60.0
ROUNDS = 5
CHECKS = 5  # rows of each product a verification recomputes
# A layer whose products on one core take about as long as attention to some thousand tokens on another
HOST_LAYER = LayerShape("host-pair", 128, 2, 8, 8, 128, 256, True, "rms", 512, "made up for one core beside another")
Floats = np.ndarray[Any, np.dtype[np.float32]]


class BlasNear:
    """``layers`` layers of ``of`` for up to ``most`` tokens a batch and prompts of up to ``prompt`` tokens, in a thread
    pinned to ``cpu``. BLAS is to be held to one thread by the caller (:func:`kvbench.kernels.blas.blas_threads`).
    Close it, or use it as a context manager.
    """

    def __init__(self, of: LayerShape, layers: int, most: int, prompt: int, cpu: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        sizes = ((of.hidden, of.qkv), (of.attended, of.hidden), (of.hidden, of.up), (of.ffn, of.hidden))

        def made(*shape: int) -> Floats:
            return rng.standard_normal(shape, np.float32)

        self.of, self.layers, self.most, self.longest = of, layers, most, prompt
        self._weights = [[made(*size) for size in sizes] for _ in range(layers)]
        self._inputs = [made(most, rows) for rows, _ in sizes]
        self._outputs = [np.zeros((most, columns), np.float32) for _, columns in sizes]
        self._head, self._logits = made(of.hidden, of.vocab), np.zeros((most, of.vocab), np.float32)
        self._q, self._k, self._v = (made(of.heads, prompt, of.head_dim) for _ in range(3))
        self._scores = np.zeros((prompt, prompt), np.float32)
        self._attended = np.zeros((prompt, of.head_dim), np.float32)
        self._work: queue.SimpleQueue[tuple[Part, int] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        ready: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()

        def serve() -> None:
            from kvbench.kernels.team import pin

            ready.put((threading.get_native_id(), pin(cpu)))
            while (work := self._work.get()) is not None:
                try:
                    self._do(*work)
                    self._done.put(None)
                except BaseException as error:  # handed on by wait()
                    self._done.put(error)

        self._thread = threading.Thread(target=serve, name="kvbench-near", daemon=True)
        self._thread.start()
        self.tid, self.pin_reason = ready.get()

    def check(self, part: Part) -> None:
        """Raise UsageError for a phase that cannot be carried out."""
        if part.near:
            raise UsageError(
                "near attention of decodes", where="executor", got=f"{part.near} requests", expected="none: no near KV",
                mend="offload=all",
            )  # fmt: skip
        if max((*part.linear, *part.heads), default=0) > self.most or max(part.prompts, default=0) > self.longest:
            raise UsageError(
                "a batch larger than its buffers", where="executor", got=f"{part.linear} tokens, {part.prompts}",
                expected=f"up to {self.most}, prompts up to {self.longest}",
            )  # fmt: skip

    def begin(self, part: Part, layer: int) -> None:
        """Let the thread do the near work of ``part`` in ``layer``; one at a time."""
        self._work.put((part, layer))

    @property
    def busy(self) -> bool:
        """Whether the work begun last is still being done."""
        return self._done.empty()

    def wait(self) -> None:
        """Return once the work begun last is done. Raises what it raised, KvbenchError after a minute."""
        try:
            error = self._done.get(timeout=BACK_S)
        except queue.Empty:
            raise KvbenchError("the near side does not come back", where="executor") from None
        if error is not None:
            raise error

    def _do(self, part: Part, layer: int) -> None:
        for tokens in part.linear:
            for weight, into, out in zip(self._weights[layer], self._inputs, self._outputs, strict=True):
                np.dot(into[:tokens], weight, out=out[:tokens])
        for prompt in part.prompts:
            scores = self._scores.reshape(-1)[: prompt * prompt].reshape(prompt, prompt)
            for q, k, v in zip(self._q, self._k, self._v, strict=True):
                np.dot(q[:prompt], k[:prompt].T, out=scores)
                np.dot(scores, v[:prompt], out=self._attended[:prompt])
        for rows in part.heads:
            np.dot(self._inputs[0][:rows], self._head, out=self._logits[:rows])

    def verify(self) -> None:
        """Spoil the results, do the largest batch and prompt again, and compare places with float64. VerifyError."""
        from kvbench.replay.policies.neo import Part

        made = [*self._outputs, self._logits]
        for array in (*made, self._scores, self._attended):
            array.fill(np.nan)
        self.begin(Part(linear=(self.most,), prompts=(self.longest,), heads=(self.most,)), 0)
        self.wait()
        pairs = [*zip(self._inputs, self._weights[0], made, strict=False), (self._inputs[0], self._head, made[-1])]
        scores = self._q[-1].astype(np.float64) @ self._k[-1].T.astype(np.float64)
        pairs.append((scores.astype(np.float32), self._v[-1], self._attended))
        for into, weight, out in pairs:
            places = np.linspace(0, len(into) - 1, CHECKS).astype(int)
            wanted = into[places].astype(np.float64) @ weight.astype(np.float64)
            scale = np.abs(into[places]).astype(np.float64) @ np.abs(weight).astype(np.float64)
            if not (np.abs(out[places] - wanted) <= 1e-5 * scale).all():
                raise VerifyError("the near side's products are wrong", where=f"{into.shape} by {weight.shape}")

    def seconds(self, part: Part, clock: Clock) -> float:
        """Return what the near work of ``part`` takes a layer, handing it over included, with nothing beside it."""
        found = []
        for again in range(ROUNDS + 1):
            begin = clock.now()
            for layer in range(self.layers):
                self.begin(part, layer)
                self.wait()
            if again:
                found.append((clock.now() - begin) * 1e-9 / self.layers)
        return median(found)  # not the least: what hands over late here does so in the pass as well

    def lines(self, clock: Clock) -> tuple[Line, Line]:
        """Measure linr, of up to ``most`` tokens, and pref, of prompts up to the longest."""
        from kvbench.replay.policies.neo import Part

        tokens, prompts = (
            sorted({most, *(n for i in range(most.bit_length()) for n in (1 << i, 3 << i) if n < most)})
            for most in (self.most, self.longest)
        )
        linear = [self.seconds(Part(linear=(n,)), clock) for n in tokens]
        # a prompt is never alone: what handing over takes is in linr already
        bare = self.seconds(Part(), clock)
        prompt = [max(1e-9, self.seconds(Part(prompts=(n,)), clock) - bare) for n in prompts]
        return Line("linr", tuple(tokens), tuple(linear)), Line("pref", tuple(prompts), tuple(prompt))

    def close(self) -> None:
        """End the thread. Closing twice is fine."""
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join(BACK_S)

    def __enter__(self) -> BlasNear:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
