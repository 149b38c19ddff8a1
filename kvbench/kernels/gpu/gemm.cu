// C = A B in float32 by fused multiply-adds, without matrix instructions, B in any memory the device reads.
//
// Two loop orders. Naive: a block keeps a tile of C and walks K, so each tile row of C reads all of B again. CPU-aware:
// a block keeps a tile of B in shared memory and walks a run of tiles of M, so C is read and written once a step of K
// (DirectKV, OSDI 2026, 2.3). All arrays are row-major, rows padded to 4 elements, padding finite. The file is C as well
// as CUDA C++: what a block does stands in phases that the host runs thread after thread.
//
// Compiled in: TILE_M, TILE_N, TILE_K, PER_M rows and 4 * PER_N4 columns a thread, DEPTH stages, AWARE, ENTRY.

#ifndef ENTRY
#define ENTRY kvbench_gemm
#define TILE_M 128
#define TILE_N 128
#define TILE_K 128
#define PER_M 8
#define PER_N4 2
#define DEPTH 1
#define AWARE 0
#endif

#define CHUNK 16 // of K in one step of the multiply-adds
#define PITCH 20 // floats between rows of A in shared memory: neighbouring rows lie in other banks
#define TX (TILE_N / (4 * PER_N4))
#define THREADS (TX * (TILE_M / PER_M))
#define TY (TILE_M / PER_M)
#define HELD (TILE_M * CHUNK / 4 / THREADS)
#if PER_M > 8 // sums take half of the registers: no room for rows of A by fours
#define LEFT 2
#define left_t float2
#define PICK(v, q) ((q) == 0 ? (v).x : (v).y)
#else
#define LEFT 4
#define left_t float4
#define PICK(v, q) ((q) == 0 ? (v).x : (q) == 1 ? (v).y : (q) == 2 ? (v).z : (v).w)
#endif

#ifndef KVBENCH_GEMM_PARTS
#define KVBENCH_GEMM_PARTS
typedef unsigned long long u64;

