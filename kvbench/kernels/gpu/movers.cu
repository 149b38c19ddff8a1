// Sequential movers: device_bandwidth (read, write, copy, triad), the `sm` link copy and the `direct` in-place read.
//
// Pointers are 16-byte aligned; nbytes is free, its last nbytes % 16 bytes are moved one by one. Blocks have a multiple of
// 32 threads. In each round of the grid a block takes one tile of 8 x blockDim.x words of 16 bytes, so 8 loads a thread
// are in flight before its first store; the rest after the last full round is dealt out evenly, so that small buffers
// use every block too. Indices are 64-bit: a buffer may have more than 2^31 words.
//
// The file is C as well as CUDA C++, so that tests can run its index arithmetic on a host, thread by thread.

typedef unsigned long long u64;

#ifdef __CUDACC__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define PART static __device__ __forceinline__

// Streamed once: not kept in L1, and the line of a store leaves L2 first (LDG.E.NA, STG.E.EF). One asm volatile an
// access and plain loads hold the order written here, all loads of a tile before its stores. With ld.global.nc ptxas
// moves loads behind stores to save registers (seen for sm_80 to sm_120: 4 in flight of 8). The predicate is inside,
// because an `if` around a load and one around its store become one branch, and each load waits for the one before.
PART ulonglong2 load16(const ulonglong2 *p, int wanted)
{
    ulonglong2 v = {0, 0};
    asm volatile("{ .reg .pred q; setp.ne.s32 q, %3, 0; @q ld.global.L1::no_allocate.v2.u64 {%0, %1}, [%2]; }"
                 : "+l"(v.x), "+l"(v.y)
                 : "l"(__cvta_generic_to_global(p)), "r"(wanted)
                 : "memory");
    return v;
}

PART void store16(ulonglong2 *p, ulonglong2 v, int wanted)
{
    asm volatile("{ .reg .pred q; setp.ne.s32 q, %3, 0; @q st.global.cs.v2.u64 [%0], {%1, %2}; }" ::"l"(
                     __cvta_generic_to_global(p)),
                 "l"(v.x), "l"(v.y), "r"(wanted)
                 : "memory");
}

PART double as_double(u64 bits) { return __longlong_as_double((long long)bits); }
PART u64 as_bits(double value) { return (u64)__double_as_longlong(value); }

// The sum over the block lands in *out: the result of a read has to leave the kernel or the loads are dropped.
PART void leave_sum(u64 *out, u64 sum)
{
    __shared__ u64 warps[32];
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_down_sync(0xffffffffu, sum, lane);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 total = 0;
        for (unsigned w = 0; w < (blockDim.x + 31) / 32; w++) total += warps[w];
        *out = total;
    }
}
#else
#include "device_on_host.h"
#endif

#define UNROLL 8
#define HALF (UNROLL / 2)

// A round of the grid: one tile a block. tile_word: this thread's k-th word of the round that begins at `done`.
PART u64 round_words(void) { return (u64)UNROLL * blockDim.x * gridDim.x; }
PART u64 tile_word(u64 done, int k) { return done + ((u64)UNROLL * blockIdx.x + k) * blockDim.x + threadIdx.x; }

