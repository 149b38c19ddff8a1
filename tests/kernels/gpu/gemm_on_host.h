// One block of threads on the host for gemm.cu: phase after phase, thread after thread.
//
// Asynchronous copies are kept until they are waited for, and what they will overwrite is poisoned at once; or they are
// done at once. The first finds a read before its wait, the second a copy over what is still in use.
#ifndef GEMM_ON_HOST_H
#define GEMM_ON_HOST_H
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    float x, y, z, w;
} float4;
typedef struct {
    float x, y;
} float2;
#ifndef DEVICE_ON_HOST_H
static struct {
    unsigned x;
} blockIdx, gridDim;
#define PART static inline
#endif

#define MOST_THREADS 256
#define SHARED_FLOATS (64 << 10)
static float shared_memory[SHARED_FLOATS];
#define SHARED float *shared = shared_memory
#define EACH_THREAD for (unsigned t = 0; t < THREADS; t++)
#define OWN(type, name, rows, columns) static type name[MOST_THREADS][rows][columns]
#define MINE(name) name[t]
#define BARRIER()
#define KERNEL_OF(threads) static void

// What is read of the far matrix: one count for each vector of 16 bytes of it; and the copies under way, by group.
static const float *far_begin, *far_end;
static unsigned *far_reads;
static u64 far_vectors, outside;
static int eager, wrong_wait; // wrong_wait: how many groups fewer than asked are waited for, a planted fault
typedef struct {
    float *to;
    const float *from;
    int wanted;
    u64 group;
} Pending;
static Pending pending[1 << 16];
static u64 begin_, end_, groups, open_group;

static void arrive(const Pending *p)
{
    float zero[4] = {0};
    memcpy(p->to, p->wanted ? p->from : zero, 16);
}

PART void seen(const float *from)
{
    if (from < far_begin || from >= far_end) return;
    far_vectors++;
    if (from + 4 > far_end) outside++;
    else if (far_reads) far_reads[(from - far_begin) / 4]++;
}

PART void copy16(float *to, const float *from, int wanted)
{
    if ((u64)to % 16 || (u64)from % 16) abort();
    if (to < shared_memory || to + 4 > shared_memory + SHARED_FLOATS) abort();
    if (wanted) seen(from);
    Pending p = {to, from, wanted, open_group};
    if (eager) {
        arrive(&p);
        return;
    }
    for (int i = 0; i < 4; i++) to[i] = NAN;
    if (end_ - begin_ == sizeof pending / sizeof *pending) abort();
    pending[end_++ % (sizeof pending / sizeof *pending)] = p;
}

#define COMMIT() open_group++
static void wait_for(u64 left)
{
    left += (u64)wrong_wait;
    while (begin_ < end_ && pending[begin_ % (sizeof pending / sizeof *pending)].group + left < open_group)
        arrive(&pending[begin_++ % (sizeof pending / sizeof *pending)]);
}
#define WAIT(left) wait_for(left)

PART float4 load16f(const float *from, int wanted)
{
    float4 v = {0.f, 0.f, 0.f, 0.f};
    if ((u64)from % 16) abort();
    if (wanted) {
        seen(from);
        memcpy(&v, from, 16);
    }
    return v;
}

PART void store16f(float *to, float4 v)
{
    if ((u64)to % 16) abort();
    memcpy(to, &v, 16);
}
#endif
