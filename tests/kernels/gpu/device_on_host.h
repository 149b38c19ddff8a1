// A GPU of one thread: enough to run the index arithmetic of the .cu files as C, thread after thread.
#ifndef DEVICE_ON_HOST_H
#define DEVICE_ON_HOST_H
#include <stddef.h>
#include <string.h>

typedef struct {
    u64 x, y;
} ulonglong2;

static struct {
    unsigned x;
} blockIdx, threadIdx, blockDim, gridDim;

#define KERNEL(threads) void
#define PART static inline

// With a log nothing is touched: each access that would be made is written down, in units of 16 bytes.
static u64 *access_log;
static unsigned logged;

PART ulonglong2 load16(const ulonglong2 *p, int wanted)
{
    ulonglong2 v = {0, 0};
    if (wanted && access_log) access_log[logged++] = (u64)p / 16;
    else if (wanted) v = *p;
    return v;
}

PART void store16(ulonglong2 *p, ulonglong2 v, int wanted)
{
    if (wanted && access_log) access_log[logged++] = (u64)p / 16;
    else if (wanted) *p = v;
}

PART double as_double(u64 bits)
{
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

PART u64 as_bits(double value)
{
    u64 bits;
    memcpy(&bits, &value, 8);
    return bits;
}

// Threads come one by one: each adds its part, the caller zeroes *out first.
PART void leave_sum(u64 *out, u64 sum) { *out += sum; }

// The chase: one load, and clocks that count loads and calls instead of time.
static u64 steps, readings;

PART u64 follow(u64 address)
{
    steps++;
    return *(const u64 *)address;
}

PART void clocks(u64 address, u64 *cycles, u64 *nanoseconds)
{
    *cycles = steps;
    *nanoseconds = ++readings;
}
#endif