// What is left after the last full round, `done` words, is dealt out one word a thread and block after block: whole
// lines (blockDim.x is a multiple of 8), no division (a 64-bit one is a call of 100 instructions and made spills), and
// UNROLL turns reach its end.
PART u64 rest_word(u64 done, int k) { return done + ((u64)k * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x; }

// Threads that move one byte of the tail each.
PART u64 tail(u64 nbytes) { return blockIdx.x == 0 ? nbytes % 16 : 0; }

PART void copy_all(void *dst, const void *src, u64 nbytes)
{
    ulonglong2 *to = (ulonglong2 *)dst;
    const ulonglong2 *from = (const ulonglong2 *)src;
    const u64 words = nbytes / 16;
    ulonglong2 v[UNROLL];
    u64 done = 0;
#pragma unroll 1
    for (; done + round_words() <= words; done += round_words()) {
#pragma unroll
        for (int k = 0; k < UNROLL; k++) v[k] = load16(from + tile_word(done, k), 1);
#pragma unroll
        for (int k = 0; k < UNROLL; k++) store16(to + tile_word(done, k), v[k], 1);
    }
#pragma unroll
    for (int k = 0; k < UNROLL; k++) v[k] = load16(from + rest_word(done, k), rest_word(done, k) < words);
#pragma unroll
    for (int k = 0; k < UNROLL; k++) store16(to + rest_word(done, k), v[k], rest_word(done, k) < words);
    if (threadIdx.x < tail(nbytes))
        ((unsigned char *)(to + words))[threadIdx.x] = ((const unsigned char *)(from + words))[threadIdx.x];
}

// The sum of all 64-bit words modulo 2^64, the last one padded with zero bytes: out[b] is the part of block b.
PART void read_all(u64 *out, const void *src, u64 nbytes)
{
    const ulonglong2 *from = (const ulonglong2 *)src;
    const u64 words = nbytes / 16;
    ulonglong2 v[UNROLL];
    u64 done = 0, sum = 0;
#pragma unroll 1
    for (; done + round_words() <= words; done += round_words()) {
#pragma unroll
        for (int k = 0; k < UNROLL; k++) v[k] = load16(from + tile_word(done, k), 1);
#pragma unroll
        for (int k = UNROLL - 1; k >= 0; k--) sum += v[k].x + v[k].y;
    }
#pragma unroll
    for (int k = 0; k < UNROLL; k++) v[k] = load16(from + rest_word(done, k), rest_word(done, k) < words);
#pragma unroll
    for (int k = UNROLL - 1; k >= 0; k--) sum += v[k].x + v[k].y;
    if (threadIdx.x < tail(nbytes))
        sum += (u64)((const unsigned char *)(from + words))[threadIdx.x] << (threadIdx.x % 8 * 8);
    leave_sum(out + blockIdx.x, sum);
}

KERNEL(512) kvbench_read(u64 *out, const void *src, u64 nbytes) { read_all(out, src, nbytes); }

KERNEL(512) kvbench_copy(void *dst, const void *src, u64 nbytes) { copy_all(dst, src, nbytes); }

// The 8-byte words 2i and 2i + 1 of a written buffer: word k is first + k * step modulo 2^64.
PART ulonglong2 ramp(u64 i, u64 first, u64 step)
{
    ulonglong2 v;
    v.x = first + 2 * i * step;
    v.y = v.x + step;
    return v;
}

KERNEL(512) kvbench_write(void *dst, u64 nbytes, u64 first, u64 step)
{
    ulonglong2 *to = (ulonglong2 *)dst;
    const u64 words = nbytes / 16;
    u64 done = 0;
#pragma unroll 1
    for (; done + round_words() <= words; done += round_words()) {
#pragma unroll
        for (int k = 0; k < UNROLL; k++) store16(to + tile_word(done, k), ramp(tile_word(done, k), first, step), 1);
    }
#pragma unroll
    for (int k = 0; k < UNROLL; k++)
        store16(to + rest_word(done, k), ramp(rest_word(done, k), first, step), rest_word(done, k) < words);
    if (threadIdx.x < tail(nbytes))
        ((unsigned char *)(to + words))[threadIdx.x] =
            (unsigned char)((first + (2 * words + threadIdx.x / 8) * step) >> (threadIdx.x % 8 * 8));
}

// a = b + scale * c in float64, nbytes a multiple of 8. The multiply-add rounds once: with a power of two as scale the
// product is exact and any host gets the same bits.
PART ulonglong2 added(ulonglong2 b, ulonglong2 c, double scale)
{
    b.x = as_bits(as_double(b.x) + scale * as_double(c.x));
    b.y = as_bits(as_double(b.y) + scale * as_double(c.y));
    return b;
}

KERNEL(512) kvbench_triad(void *a, const void *b, const void *c, u64 nbytes, double scale)
{
    ulonglong2 *to = (ulonglong2 *)a;
    const ulonglong2 *left = (const ulonglong2 *)b, *right = (const ulonglong2 *)c;
    const u64 words = nbytes / 16;
    ulonglong2 v[HALF], w[HALF];
    u64 done = 0;
#pragma unroll 1
    for (; done + round_words() <= words; done += round_words()) {
#pragma unroll
        for (int first = 0; first < UNROLL; first += HALF) {
#pragma unroll
            for (int k = 0; k < HALF; k++) {
                v[k] = load16(left + tile_word(done, first + k), 1);
                w[k] = load16(right + tile_word(done, first + k), 1);
            }
#pragma unroll
            for (int k = 0; k < HALF; k++) store16(to + tile_word(done, first + k), added(v[k], w[k], scale), 1);
        }
    }
#pragma unroll
    for (int first = 0; first < UNROLL; first += HALF) {
#pragma unroll
        for (int k = 0; k < HALF; k++) {
            v[k] = load16(left + rest_word(done, first + k), rest_word(done, first + k) < words);
            w[k] = load16(right + rest_word(done, first + k), rest_word(done, first + k) < words);
        }
#pragma unroll
        for (int k = 0; k < HALF; k++)
            store16(to + rest_word(done, first + k), added(v[k], w[k], scale), rest_word(done, first + k) < words);
    }
    if (threadIdx.x < tail(nbytes) / 8)
        *(double *)(to + words) = *(const double *)(left + words) + scale * *(const double *)(right + words);
}

// Host memory over the link by GPU threads, either way: a few large blocks, since bandwidth = bytes in flight / round
// trip, and 128 KiB a block are in flight. The pointers are device memory and the device alias of host memory.
KERNEL(1024) kvbench_link_copy(void *dst, const void *src, u64 nbytes) { copy_all(dst, src, nbytes); }

KERNEL(1024) kvbench_link_read(u64 *out, const void *src, u64 nbytes) { read_all(out, src, nbytes); }
