"""One thread brings in the KV of layer after layer while another computes on the layers that are there.

Both sides of a pass run in one kernel on a team of two: member 0 computes, member 1 loads. They meet only in flags, one
cache line a layer: the loader writes the number of the pass into a layer's line when its last byte is stored, the
computing thread waits for that number in that line. Each side writes the time of its begin and end at every layer.

What the computing thread does with a layer stands for attention over it and for the rest of the layer: it reads every
byte (memory-bound) and between the chunks does fused multiply-adds (bound by the FMA units), evenly spread, so that a
layer is one kind of work from its first byte to its last.
"""

from __future__ import annotations

from kvbench.kernels.gather_passes import copy_fragments
from kvbench.kernels.intrinsics import (
    atomic_load,
    atomic_store,
    barrier,
    drain,
    line_add,
    line_fma32,
    line_load,
    line_splat,
    line_splat32,
    line_store,
    line_sum,
    sum_store,
    word_load,
    word_store,
)
from kvbench.kernels.jit import kernel, numba, part
from kvbench.kernels.sync import enter, leave, stamp, wait_for

CHUNK = 4096  # bytes read between two turns of arithmetic
CHAINS = 6  # of sixteen floats; chain k starts at k and each step adds one
LANES = 16
STEP_FLOPS = CHAINS * LANES * 2
MOST_STEPS = (1 << 24) - CHAINS  # floats count exactly up to 2^24, so the number of steps can be read from the result
LINE = 64
RESULT_LINES = 1 + CHAINS  # of a layer: its sum and what its flag said, then the chains

# Fields of the plan, int64 each.
(
    LOADS, LOAD_FIRST, LOAD_SPAN, COMPUTES, COMPUTE_FIRST, COMPUTE_SPAN, LAYERS, FRAGMENTS, FRAGMENT, LAYER_BYTES,
    NEAR, FAR, INDEX, KIND, LOCALITY, DISTANCE, MEMCPY, PASS, FLAGS, WAITS, HOLDS, LOAD_STAMPS, COMPUTE_STAMPS,
    RESULTS, STEPS, SPECS, LOAD_MOST, COMPUTE_MOST,
) = (8 * k for k in range(28))  # fmt: skip
PLAN_WORDS = 28
SPEC_LINES = 4  # of SPECS: a timespec each for the computing and the loading thread, then how many layers each has done
float32 = numba.float32
uint64 = numba.uint64


@part
def compute_layer(base: int, nbytes: int, steps: int, one: float, result: int) -> None:
    """Read ``nbytes`` (a multiple of CHUNK) at ``base`` and do ``steps`` steps of the chains, spread over the chunks.

    Leaves the sum of all 64-bit words in the first word of ``result`` and the chains in the lines after it.
    """
    a = b = c = d = e = f = g = h = line_splat(uint64(0))
    factor = line_splat32(float32(one))
    k0 = line_splat32(float32(0.0))
    k1 = line_splat32(float32(1.0))
    k2 = line_splat32(float32(2.0))
    k3 = line_splat32(float32(3.0))
    k4 = line_splat32(float32(4.0))
    k5 = line_splat32(float32(5.0))
    chunks = nbytes // CHUNK
    whole = steps // chunks
    rest = steps - whole * chunks
    owed = 0
    p = base
    for _ in range(chunks):
        end = p + CHUNK
        while p < end:
            a = line_add(a, line_load(p))
            barrier()  # as in gather_passes: or LLVM loads the first line last
            b = line_add(b, line_load(p + 64))
            c = line_add(c, line_load(p + 128))
            d = line_add(d, line_load(p + 192))
            e = line_add(e, line_load(p + 256))
            f = line_add(f, line_load(p + 320))
            g = line_add(g, line_load(p + 384))
            h = line_add(h, line_load(p + 448))
            p += 512
        todo = whole
        owed += rest
        if owed >= chunks:
            owed -= chunks
            todo += 1
        for _ in range(todo):
            k0 = line_fma32(k0, factor, factor)
            k1 = line_fma32(k1, factor, factor)
            k2 = line_fma32(k2, factor, factor)
            k3 = line_fma32(k3, factor, factor)
            k4 = line_fma32(k4, factor, factor)
            k5 = line_fma32(k5, factor, factor)
    both = line_add(line_add(line_add(a, b), line_add(c, d)), line_add(line_add(e, f), line_add(g, h)))
    sum_store(result, line_sum(both))
    line_store(result + 64, k0)
    line_store(result + 128, k1)
    line_store(result + 192, k2)
    line_store(result + 256, k3)
    line_store(result + 320, k4)
    line_store(result + 384, k5)


