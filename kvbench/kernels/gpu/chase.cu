// Latency of one dependent load: each 8-byte word holds the address of the next, one thread follows them.
//
// The clocks are read in the kernel, each behind a comparison of the last loaded address: issue is in order, so the
// reading waits for that load. Nothing in PTX keeps the assembler from reading the clock first; the gate `timed` looks
// at the machine code. `warm` loads before the window bring the walk into L1, which does not survive from one kernel to
// the next.
//
// The file is C as well as CUDA C++, so that tests can count its steps on a host.

typedef unsigned long long u64;

#ifdef __CUDACC__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define PART static __device__ __forceinline__

PART u64 follow(u64 address)
{
    u64 next;
    asm volatile("ld.global.ca.u64 %0, [%1];" : "=l"(next) : "l"(address) : "memory");
    return next;
}

// No address is 0, so both clocks are always read.
PART void clocks(u64 address, u64 *cycles, u64 *nanoseconds)
{
    u64 c = 0, g = 0;
    asm volatile("{ .reg .pred p; setp.ne.u64 p, %2, 0; @p mov.u64 %0, %%clock64; @p mov.u64 %1, %%globaltimer; }"
                 : "+l"(c), "+l"(g)
                 : "l"(address)
                 : "memory");
    *cycles = c;
    *nanoseconds = g;
}
#else
#include "device_on_host.h"
#endif

PART u64 walk(u64 address, u64 loads)
{
    u64 k = 0;
#pragma unroll 1
    for (; k + 8 <= loads; k += 8) {
#pragma unroll
        for (int j = 0; j < 8; j++) address = follow(address);
    }
#pragma unroll 1
    for (; k < loads; k++) address = follow(address);
    return address;
}

// out[0]: address after warm + loads steps; out[1]: SM cycles, out[2]: nanoseconds of globaltimer for the `loads` steps.
// globaltimer ticks as coarsely as 1 us on some boards: the caller asks for enough loads.
KERNEL(1) kvbench_chase(u64 *out, u64 head, u64 warm, u64 loads)
{
    u64 c0, g0, c1, g1;
    u64 address = walk(head, warm);
    clocks(address, &c0, &g0);
    address = walk(address, loads);
    clocks(address, &c1, &g1);
    out[0] = address;
    out[1] = c1 - c0;
    out[2] = g1 - g0;
}