#ifdef __CUDACC__
#define PART static __device__ __forceinline__
#define SHARED extern __shared__ __align__(16) float shared[]
#define EACH_THREAD for (unsigned t = threadIdx.x, once = 1; once; once = 0)
#define OWN(type, name, rows, columns) type name[rows][columns]
#define MINE(name) name
#define BARRIER() __syncthreads()
#if __CUDA_ARCH__ >= 800
// Zero bytes of source are zeros in the target: nothing beyond the arrays is read.
PART void copy16(float *to, const float *from, int wanted)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(to), bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
#define COMMIT() asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(left) asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory")
#else
PART void copy16(float *to, const float *from, int wanted)
{
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (wanted) v = *(const float4 *)from;
    *(float4 *)to = v;
}
#define COMMIT()
#define WAIT(left)
#endif
PART float4 load16f(const float *from, int wanted)
{
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (wanted) v = *(const float4 *)from;
    return v;
}
PART void store16f(float *to, float4 v)
{
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
#define KERNEL_OF(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#else
#include "gemm_on_host.h"
#endif

// Where tile `i` of C lies. raster 0: M fastest, 1: N fastest, 2: bands of 8 tile rows, M fastest inside.
PART void tile_at(u64 i, u64 rows, u64 columns, int raster, u64 *row, u64 *column)
{
    if (raster == 0) {
        *row = i % rows, *column = i / rows;
    } else if (raster == 1) {
        *row = i / columns, *column = i % columns;
    } else {
        u64 band = i / (8 * columns), first = 8 * band, inside = i % (8 * columns);
        u64 high = rows - first < 8 ? rows - first : 8;
        *row = first + inside % high, *column = inside / high;
    }
}

// The first of the contiguous units of block `b` of `blocks`; block b ends where b + 1 begins.
PART u64 first_unit(u64 b, u64 blocks, u64 units) { return b * units / blocks; }

// The part of units [unit, end) in one column of tiles: rows [*begin, *stop) of column *column. Returns the next unit.
PART u64 run_at(u64 unit, u64 end, u64 rows, u64 split, u64 *column, u64 *begin, u64 *stop)
{
    u64 col = unit / split, last = (col + 1) * split;
    if (last > end) last = end;
    *column = col;
    *begin = (unit - col * split) * rows / split;
    *stop = (last - col * split) * rows / split;
    return last;
}
#endif

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(part) JOIN(ENTRY, part)

// One step of CHUNK of K: thread t adds the products of its rows of `a` and columns of `b`.
PART void NAME(multiply)(unsigned t, const float *a, const float *b, float4 (*sum)[PER_N4])
{
    const unsigned tx = t % TX, ty = t / TX;
#pragma unroll
    for (int k = 0; k < CHUNK; k += LEFT) {
        left_t left[PER_M];
#pragma unroll
        for (int i = 0; i < PER_M; i++) left[i] = *(const left_t *)&a[(ty + TY * i) * PITCH + k];
#pragma unroll
        for (int q = 0; q < LEFT; q++) {
            float4 right[PER_N4];
#pragma unroll
            for (int j = 0; j < PER_N4; j++) right[j] = *(const float4 *)&b[(k + q) * TILE_N + 4 * tx + 4 * TX * j];
#pragma unroll
            for (int i = 0; i < PER_M; i++) {
                const float x = PICK(left[i], q);
#pragma unroll
                for (int j = 0; j < PER_N4; j++) {
                    sum[i][j].x += x * right[j].x;
                    sum[i][j].y += x * right[j].y;
                    sum[i][j].z += x * right[j].z;
                    sum[i][j].w += x * right[j].w;
                }
            }
        }
    }
}

// Rows [row, row + count) of B, columns [column, column + TILE_N), into `to`; what lies outside B is zero.
PART void NAME(far)(unsigned t, float *to, const float *b, u64 row, int count, u64 column, u64 k, u64 n, u64 ldb)
{
#pragma unroll 4
    for (int v = (int)t; v < count * (TILE_N / 4); v += THREADS) {
        const u64 r = row + v / (TILE_N / 4), c = column + 4 * (v % (TILE_N / 4));
        const int inside = r < k && c < n;
        copy16(&to[4 * v], inside ? b + r * ldb + c : b, inside);
    }
}

PART int NAME(at)(unsigned t, u64 row, u64 column, int i, int j, u64 m, u64 n, u64 ldc, u64 *place)
{
    const u64 r = row + t / TX + TY * i, c = column + 4 * (t % TX) + 4 * TX * j;
    *place = r * ldc + c;
    return r < m && c < n;
}

PART void NAME(zero)(float4 (*sum)[PER_N4])
{
#pragma unroll
    for (int i = 0; i < PER_M; i++)
#pragma unroll
        for (int j = 0; j < PER_N4; j++) sum[i][j].x = sum[i][j].y = sum[i][j].z = sum[i][j].w = 0.f;
}

PART void NAME(store)(unsigned t, float4 (*sum)[PER_N4], float *c, u64 row, u64 column, u64 m, u64 n, u64 ldc)
{
    u64 place;
#pragma unroll
    for (int i = 0; i < PER_M; i++)
#pragma unroll
        for (int j = 0; j < PER_N4; j++)
            if (NAME(at)(t, row, column, i, j, m, n, ldc, &place)) store16f(&c[place], sum[i][j]);
}

#if AWARE
// One column of tiles, rows [begin, stop) of tiles: every tile of B in it is read from far once.
PART void NAME(column)(float *shared, float *c, const float *a, const float *b, u64 m, u64 n, u64 k, u64 lda, u64 ldb,
                       u64 ldc, u64 column, u64 begin, u64 stop)
{
    const unsigned steps = (unsigned)((k + TILE_K - 1) / TILE_K), rows = (unsigned)(stop - begin);
    float *near = shared + DEPTH * TILE_K * TILE_N;
    OWN(float4, sum, PER_M, PER_N4);
    OWN(float4, held, HELD, 1);
#if DEPTH > 1
    for (unsigned step = 0; step < DEPTH - 1; step++) {
        if (step < steps)
            EACH_THREAD NAME(far)(t, shared + step % DEPTH * TILE_K * TILE_N, b, (u64)step * TILE_K, TILE_K, column, k, n, ldb);
        COMMIT();
    }
#endif
    for (unsigned step = 0; step < steps; step++) {
        const unsigned ahead = step + DEPTH - 1;
        const u64 first = (u64)step * TILE_K;
#if DEPTH > 1
        WAIT(DEPTH - 2);
        BARRIER(); // this step's tile is there for all, and nobody uses the last one's any more
#else
        BARRIER();
#endif
        if (ahead < steps)
            EACH_THREAD NAME(far)(t, shared + ahead % DEPTH * TILE_K * TILE_N, b, (u64)ahead * TILE_K, TILE_K, column, k, n, ldb);
        COMMIT();
#if DEPTH == 1
        WAIT(0);
        BARRIER();
#endif
        const float *tile = shared + step % DEPTH * TILE_K * TILE_N;
        const unsigned chunks = (unsigned)(((k - first < TILE_K ? k - first : TILE_K) + CHUNK - 1) / CHUNK);
        // Chunk (row, chunk) of A is on its way into registers while the one before, (last_row, last), is multiplied.
        // Counted on, not divided: a 64-bit division is as long as a third of the products.
        unsigned row = 0, chunk = 0, last_row = 0, last = 0, side = 0, any = 0;
        do {
            if (row < rows)
                EACH_THREAD {
#pragma unroll
                    for (int v = 0; v < HELD; v++) {
                        const u64 r = (begin + row) * TILE_M + (v * THREADS + t) / 4;
                        const u64 x = first + chunk * CHUNK + 4 * (t % 4);
                        const int inside = r < m && x < k;
                        MINE(held)[v][0] = load16f(inside ? a + r * lda + x : a, inside);
                    }
                }
            if (any) {
                const u64 at = (begin + last_row) * TILE_M;
                EACH_THREAD {
                    if (!last) {
                        NAME(zero)(MINE(sum));
                        u64 place;
                        if (step) {
#pragma unroll
                            for (int i = 0; i < PER_M; i++)
#pragma unroll
                                for (int j = 0; j < PER_N4; j++) {
                                    const int inside = NAME(at)(t, at, column, i, j, m, n, ldc, &place);
                                    MINE(sum)[i][j] = load16f(inside ? c + place : c, inside);
                                }
                        }
                    }
                    NAME(multiply)(t, near + (side ^ 1) * TILE_M * PITCH, tile + last * CHUNK * TILE_N, MINE(sum));
                    if (last + 1 == chunks) NAME(store)(t, MINE(sum), c, at, column, m, n, ldc);
                }
            }
            any = row < rows;
            if (any) {
                EACH_THREAD {
#pragma unroll
                    for (int v = 0; v < HELD; v++)
                        *(float4 *)&near[side * TILE_M * PITCH + (v * THREADS + t) / 4 * PITCH + 4 * (t % 4)] =
                            MINE(held)[v][0];
                }
                last_row = row, last = chunk, side ^= 1;
                if (++chunk == chunks) chunk = 0, row++;
            }
            BARRIER();
        } while (any);
    }
    WAIT(0);
    BARRIER(); // the next column's tiles may come
}
#else
// One tile of C: K in steps of CHUNK, DEPTH of them under way.
PART void NAME(load)(float *stage, const float *a, const float *b, u64 m, u64 n, u64 k, u64 lda, u64 ldb, u64 row,
                     u64 column, u64 at)
{
    EACH_THREAD {
#pragma unroll
        for (int v = 0; v < HELD; v++) {
            const unsigned s = v * THREADS + t;
            const u64 r = row + s / 4, x = at + 4 * (s % 4);
            const int inside = r < m && x < k;
            copy16(&stage[s / 4 * PITCH + 4 * (s % 4)], inside ? a + r * lda + x : a, inside);
        }
        NAME(far)(t, stage + TILE_M * PITCH, b, at, CHUNK, column, k, n, ldb);
    }
}

#define STAGE (TILE_M * PITCH + CHUNK * TILE_N)
PART void NAME(tile)(float *shared, float *c, const float *a, const float *b, u64 m, u64 n, u64 k, u64 lda, u64 ldb,
                     u64 ldc, u64 row, u64 column)
{
    const unsigned chunks = (unsigned)((k + CHUNK - 1) / CHUNK);
    OWN(float4, sum, PER_M, PER_N4);
    EACH_THREAD NAME(zero)(MINE(sum));
    for (unsigned s = 0; s + 1 < DEPTH; s++) {
        if (s < chunks) NAME(load)(shared + s * STAGE, a, b, m, n, k, lda, ldb, row, column, (u64)s * CHUNK);
        COMMIT();
    }
    for (unsigned s = 0; s < chunks; s++) {
        const unsigned ahead = s + DEPTH - 1;
#if DEPTH > 1
        WAIT(DEPTH - 2);
        BARRIER();
#endif
        if (ahead < chunks) NAME(load)(shared + ahead % DEPTH * STAGE, a, b, m, n, k, lda, ldb, row, column, (u64)ahead * CHUNK);
        COMMIT();
#if DEPTH == 1
        WAIT(0);
        BARRIER();
#endif
        const float *stage = shared + s % DEPTH * STAGE;
        EACH_THREAD NAME(multiply)(t, stage, stage + TILE_M * PITCH, MINE(sum));
#if DEPTH == 1
        BARRIER();
#endif
    }
    EACH_THREAD NAME(store)(t, MINE(sum), c, row, column, m, n, ldc);
    WAIT(0);
    BARRIER(); // the next tile's stages may come
}
#undef STAGE
#endif

// c [m, ldc], a [m, lda], b [k, ldb]; m, n, k at least 1. split: parts a column of tiles is cut into, 1 to the rows of
// tiles (CPU-aware); raster: the order of the tiles (naive). Any grid, blocks of exactly THREADS.
KERNEL_OF(THREADS) ENTRY(float *c, const float *a, const float *b, int m, int n, int k, u64 lda, u64 ldb, u64 ldc,
                         int split, int raster)
{
    SHARED;
    const u64 rows = ((u64)m + TILE_M - 1) / TILE_M, columns = ((u64)n + TILE_N - 1) / TILE_N;
#if AWARE
    const u64 units = columns * (u64)split, end = first_unit(blockIdx.x + 1ull, gridDim.x, units);
    for (u64 unit = first_unit(blockIdx.x, gridDim.x, units); unit < end;) {
        u64 column, begin, stop;
        unit = run_at(unit, end, rows, (u64)split, &column, &begin, &stop);
        NAME(column)(shared, c, a, b, (u64)m, (u64)n, (u64)k, lda, ldb, ldc, column * TILE_N, begin, stop);
    }
#else
    for (u64 i = blockIdx.x; i < rows * columns; i += gridDim.x) {
        u64 row, column;
        tile_at(i, rows, columns, raster, &row, &column);
        NAME(tile)(shared, c, a, b, (u64)m, (u64)n, (u64)k, lda, ldb, ldc, row * TILE_M, column * TILE_N);
    }
#endif
}
#undef CHUNK
#undef PITCH
#undef TX
#undef TY
#undef THREADS
#undef HELD
#undef LEFT
#undef left_t
#undef PICK
#undef JOIN
#undef JOIN_
#undef NAME
