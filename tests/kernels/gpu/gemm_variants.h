// The forms of gemm.cu that run on the host: both loop orders, small and full tiles, depths 1 to 4.
#define TILE_N TILE_M
#define TILE_K TILE_M
#define TILE_M 64
#define PER_M 4
#define PER_N4 1
#define AWARE 0
#define ENTRY kvbench_gemm_naive_64_d1
#define DEPTH 1
#include "gemm.cu"
#undef ENTRY
#undef DEPTH
#define ENTRY kvbench_gemm_naive_64_d3
#define DEPTH 3
#include "gemm.cu"
#undef ENTRY
#undef DEPTH
#undef AWARE
#define AWARE 1
#define ENTRY kvbench_gemm_aware_64_d1
#define DEPTH 1
#include "gemm.cu"
#undef ENTRY
#undef DEPTH
#define ENTRY kvbench_gemm_aware_64_d2
#define DEPTH 2
#include "gemm.cu"
#undef ENTRY
#undef DEPTH
#define ENTRY kvbench_gemm_aware_64_d4
#define DEPTH 4
#include "gemm.cu"
#undef ENTRY
#undef DEPTH
#undef TILE_M
#undef TILE_N
#undef PER_M
#undef PER_N4
#define TILE_M 128
#define TILE_N 128
#define PER_M 8
#define PER_N4 2
#define ENTRY kvbench_gemm_aware_128_d1
#define DEPTH 1
#include "gemm.cu"
#undef ENTRY
#undef DEPTH
#undef AWARE
#define AWARE 0
#define ENTRY kvbench_gemm_naive_128_d3
#define DEPTH 3
#include "gemm.cu"
#undef ENTRY
#undef DEPTH
#define DEPTH 1
#undef TILE_M
#undef TILE_K
#undef PER_M
#undef AWARE
#define AWARE 0
#define TILE_M 256
#define TILE_K 128
#define PER_M 16
#define ENTRY kvbench_gemm_naive_256_d1
#include "gemm.cu"
#undef ENTRY
#undef DEPTH
