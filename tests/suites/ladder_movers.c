// The sequential kernels and the chase for the fake driver: the catalogue's own text, run thread after thread.
#define _GNU_SOURCE
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "movers.cu"

#define AS(type, i) (*(type *)params[i])
#define MEMORY(name, i, bytes)                                                                                         \
    if (AS(u64, i) % 8) return CUDA_ERROR_MISALIGNED_ADDRESS;                                                          \
    void *name = fake_translate(AS(u64, i), (bytes), 0);                                                               \
    if (!name) return CUDA_ERROR_ILLEGAL_ADDRESS
#define RUN(name)                                                                                                      \
    static CUresult name(void **params, const unsigned *grid, const unsigned *block, Context *ctx)
#define EACH_THREAD                                                                                                    \
    gridDim.x = grid[0], blockDim.x = block[0];                                                                        \
    for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++)                                                           \
        for (threadIdx.x = 0; threadIdx.x < block[0]; threadIdx.x++)

// How many bytes less than asked a copy moves: a wrong kernel, for tests that must notice.
static u64 missing;
void ladder_missing(unsigned long long bytes) { missing = bytes; }
static u64 cut(u64 nbytes) { return nbytes - (missing < nbytes ? missing : nbytes); }

static CUresult copy(void **params, const unsigned *grid, const unsigned *block)
{
    MEMORY(dst, 0, AS(u64, 2));
    MEMORY(src, 1, AS(u64, 2));
    EACH_THREAD kvbench_copy(dst, src, cut(AS(u64, 2)));
    return CUDA_SUCCESS;
}

static CUresult read(void **params, const unsigned *grid, const unsigned *block)
{
    MEMORY(out, 0, 8 * grid[0]);
    MEMORY(src, 1, AS(u64, 2));
    memset(out, 0, 8 * grid[0]); // here threads add their parts one by one
    EACH_THREAD kvbench_read(out, src, cut(AS(u64, 2)));
    return CUDA_SUCCESS;
}

RUN(run_copy) { return copy(params, grid, block); }
RUN(run_read) { return read(params, grid, block); }

RUN(run_write)
{
    MEMORY(dst, 0, AS(u64, 1));
    EACH_THREAD kvbench_write(dst, cut(AS(u64, 1)), AS(u64, 2), AS(u64, 3));
    return CUDA_SUCCESS;
}

RUN(run_triad)
{
    MEMORY(a, 0, AS(u64, 3));
    MEMORY(b, 1, AS(u64, 3));
    MEMORY(c, 2, AS(u64, 3));
    EACH_THREAD kvbench_triad(a, b, c, cut(AS(u64, 3)), AS(double, 4));
    return CUDA_SUCCESS;
}

static u64 now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}

// The chase itself, with the host's clock: nodes hold device addresses, so each step is translated.
RUN(run_chase)
{
    MEMORY(out, 0, 24);
    u64 address = AS(u64, 1), warm = AS(u64, 2), loads = AS(u64, 3), begin = now();
    for (u64 i = 0; i < warm + loads - (missing ? 1 : 0); i++) {
        if (i == warm) begin = now();
        u64 *node = (u64 *)fake_translate(address, 8, 0);
        if (!node) return CUDA_ERROR_ILLEGAL_ADDRESS;
        address = *node;
    }
    u64 left[3] = {address, 3 * loads, now() - begin};
    memcpy(out, left, sizeof left);
    return CUDA_SUCCESS;
}

RUN(run_empty) { return CUDA_SUCCESS; }

static const Kernel KERNELS[] = {
    {"kvbench_read", 3, {8, 8, 8}, run_read},
    {"kvbench_link_read", 3, {8, 8, 8}, run_read},
    {"kvbench_copy", 3, {8, 8, 8}, run_copy},
    {"kvbench_link_copy", 3, {8, 8, 8}, run_copy},
    {"kvbench_write", 4, {8, 8, 8, 8}, run_write},
    {"kvbench_triad", 5, {8, 8, 8, 8, 8}, run_triad},
    {"kvbench_chase", 4, {8, 8, 8, 8}, run_chase},
    {"kvbench_empty", 0, {0}, run_empty},
};

const Kernel *ladder_kernel(const char *name)
{
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (!strcmp(KERNELS[i].name, name)) return &KERNELS[i];
    return NULL;
}
