// The whole grid of movers.cu, one thread after the other, for ctypes.
#include "movers.cu"
#include "arithmetic.cu"

#define GRID(call)                                                                                                     \
    gridDim.x = blocks, blockDim.x = threads;                                                                          \
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)                                                            \
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) call

void grid_copy(unsigned blocks, unsigned threads, void *dst, const void *src, u64 nbytes)
{
    GRID(kvbench_copy(dst, src, nbytes));
}

void grid_link_copy(unsigned blocks, unsigned threads, void *dst, const void *src, u64 nbytes)
{
    GRID(kvbench_link_copy(dst, src, nbytes));
}

void grid_read(unsigned blocks, unsigned threads, u64 *out, const void *src, u64 nbytes)
{
    GRID(kvbench_read(out, src, nbytes));
}

void grid_link_read(unsigned blocks, unsigned threads, u64 *out, const void *src, u64 nbytes)
{
    GRID(kvbench_link_read(out, src, nbytes));
}

void grid_arithmetic(unsigned blocks, unsigned threads, u64 *out, u64 steps, double one)
{
    GRID(kvbench_arithmetic(out, steps, one));
}

void grid_write(unsigned blocks, unsigned threads, void *dst, u64 nbytes, u64 first, u64 step)
{
    GRID(kvbench_write(dst, nbytes, first, step));
}

void grid_triad(unsigned blocks, unsigned threads, void *a, const void *b, const void *c, u64 nbytes, double scale)
{
    GRID(kvbench_triad(a, b, c, nbytes, scale));
}

// What one thread of a copy would touch, from address 16 * base on; returns how many accesses.
unsigned copy_log(unsigned blocks, unsigned threads, unsigned block, unsigned thread, u64 base, u64 nbytes, u64 *log)
{
    gridDim.x = blocks, blockDim.x = threads, blockIdx.x = block, threadIdx.x = thread;
    access_log = log, logged = 0;
    kvbench_copy((void *)(16 * base), (const void *)(16 * base), nbytes);
    access_log = NULL;
    return logged;
}
