"""The kernels of attention over far KV on the fake driver: their references in numpy, run where a launch is queued."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvbench.attention.shapes import from_bf16, to_bf16
from kvbench.memory.cuda.device import Launch, Stream
from tests.attention.decode_rig import Decoder, Told, decoder
from tests.fake_cuda import Fake


class FarKernels(Decoder):
    """The references of every kernel here. ``before`` is called first: copies queued before a launch are to be done, as
    its waits would have it. ``scale`` and ``kept`` spoil what they leave."""

    def __init__(self, fake: Fake) -> None:
        super().__init__(fake)
        self.scale, self.kept = 1.0, True

    def before(self) -> None:
        """Do nothing."""

    def run(self, launch: Told) -> None:
        self.before()
        if launch.kernel.entry == "prefill":
            self._prefill(launch)
        elif launch.kernel.entry == "project_score":
            self._project(launch)
        else:
            super().run(launch)

    def _numbers(self, address: int, *of: int) -> Any:
        return from_bf16(self._read(address, of, np.uint16))

    def _prefill(self, launch: Told) -> None:
        out, top, total, q, k, v, scale, queries, keys = launch.values
        of = dict(launch.kernel.constants)
        group, dim, rows = (int(of[n]) for n in ("GROUP", "DIM", "ROWS"))
        heads = launch.programs if of["KV_OUTER"] else launch.programs // (group * -(-queries // rows))
        reference: Any = launch.kernel.reference
        kv = [self._numbers(at, heads, keys, dim) for at in (k, v)]
        made = reference(self._numbers(q, heads, group, queries, dim), *kv, scale * self.scale, bool(of["CAUSAL"]))
        self._write(out, made)
        for at in (top, total):
            self._write(at, np.ones(heads * group * queries))

    def _project(self, launch: Told) -> None:
        k_far, scores, x, w, q, scale, tokens, width, queries, heads = launch.values
        of = dict(launch.kernel.constants)
        group, dim = int(of["GROUP"]), int(of["DIM"])
        reference: Any = launch.kernel.reference
        args = [self._numbers(x, tokens, width), self._numbers(w, heads, width, dim),
                self._numbers(q, heads, group, queries, dim)]  # fmt: skip
        keys, found = reference(*args, scale, lambda keys: from_bf16(to_bf16(keys)))
        if of["PROJECT"] and self.kept:
            self.fake.poke(k_far, to_bf16(keys).tobytes())
        if of["SCORE"]:
            if not of["PROJECT"]:
                kept = self._numbers(k_far, heads, tokens, dim)
                found = np.einsum("hgqd,htd->hgqt", args[2], kept) * scale
            self._write(scores, found)


def far_kernels(patch: pytest.MonkeyPatch, fake: Fake) -> FarKernels:
    """Let launches of these kernels, and of those of decode attention, run their references on ``fake``."""
    decoder(patch, fake)
    made, queue = FarKernels(fake), Stream.launch

    def launch(self: Stream, launch: Launch) -> None:
        if isinstance(launch, Told):
            made.run(launch)
            launch = Launch(launch.function, 1, 1, [])
        queue(self, launch)

    patch.setattr(Stream, "launch", launch)
    return made
