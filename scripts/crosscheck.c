/* C of the same instruction kind as kvbench/kernels: 64-byte vectors, the same counting, the same meeting of threads.
 *
 * Every entry point has the arguments of the numba kernel it stands beside, so that one buffer, one team and one clock
 * serve both. Built with -fno-tree-loop-distribute-patterns: without it gcc turns a copy loop into a call of memcpy.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

typedef uint64_t line __attribute__((vector_size(64), aligned(1), may_alias));
typedef double doubles __attribute__((vector_size(64), aligned(1), may_alias));
typedef int64_t i64;
typedef uint64_t u64;

#define AT(type, address) (*(type *)(uintptr_t)(address))
#define STEP 0x9E3779B97F4A7C15ull

/* the control block of kvbench/kernels/sync.py, byte offsets */
enum { ARRIVED = 0, RELEASED = 64, FINISHED = 128, ABORT = 192, OUTPUT = 512, SPINS = 2000 };

static inline void compiler_barrier(void) { __asm__ volatile("" ::: "memory"); }

static inline void relax(void)
{
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static i64 now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (i64)t.tv_sec * 1000000000 + t.tv_nsec;
}

static i64 word(i64 address) { return __atomic_load_n(&AT(i64, address), __ATOMIC_ACQUIRE); }

static int wait_for(i64 ctl, i64 offset, i64 target)
{
    int spins = 0;
    while (word(ctl + offset) < target) {
        if (word(ctl + ABORT))
            return 0;
        relax();
        if (++spins > SPINS)
            sched_yield();
    }
    return 1;
}

static i64 enter(i64 ctl, i64 member, i64 members)
{
    if (member == 0) {
        if (!wait_for(ctl, ARRIVED, members - 1))
            return -1;
        i64 start = now();
        __atomic_store_n(&AT(i64, ctl + RELEASED), 1, __ATOMIC_RELEASE);
        compiler_barrier();
        return start;
    }
    __atomic_fetch_add(&AT(i64, ctl + ARRIVED), 1, __ATOMIC_SEQ_CST);
    if (!wait_for(ctl, RELEASED, 1))
        return -1;
    compiler_barrier();
    return 0;
}

static i64 leave(i64 ctl, i64 member, i64 members, i64 start)
{
    compiler_barrier();
    if (member != 0) {
        __atomic_fetch_add(&AT(i64, ctl + FINISHED), 1, __ATOMIC_SEQ_CST);
        return 0;
    }
    if (!wait_for(ctl, FINISHED, members - 1))
        return -1;
    return now() - start;
}

static i64 share(i64 nbytes, i64 member, i64 members)
{
    return member == members ? nbytes : nbytes / 64 * member / members * 64;
}

static inline void stream_line(char *to, line v)
{
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i *)to, (__m512i)v);
#elif defined(__AVX__)
    union { line v; __m256i half[2]; } u = {v};
    _mm256_stream_si256((__m256i *)to, u.half[0]);
    _mm256_stream_si256((__m256i *)(to + 32), u.half[1]);
#elif defined(__SSE2__)
    union { line v; __m128i q[4]; } u = {v};
    for (int k = 0; k < 4; k++)
        _mm_stream_si128((__m128i *)(to + 16 * k), u.q[k]);
#elif defined(__aarch64__)
    typedef u64 quad __attribute__((vector_size(16)));
    union { line v; quad q[4]; } u = {v};
    __asm__ volatile("stnp %q1, %q2, [%0]\n\tstnp %q3, %q4, [%0, 32]"
                     :: "r"(to), "w"(u.q[0]), "w"(u.q[1]), "w"(u.q[2]), "w"(u.q[3]) : "memory");
#else
    AT(line, to) = v;
#endif
}

static inline void drain(void)
{
#if defined(__SSE2__)
    _mm_sfence();
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

static inline u64 lanes(line v) { return v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7]; }

__attribute__((noinline)) u64 c_read(const char *p, i64 nbytes)
{
    line a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0};
    const char *end = p + nbytes / 512 * 512, *all = p + nbytes, *whole = p + nbytes / 64 * 64;
    for (; p < end; p += 512) {
        a += AT(line, p);
        b += AT(line, p + 64);
        c += AT(line, p + 128);
        d += AT(line, p + 192);
        e += AT(line, p + 256);
        f += AT(line, p + 320);
        g += AT(line, p + 384);
        h += AT(line, p + 448);
    }
    for (; p < whole; p += 64)
        a += AT(line, p);
    u64 total = lanes(a + b + c + d + e + f + g + h);
    for (; p < all; p++)
        total += (unsigned char)*p;
    compiler_barrier();
    return total;
}

__attribute__((noinline)) void c_write(char *to, i64 nbytes, u64 first)
{
    line v, step;
    for (int k = 0; k < 8; k++) {
        v[k] = first + k * STEP;
        step[k] = 8 * STEP;
    }
    i64 k = 0, end = nbytes / 256 * 256;
    for (; k < end; k += 256) {
        AT(line, to + k) = v;
        v += step;
        AT(line, to + k + 64) = v;
        v += step;
        AT(line, to + k + 128) = v;
        v += step;
        AT(line, to + k + 192) = v;
        v += step;
    }
    for (; k < nbytes / 64 * 64; k += 64, v += step)
        AT(line, to + k) = v;
    for (; k < nbytes; k++)
        to[k] = (char)((first + (u64)(k / 8) * STEP) >> (8 * (k % 8)));
}

