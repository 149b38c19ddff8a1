// The sequential kernels and the chase for the fake driver: the catalogue's own text, run thread after thread.
#define _GNU_SOURCE
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "movers.cu"
#include "arithmetic.cu"

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

RUN(run_arithmetic)
{
    MEMORY(out, 0, (u64)8 * grid[0] * block[0]);
    EACH_THREAD kvbench_arithmetic(out, AS(u64, 1) - (missing ? 1 : 0), AS(double, 2));
    return CUDA_SUCCESS;
}

RUN(run_empty) { return CUDA_SUCCESS; }

// copy_pages of paged.py as its documentation says it, row by row. What Triton compiles in is told by ladder_pages:
// bytes of an access and of an index, whether V is copied too. Behind the arguments come Triton's two unused pointers.
static u64 access_bytes = 16, index_bytes = 8, both_planes = 1;
void ladder_pages(unsigned long long access, unsigned long long index, unsigned long long both)
{
    access_bytes = access, index_bytes = index, both_planes = both;
}

static CUresult page_of(u64 table, int64_t i, int64_t *page)
{
    void *at = fake_translate(table + (u64)i * index_bytes, index_bytes, 0);
    if (!at) return CUDA_ERROR_ILLEGAL_ADDRESS;
    *page = index_bytes == 8 ? *(int64_t *)at : *(int32_t *)at;
    return CUDA_SUCCESS;
}

RUN(run_copy_pages)
{
    int count = AS(int, 6), rows = AS(int, 7), inner = AS(int, 9), innermost = AS(int, 10);
    u64 bytes = (u64)AS(int, 8) * access_bytes;
    if (AS(u64, 19) || AS(u64, 20)) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < count; i++) {
        int64_t to, from;
        if (page_of(AS(u64, 4), i, &to) || page_of(AS(u64, 5), i, &from)) return CUDA_ERROR_ILLEGAL_ADDRESS;
        if (to < 0 || from < 0) continue;
        for (int row = 0; row < rows; row++) {
            int64_t at[4] = {0, row / inner, row % inner / innermost, row % inner % innermost}, there = 0, here = 0;
            for (int k = 0; k < 4; k++) {
                there += (k ? at[k] : to) * AS(int64_t, 11 + k) * (int64_t)access_bytes;
                here += (k ? at[k] : from) * AS(int64_t, 15 + k) * (int64_t)access_bytes;
            }
            for (u64 plane = 0; plane <= both_planes; plane++) {
                u64 target = AS(u64, plane) + (u64)there, source = AS(u64, 2 + plane) + (u64)here;
                if (target % access_bytes || source % access_bytes) return CUDA_ERROR_MISALIGNED_ADDRESS;
                void *dst = fake_translate(target, bytes, 0), *src = fake_translate(source, bytes, 0);
                if (!dst || !src) return CUDA_ERROR_ILLEGAL_ADDRESS;
                memcpy(dst, src, cut(bytes));
            }
        }
    }
    return CUDA_SUCCESS;
}

static const Kernel KERNELS[] = {
    {"copy_pages", 21, {8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8}, run_copy_pages},
    {"kvbench_read", 3, {8, 8, 8}, run_read},
    {"kvbench_link_read", 3, {8, 8, 8}, run_read},
    {"kvbench_copy", 3, {8, 8, 8}, run_copy},
    {"kvbench_link_copy", 3, {8, 8, 8}, run_copy},
    {"kvbench_write", 4, {8, 8, 8, 8}, run_write},
    {"kvbench_triad", 5, {8, 8, 8, 8, 8}, run_triad},
    {"kvbench_chase", 4, {8, 8, 8, 8}, run_chase},
    {"kvbench_arithmetic", 3, {8, 8, 8}, run_arithmetic},
    {"kvbench_empty", 0, {0}, run_empty},
};

const Kernel *ladder_kernel(const char *name)
{
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (!strcmp(KERNELS[i].name, name)) return &KERNELS[i];
    const Kernel *gemm_kernel(const char *);
    return gemm_kernel(name);
}
