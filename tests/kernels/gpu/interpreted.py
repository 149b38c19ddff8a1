"""Run the Triton kernels on CPU tensors under TRITON_INTERPRET=1: a process of its own, as a stray store ends it.

Prints one JSON document: {case: null or what was wrong}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch

from kvbench.kernels.gpu import catalogue, fragments, reference

GUARD = 64  # int32 words in front of and behind every array
SLOTS = 9


class Guarded:
    """int32 [slots, stride] with canaries at both ends; ``dtype`` says what the words came from."""

    def __init__(self, stride: int, seed: int, dtype: torch.dtype = torch.int32) -> None:
        torch.manual_seed(seed)
        values = torch.randn(2 * (SLOTS * stride + 2 * GUARD)).to(torch.bfloat16)
        self.memory = values.view(torch.int32) if dtype == torch.bfloat16 else torch.randint(
            -(2**31), 2**31 - 1, (SLOTS * stride + 2 * GUARD,), dtype=torch.int32)  # fmt: skip
        self.before = self.memory.clone()
        self.stride = stride

    @property
    def tensor(self) -> torch.Tensor:
        return self.memory[GUARD : GUARD + SLOTS * self.stride]

    def array(self) -> Any:
        return self.tensor.numpy().reshape(SLOTS, self.stride)

    def canaries_live(self) -> bool:
        edge = GUARD + SLOTS * self.stride
        return bool(
            (self.memory[:GUARD] == self.before[:GUARD]).all() and (self.memory[edge:] == self.before[edge:]).all()
        )


def copied(
    size: int, both: bool, index: torch.dtype, programs: int, dtype: torch.dtype, stray: bool = False
) -> str | None:
    """Copy with gaps, skips and unequal strides; return what differs from the reference, None when nothing does."""
    rows, words = catalogue.fragment_tile(size, both)
    width = size // 4
    k_src, v_src = (Guarded(width + 8, s, dtype) for s in (1, 2))
    k_dst, v_dst = (Guarded(width + 4, s, dtype) for s in (3, 4))
    to = torch.tensor([3, 0, -1, 8, 2, 5, 1], dtype=index)
    frm = torch.tensor([8, 8, 4, 0, -1, 3, 7], dtype=index)
    if stray:
        to[3] = SLOTS  # one slot too far: the canaries must die of it
    want_k = want_v = None
    if not stray:
        want_k = reference.copy_fragments(k_dst.array(), k_src.array(), to.numpy(), frm.numpy(), width)
        want_v = reference.copy_fragments(v_dst.array(), v_src.array(), to.numpy(), frm.numpy(), width)
    if not both:
        want_v = v_dst.array().copy()
    fragments.copy_fragments[(programs,)](
        k_dst.tensor, v_dst.tensor, k_src.tensor, v_src.tensor, to, frm, len(to), size // 16,
        k_dst.stride // 4, k_src.stride // 4, ROWS=rows, WORDS=words, BOTH=int(both),
    )  # fmt: skip
    for name, array in (("k_dst", k_dst), ("v_dst", v_dst), ("k_src", k_src), ("v_src", v_src)):
        if not array.canaries_live():
            return f"a canary of {name} died"
    if want_k is not None and not np.array_equal(k_dst.array(), want_k):
        return "K differs"
    if want_v is not None and not np.array_equal(v_dst.array(), want_v):
        return "V differs"
    return None


def summed(src: torch.Tensor, kernel: str, programs: int) -> str | None:
    """Sum ``src``; return how it differs from the reference, None when it does not."""
    constants: dict[str, Any] = dict(catalogue.kernel(kernel).constants)
    constants["ACC"] = getattr(fragments.tl, constants["ACC"])
    out = torch.zeros(programs, dtype=torch.int32 if constants["ACC"] == fragments.tl.int32 else torch.float32)
    fragments.read_sum[(programs,)](out, src, src.nbytes // 16, **constants)
    if src.dtype == torch.int32:
        got, want = int(out.to(torch.int64).sum()) & 0xFFFFFFFF, reference.read_sum(src.numpy())
        return None if got == want else f"sum is {got}, not {want}"
    got, want = float(out.to(torch.float64).sum()), reference.read_sum(src.to(torch.float64).numpy())
    return None if abs(got - want) <= 1e-5 * abs(want) else f"sum is {got}, not {want}"


def main() -> int:
    """Run every case and print the document."""
    i32, i64, bf16 = torch.int32, torch.int64, torch.bfloat16
    said = {
        f"copy {size} B, {'kv' if both else 'k'}, {index}, {programs} programs, {dtype}": copied(
            size, both, index, programs, dtype
        )
        for size, both, index, programs, dtype in (
            (16, True, i64, 2, i32),
            (80, True, i32, 1, i32),
            (4096, True, i64, 3, bf16),
            (4096, False, i32, 64, i32),
            (65536 + 16, True, i64, 2, i32),
            (65536 + 16, False, i64, 1, i32),
        )
    }
    said["stray"] = copied(16, True, i64, 2, i32, stray=True)
    ints = torch.randint(-(2**31), 2**31 - 1, (3 * 16384 + 4,), dtype=torch.int32)
    for programs in (1, 5):
        said[f"sum int32, {programs} programs"] = summed(ints, "read_sum_i32", programs)
        halves = torch.rand(32768 + 40).to(torch.bfloat16)
        said[f"sum bf16, {programs} programs"] = summed(halves, "read_sum_bf16", programs)
    json.dump(said, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
