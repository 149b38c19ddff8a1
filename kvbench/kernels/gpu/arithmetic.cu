// Arithmetic without memory: what stands for the matrix products of a layer while its KV is being loaded.
//
// Each thread runs CHAINS independent chains of single-precision fused multiply-adds. A step adds one to each chain, which
// floats count exactly up to 2^24, so the result tells how many steps were done. `one` is 1.0: as a constant it would let
// the compiler fold the chains. The file is C as well as CUDA C++.

typedef unsigned long long u64;

#ifdef __CUDACC__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#else
#include "device_on_host.h"
#endif

#define CHAINS 8

// out: u64 [blocks * blockDim.x], each thread's sum over its chains: CHAINS * steps + 0 + 1 + ... + (CHAINS - 1).
KERNEL(512) kvbench_arithmetic(u64 *out, u64 steps, double one)
{
    const float factor = (float)one;
    float chain[CHAINS];
    u64 sum = 0;
#pragma unroll
    for (int k = 0; k < CHAINS; k++) chain[k] = (float)k;
#pragma unroll 4
    for (u64 step = 0; step < steps; step++) {
#pragma unroll
        for (int k = 0; k < CHAINS; k++) chain[k] = chain[k] * factor + factor;
    }
#pragma unroll
    for (int k = 0; k < CHAINS; k++) sum += (u64)chain[k];
    out[(u64)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
