// The products for the fake driver: gemm.cu itself, and what Triton's and Gluon's forms are documented to do.
#define _GNU_SOURCE
#include "fake.h"

#include <string.h>

#include "gemm_variants.h"

#define AS(type, i) (*(type *)params[i])
#define RUN(name)                                                                                                      \
    static CUresult name(void **params, const unsigned *grid, const unsigned *block, Context *ctx)

// How many tiles of K too few are multiplied, and bytes of an element of A and B of the portable forms.
static u64 short_k, item = 4;
void gemm_short(unsigned long long rows) { short_k = rows; }
void gemm_item(unsigned long long bytes) { item = bytes; }

typedef void Entry(float *, const float *, const float *, int, int, int, u64, u64, u64, int, int);
static CUresult simt(Entry *entry, void **params, const unsigned *grid)
{
    int m = AS(int, 3), n = AS(int, 4), k = AS(int, 5);
    u64 lda = AS(u64, 6), ldb = AS(u64, 7), ldc = AS(u64, 8), wide = ((u64)n + 3) / 4 * 4;
    if (AS(u64, 0) % 16 || AS(u64, 1) % 16 || AS(u64, 2) % 16 || lda % 4 || ldb % 4 || ldc % 4)
        return CUDA_ERROR_MISALIGNED_ADDRESS;
    float *c = (float *)fake_translate(AS(u64, 0), 4 * ((m - 1) * ldc + wide), 0);
    float *a = (float *)fake_translate(AS(u64, 1), 4 * m * lda, 0);
    float *b = (float *)fake_translate(AS(u64, 2), 4 * ((k - 1) * ldb + wide), 0);
    if (!a || !b || !c) return CUDA_ERROR_ILLEGAL_ADDRESS;
    k -= (int)short_k;
    begin_ = end_ = open_group = 0;
    gridDim.x = grid[0];
    for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++)
        entry(c, a, b, m, n, k, lda, ldb, ldc, AS(int, 9), AS(int, 10));
    return CUDA_SUCCESS;
}

#define SIMT(name)                                                                                                     \
    RUN(run_##name) { return simt(kvbench_gemm_##name, params, grid); }
SIMT(naive_64_d1)
SIMT(naive_64_d3)
SIMT(aware_64_d1)
SIMT(aware_64_d2)
SIMT(aware_64_d4)
SIMT(aware_128_d1)
SIMT(naive_128_d3)
SIMT(naive_256_d1)

static float element(const char *at, u64 i)
{
    float value;
    unsigned bits = 0;
    if (item == 4) memcpy(&value, at + 4 * i, 4);
    else {
        memcpy((char *)&bits + 2, at + 2 * i, 2);
        memcpy(&value, &bits, 4);
    }
    return value;
}

// C = A B with B by columns; rows of lda, ldb bytes, ldc floats.
static CUresult portable(u64 to, u64 left, u64 right, int m, int n, int k, u64 lda, u64 ldb, u64 ldc)
{
    float *c = (float *)fake_translate(to, 4 * ((m - 1) * ldc + (u64)n), 0);
    char *a = fake_translate(left, (u64)m * lda, 0), *b = fake_translate(right, (u64)n * ldb, 0);
    if (!a || !b || !c) return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0.f;
            for (int p = 0; p + (int)short_k < k; p++)
                sum += element(a + (u64)i * lda, (u64)p) * element(b + (u64)j * ldb, (u64)p);
            c[(u64)i * ldc + (u64)j] = sum;
        }
    return CUDA_SUCCESS;
}

RUN(run_triton)
{
    if (AS(u64, 11) || AS(u64, 12)) return CUDA_ERROR_INVALID_VALUE;
    return portable(AS(u64, 0), AS(u64, 1), AS(u64, 2), AS(int, 3), AS(int, 4), AS(int, 5), 16 * AS(u64, 6),
                    16 * AS(u64, 7), 4 * AS(u64, 8));
}

// A tensor map's first word is its address here (cuTensorMapEncodeTiled of the fake).
RUN(run_groups)
{
    if (AS(int, 1) != AS(int, 6) || AS(int, 7) != AS(int, 12) || AS(u64, 4) != 1 || AS(u64, 9) != 1) // m, k, unit strides
        return CUDA_ERROR_INVALID_VALUE;
    return portable(AS(u64, 0), AS(u64, 5), AS(u64, 10), AS(int, 1), AS(int, 2), AS(int, 7), 2 * AS(u64, 8),
                    2 * AS(u64, 13), AS(u64, 3));
}

// copy_fragments of fragments.py with one array and 64-bit indices, as its documentation says.
static u64 lost; // fragments too few, for tests that must notice
void fragments_lost(unsigned long long count) { lost = count; }

RUN(run_fragments)
{
    int count = AS(int, 6);
    u64 bytes = 16 * (u64)AS(int, 7);
    if (AS(u64, 10) || AS(u64, 11)) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i + (int)lost < count; i++) {
        int64_t *to = (int64_t *)fake_translate(AS(u64, 4) + 8 * (u64)i, 8, 0);
        int64_t *from = (int64_t *)fake_translate(AS(u64, 5) + 8 * (u64)i, 8, 0);
        if (!to || !from) return CUDA_ERROR_ILLEGAL_ADDRESS;
        if (*to < 0 || *from < 0) continue;
        void *dst = fake_translate(AS(u64, 0) + 16 * (u64)AS(int64_t, 8) * (u64)*to, bytes, 0);
        void *src = fake_translate(AS(u64, 2) + 16 * (u64)AS(int64_t, 9) * (u64)*from, bytes, 0);
        if (!dst || !src) return CUDA_ERROR_ILLEGAL_ADDRESS;
        memcpy(dst, src, bytes);
    }
    return CUDA_SUCCESS;
}

#define SIZES {8, 8, 8, 4, 4, 4, 8, 8, 8, 4, 4}
#define AT(name) {"kvbench_gemm_" #name, 11, SIZES, run_##name}
static const Kernel KERNELS[] = {
    AT(naive_64_d1), AT(naive_64_d3), AT(aware_64_d1), AT(aware_64_d2), AT(aware_64_d4), AT(aware_128_d1), AT(naive_128_d3),
    AT(naive_256_d1),
    {"copy_fragments", 12, {8, 8, 8, 8, 8, 8, 4, 4, 8, 8, 8, 8}, run_fragments},
    {"gemm_naive", 13, {8, 8, 8, 4, 4, 4, 8, 8, 8, 4, 4, 8, 8}, run_triton},
    {"gemm_aware", 13, {8, 8, 8, 4, 4, 4, 8, 8, 8, 4, 4, 8, 8}, run_triton},
    {"gemm_groups", 21, {8, 4, 4, 8, 8, 8, 4, 4, 8, 8, 8, 4, 4, 8, 8, 4, 4, 4, 4, 8, 8}, run_groups},
};

const Kernel *gemm_kernel(const char *name)
{
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (!strcmp(KERNELS[i].name, name)) return &KERNELS[i];
    return NULL;
}