__attribute__((noinline)) void c_copy_plain(char *to, const char *from, i64 nbytes)
{
    i64 k = 0;
    /* one load a stream and iteration: unrolled by four it is 4 to 5 % slower on Zen 4, see kernels/passes.py */
#pragma GCC unroll 1
    for (; k < nbytes / 64 * 64; k += 64) {
        AT(line, to + k) = AT(line, from + k);
        compiler_barrier();
    }
    for (; k < nbytes; k++)
        to[k] = from[k];
}

__attribute__((noinline)) void c_copy_nt(char *to, const char *from, i64 nbytes)
{
    i64 k = 0, head = -(uintptr_t)to & 63;
    for (head = head < nbytes ? head : nbytes; k < head; k++)
        to[k] = from[k];
    i64 end = k + (nbytes - k) / 256 * 256;
    for (; k < end; k += 256) {
        line a = AT(line, from + k), b = AT(line, from + k + 64);
        line c = AT(line, from + k + 128), d = AT(line, from + k + 192);
        compiler_barrier();
        stream_line(to + k, a);
        stream_line(to + k + 64, b);
        stream_line(to + k + 128, c);
        stream_line(to + k + 192, d);
    }
    for (end = k + (nbytes - k) / 64 * 64; k < end; k += 64)
        stream_line(to + k, AT(line, from + k));
    for (; k < nbytes; k++)
        to[k] = from[k];
    drain();
}

__attribute__((noinline)) void c_triad(char *to, const char *x, const char *y, i64 nbytes, double scalar)
{
    i64 k = 0;
#pragma GCC unroll 1
    for (; k < nbytes / 64 * 64; k += 64) {
        AT(doubles, to + k) = AT(doubles, x + k) + scalar * AT(doubles, y + k);
        compiler_barrier();
    }
    for (; k < nbytes; k += 8)
        AT(double, to + k) = AT(double, x + k) + scalar * AT(double, y + k);
}

i64 c_stream(i64 ctl, i64 member, i64 members, i64 op, i64 a, i64 b, i64 c, i64 nbytes, i64 reps, u64 first, i64 unused)
{
    (void)unused;
    i64 lo = share(nbytes, member, members), size = share(nbytes, member + 1, members) - lo;
    u64 total = 0;
    i64 start = enter(ctl, member, members);
    if (start < 0)
        return -1;
    for (i64 rep = 0; rep < reps; rep++) {
        char *to = (char *)(uintptr_t)(a + lo);
        const char *x = (const char *)(uintptr_t)(b + lo), *y = (const char *)(uintptr_t)(c + lo);
        switch (op) {
        case 0: total += c_read(to, size); break;
        case 1: c_write(to, size, first + (u64)rep + (u64)(lo / 8) * STEP); break;
        case 2: c_copy_plain(to, x, size); break;
        case 3: memcpy(to, x, (size_t)size); break;
        case 4: c_copy_nt(to, x, size); break;
        default: c_triad(to, x, y, size, (double)(1 << (rep & 7)));
        }
        compiler_barrier();
    }
    i64 elapsed = leave(ctl, member, members, start);
    AT(u64, ctl + OUTPUT + 64 * member) = total;
    return elapsed;
}

/* unloaded: member 0 alone */
i64 c_chase(i64 ctl, i64 member, i64 members, i64 position, i64 hops, i64 load, i64 nbytes, i64 block, i64 delay)
{
    (void)load, (void)nbytes, (void)block, (void)delay;
    if (members != 1 || enter(ctl, member, members) < 0)
        return -1;
    void **p = (void **)(uintptr_t)position;
    i64 start = now();
    for (i64 k = 0; k < hops; k++)
        p = (void **)*p;
    __asm__ volatile("" : "+r"(p));
    i64 elapsed = now() - start;
    AT(i64, ctl + OUTPUT) = (i64)(uintptr_t)p;
    AT(i64, ctl + OUTPUT + 8) = 0;
    return elapsed;
}

/* The prefetch locality is a constant in each copy of these loops, as a C programmer would write it. */
#define FETCH(p) __builtin_prefetch((const void *)(p), 0, HINT)
#define HINT 3
#define READ read_l1
#define COPY copy_l1
#include "crosscheck_gather.h"
#define HINT 2
#define READ read_l2
#define COPY copy_l2
#include "crosscheck_gather.h"

i64 c_gather(i64 ctl, i64 member, i64 members, i64 kind, i64 dst, i64 src, i64 index, i64 count, i64 fragment,
             i64 locality, i64 distance, i64 reps, i64 unused)
{
    (void)unused;
    i64 lo = count * member / members, hi = count * (member + 1) / members;
    const i64 *order = (const i64 *)(uintptr_t)index;
    const char *from = (const char *)(uintptr_t)src;
    char *to = (char *)(uintptr_t)dst;
    u64 sums[2] = {0, 0};
    if (!locality)
        distance = -1;
    i64 start = enter(ctl, member, members);
    if (start < 0)
        return -1;
    for (i64 rep = 0; rep < reps; rep++) {
        if (kind == 3)
            for (i64 k = lo; k < hi; k++)
                memcpy(to + k * fragment, from + order[k] * fragment, (size_t)fragment);
        else if (kind == 0)
            (locality == 2 ? read_l2 : read_l1)(from, order, lo, hi, fragment, distance, sums);
        else
            (locality == 2 ? copy_l2 : copy_l1)(to, from, order, lo, hi, fragment, distance, kind == 2);
        compiler_barrier();
    }
    i64 elapsed = leave(ctl, member, members, start);
    AT(u64, ctl + OUTPUT + 64 * member) = sums[0];
    AT(u64, ctl + OUTPUT + 64 * member + 8) = sums[1];
    return elapsed;
}
