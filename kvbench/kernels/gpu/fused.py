"""Portable kernel in Triton: K = X W consumed on chip by Q K^T and stored once, or either half of it alone.

DirectKV, OSDI 2026, section 4.3. Under ``TRITON_INTERPRET=1`` it runs on CPU tensors, bf16 upcast first.
"""
# Triton evaluates the annotations of a kernel, so its arguments have none.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import os

from kvbench.kernels.gpu.settings import triton_settings

for _name, _value in triton_settings().items():
    os.environ.setdefault(_name, _value)  # only now: Triton reads them when it is imported and when it compiles

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def project_score(
    k_far,
    scores,
    x,
    w,
    q,
    scale,
    tokens,
    width,
    queries,
    heads,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DEEP: tl.constexpr,
    PROJECT: tl.constexpr,
    SCORE: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Project TOKENS tokens to the keys of one head, store them to ``k_far``, and score them with all its queries.

    ``x`` [tokens, width], ``w`` [heads, width, DIM], ``q`` [heads x GROUP, queries, DIM], ``k_far`` [heads, tokens,
    DIM]; ``scores`` float32 [heads x GROUP, queries, tokens], times ``scale``. PROJECT = 0 reads the keys from
    ``k_far``; SCORE = 0 leaves them there. What is scored is rounded as it is stored. Programs, exactly: heads x
    ceil(tokens / TOKENS).
    """
    factor = (tl.full((), 1.0, tl.float64) * scale).to(tl.float32)  # under the interpreter it is a Python float
    tiles = tl.cdiv(tokens, TOKENS)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    cols = tl.arange(0, DIM)
    held = (rows < tokens)[:, None]
    at = k_far + head * tokens * DIM + rows[:, None] * DIM + cols[None, :]
    if PROJECT:
        made = tl.zeros([TOKENS, DIM], tl.float32)
        for start in tl.range(0, width, DEEP, num_stages=STAGES):
            deep = start + tl.arange(0, DEEP)
            left = tl.load(x + rows[:, None] * width + deep[None, :], held & (deep < width)[None, :], 0.0)
            right = tl.load(w + (head * width + deep)[:, None] * DIM + cols[None, :], (deep < width)[:, None], 0.0)
            if UPCAST:
                left, right = left.to(tl.float32), right.to(tl.float32)
            made += tl.dot(left, right, input_precision="ieee")
        keys = made.to(k_far.dtype.element_ty)
        tl.store(at, keys, held)
    else:
        keys = tl.load(at, held, 0.0)
    if SCORE:
        if UPCAST:
            keys = keys.to(tl.float32)
        turned = tl.trans(keys)
        blocks = tl.cdiv(queries, ROWS)
        for pair in range(GROUP * blocks):
            own = head * GROUP + pair // blocks
            lines = pair % blocks * ROWS + tl.arange(0, ROWS)
            query = tl.load(
                q + own * queries * DIM + lines[:, None] * DIM + cols[None, :], (lines < queries)[:, None], 0.0
            )
            if UPCAST:
                query = query.to(tl.float32)
            found = tl.dot(query, turned, input_precision="ieee") * factor
            to = scores + own * queries * tokens + lines.to(tl.int64)[:, None] * tokens + rows[None, :]
            tl.store(to, found, (lines < queries)[:, None] & (rows < tokens)[None, :])
