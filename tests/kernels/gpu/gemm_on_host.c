// gemm.cu on the host for ctypes: a whole grid, and the arithmetic of its units alone.
#include "gemm_variants.h"

typedef void Entry(float *, const float *, const float *, int, int, int, u64, u64, u64, int, int);
static const struct {
    const char *name;
    Entry *run;
} ENTRIES[] = {
#define AT(name) {#name, name}
    AT(kvbench_gemm_naive_64_d1),  AT(kvbench_gemm_naive_64_d3),  AT(kvbench_gemm_aware_64_d1),
    AT(kvbench_gemm_aware_64_d2),  AT(kvbench_gemm_aware_64_d4),  AT(kvbench_gemm_aware_128_d1),
    AT(kvbench_gemm_naive_128_d3), AT(kvbench_gemm_naive_256_d1),
};

// Runs `name` by `blocks` blocks; counts the reads of each 16 bytes of b in `reads`. Returns how many, or -1.
long long gemm(const char *name, unsigned blocks, float *c, const float *a, const float *b, int m, int n, int k, u64 lda,
               u64 ldb, u64 ldc, int split, int raster, unsigned *reads, int at_once, int fault)
{
    far_begin = b, far_end = b + (u64)k * ldb, far_reads = reads, far_vectors = outside = 0;
    eager = at_once, wrong_wait = fault;
    begin_ = end_ = open_group = 0;
    for (u64 i = 0; i < SHARED_FLOATS; i++) shared_memory[i] = NAN;
    for (u64 e = 0; e < sizeof ENTRIES / sizeof *ENTRIES; e++) {
        if (strcmp(ENTRIES[e].name, name)) continue;
        gridDim.x = blocks;
        for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
            ENTRIES[e].run(c, a, b, m, n, k, lda, ldb, ldc, split, raster);
        return outside ? -2 : (long long)far_vectors;
    }
    return -1;
}

void place(u64 i, u64 rows, u64 columns, int raster, u64 *out) { tile_at(i, rows, columns, raster, &out[0], &out[1]); }

// The runs of every block: quadruples (block, column, begin, stop). Returns how many.
u64 runs(u64 blocks, u64 rows, u64 columns, u64 split, u64 *out)
{
    u64 count = 0;
    for (u64 b = 0; b < blocks; b++)
        for (u64 unit = first_unit(b, blocks, columns * split), end = first_unit(b + 1, blocks, columns * split); unit < end;) {
            u64 *to = out + 4 * count++;
            to[0] = b;
            unit = run_at(unit, end, rows, split, &to[1], &to[2], &to[3]);
        }
    return count;
}