@part
def goes_on(done: int, count: int, most: int, other: int, others: int) -> bool:
    """Return whether a side that has ``done`` of its ``count`` layers does another one.

    Where ``most`` exceeds ``count`` it goes on until the other side has done its ``others``, so that both are busy all
    the time; ``other`` is the address of how many that has done.
    """
    return done < count or (done < most and atomic_load(other) < others)


@part
def load_layers(ctl: int, plan: int) -> bool:
    """Bring in ``LOADS`` layers, each flagged when its last byte is stored; False when aborted.

    They are ``LOAD_FIRST``, the next one and so on, over and over within ``LOAD_SPAN`` layers. ``HOLDS`` names for each
    the layer that has to be computed before, -1 none.
    """
    layers = word_load(plan + LAYERS)
    count = word_load(plan + FRAGMENTS)
    flags = word_load(plan + FLAGS)
    number = word_load(plan + PASS)
    stamps = word_load(plan + LOAD_STAMPS)
    spec = word_load(plan + SPECS) + LINE
    i = 0
    while goes_on(
        i, word_load(plan + LOADS), word_load(plan + LOAD_MOST), word_load(plan + SPECS) + 2 * LINE,
        word_load(plan + COMPUTES),
    ):  # fmt: skip
        layer = word_load(plan + LOAD_FIRST) + i % word_load(plan + LOAD_SPAN)
        held = word_load(word_load(plan + HOLDS) + 8 * layer)
        if held >= 0 and not wait_for(ctl, flags + LINE * (layers + held) - ctl, number):
            return False
        word_store(stamps + 16 * i, stamp(ctl, spec))
        copy_fragments(
            word_load(plan + KIND), word_load(plan + NEAR), word_load(plan + FAR), word_load(plan + INDEX),
            layer * count, (layer + 1) * count, word_load(plan + FRAGMENT), word_load(plan + LOCALITY),
            word_load(plan + DISTANCE), word_load(plan + MEMCPY),
        )  # fmt: skip
        drain()
        atomic_store(flags + LINE * layer, number)
        word_store(stamps + 16 * i + 8, stamp(ctl, spec))
        i += 1
        atomic_store(word_load(plan + SPECS) + 3 * LINE, i)
    return True


@part
def compute_layers(ctl: int, plan: int, one: float) -> bool:
    """Compute on ``COMPUTES`` layers, counted as in :func:`load_layers`; False when aborted.

    ``WAITS`` names for each the layer that has to be there before, -1 none. What the layer's own flag said at the
    beginning is left in the second word of its result.
    """
    layers = word_load(plan + LAYERS)
    nbytes = word_load(plan + LAYER_BYTES)
    flags = word_load(plan + FLAGS)
    number = word_load(plan + PASS)
    stamps = word_load(plan + COMPUTE_STAMPS)
    spec = word_load(plan + SPECS)
    i = 0
    while goes_on(
        i, word_load(plan + COMPUTES), word_load(plan + COMPUTE_MOST), word_load(plan + SPECS) + 3 * LINE,
        word_load(plan + LOADS),
    ):  # fmt: skip
        layer = word_load(plan + COMPUTE_FIRST) + i % word_load(plan + COMPUTE_SPAN)
        awaited = word_load(word_load(plan + WAITS) + 8 * layer)
        if awaited >= 0 and not wait_for(ctl, flags + LINE * awaited - ctl, number):
            return False
        result = word_load(plan + RESULTS) + LINE * RESULT_LINES * layer
        word_store(result + 8, atomic_load(flags + LINE * layer))
        word_store(stamps + 16 * i, stamp(ctl, spec))
        compute_layer(word_load(plan + NEAR) + layer * nbytes, nbytes, word_load(plan + STEPS), one, result)
        word_store(stamps + 16 * i + 8, stamp(ctl, spec))
        atomic_store(flags + LINE * (layers + layer), number)
        i += 1
        atomic_store(word_load(plan + SPECS) + 2 * LINE, i)
    return True


@kernel("int64(int64, int64, int64, int64, float64)")
def layers_kernel(ctl: int, member: int, members: int, plan: int, one: float) -> int:
    """Run the plan at address ``plan``: member 0 computes, member 1 loads, further members do nothing.

    ``one`` is 1.0; as a constant it would let the compiler fold the arithmetic.
    """
    start = enter(ctl, member, members)
    if start < 0:
        return -1
    if (member == 0 and not compute_layers(ctl, plan, one)) or (member == 1 and not load_layers(ctl, plan)):
        return -1
    return leave(ctl, member, members, start)
