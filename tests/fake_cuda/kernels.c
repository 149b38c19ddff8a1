/* The kernels of kvbench/kernels/cuda, compiled as C and run thread after thread; modules that name them. */
#define _GNU_SOURCE
#include "fake.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct {
    unsigned x, y, z;
} Dim;
static __thread Dim gridDim, blockDim, blockIdx, threadIdx;
static __thread Context *running;
#define KV_KERNEL static
#define KV_DEVICE static inline

KV_DEVICE u64 kv_now(void) {
    struct timespec t;
    if (fake_stopping || (running && running->sticky)) return 1ull << 62; /* whoever waits for a time gives up */
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}
KV_DEVICE void kv_pause(void) { nanosleep(&(struct timespec){0, 20000}, NULL); }
KV_DEVICE void kv_add(u64 *to, u64 value) { *to += value; }

#include "service.cu"

#define AS(type, i) (*(type *)params[i])
#define POINTER(name, i, bytes)                                                                                        \
    if (AS(u64, i) % 8) return CUDA_ERROR_MISALIGNED_ADDRESS;                                                          \
    u64 *name = (u64 *)fake_translate(AS(u64, i), (bytes), 0);                                                         \
    if (!name) return CUDA_ERROR_ILLEGAL_ADDRESS
#define EACH_THREAD                                                                                                    \
    gridDim = (Dim){grid[0], 1, 1}, blockDim = (Dim){block[0], 1, 1};                                                  \
    for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++)                                                           \
        for (threadIdx.x = 0; threadIdx.x < block[0]; threadIdx.x++)
#define RUN(name) static CUresult name(void **params, const unsigned *grid, const unsigned *block, Context *ctx)

RUN(run_block) {
    u32 *go = (u32 *)fake_translate(AS(u64, 0), 4, 0), *late = (u32 *)fake_translate(AS(u64, 1), 4, 0);
    if (!go || !late || grid[0] != 1 || block[0] != 1) return CUDA_ERROR_ILLEGAL_ADDRESS;
    running = ctx;
    pthread_mutex_unlock(&fake_lock); /* others go on while it spins */
    kv_block(go, late, AS(u32, 2), AS(u64, 3));
    pthread_mutex_lock(&fake_lock);
    return CUDA_SUCCESS;
}

RUN(run_flush) {
    POINTER(buffer, 0, 8 * AS(u64, 1));
    EACH_THREAD kv_flush(buffer, AS(u64, 1), AS(u64, 2));
    return CUDA_SUCCESS;
}

RUN(run_fill) {
    POINTER(out, 0, AS(u64, 1));
    POINTER(base, 2, 8 * KV_WORDS);
    EACH_THREAD kv_fill(out, AS(u64, 1), base, AS(u64, 3), AS(u64, 4));
    return CUDA_SUCCESS;
}

RUN(run_checksum) {
    POINTER(data, 0, AS(u64, 1));
    POINTER(weights, 2, 8 * KV_WORDS);
    POINTER(sums, 3, (AS(u64, 1) + 8 * KV_WORDS - 1) / (8 * KV_WORDS) * 8);
    EACH_THREAD kv_checksum(data, AS(u64, 1), weights, sums);
    return CUDA_SUCCESS;
}

RUN(run_checksum_end) {
    POINTER(sums, 0, 8 * AS(u64, 1));
    POINTER(total, 2, 8);
    EACH_THREAD kv_checksum_end(sums, AS(u64, 1), total);
    return CUDA_SUCCESS;
}

static const Kernel KERNELS[] = {
    {"kv_block", 4, {8, 8, 4, 8}, run_block},
    {"kv_flush", 3, {8, 8, 8}, run_flush},
    {"kv_fill", 5, {8, 8, 8, 8, 8}, run_fill},
    {"kv_checksum", 4, {8, 8, 8, 8}, run_checksum},
    {"kv_checksum_end", 3, {8, 8, 8}, run_checksum_end},
};

const Kernel *fake_kernel(const char *name) {
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (!strcmp(KERNELS[i].name, name)) return &KERNELS[i];
    return NULL;
}

/* -- modules --------------------------------------------------------------------------------------------------------- */

/* An image is a cubin, or for tests without a compiler the text "FAKE" followed by the names of its kernels. */
typedef struct Module {
    char *image;
    size_t bytes;
    int loaded;
    struct Module *next;
} Module;
static Module *modules;

static size_t extent(const void *image) {
    const Elf64_Ehdr *elf = image;
    if (!memcmp(image, "FAKE", 4)) return strlen(image);
    if (memcmp(image, ELFMAG, SELFMAG)) return 0;
    size_t sections = elf->e_shoff + (size_t)elf->e_shnum * elf->e_shentsize;
    size_t segments = elf->e_phoff + (size_t)elf->e_phnum * elf->e_phentsize;
    return sections > segments ? sections : segments;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    ENTER(IN_CONTEXT, image, 0, 0, 0);
    size_t bytes = extent(image);
    if (!bytes) return fake_leave(CUDA_ERROR_INVALID_IMAGE);
    Module *m = calloc(1, sizeof *m);
    *m = (Module){.image = malloc(bytes), .bytes = bytes, .loaded = 1, .next = modules};
    memcpy(m->image, image, bytes);
    modules = m;
    fake_count("modules", 1);
    *module = (CUmodule)m;
    return fake_leave(CUDA_SUCCESS);
}

static Module *find(CUmodule module) {
    Module *m = modules;
    while (m && !((CUmodule)m == module && m->loaded)) m = m->next;
    return m;
}

CUresult cuModuleUnload(CUmodule module) {
    RELEASE(IN_CONTEXT, module, 0);
    Module *m = find(module);
    if (!m) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    m->loaded = 0;
    fake_count("modules", -1);
    return fake_leave(forced);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER(IN_CONTEXT, module, 0, 0, 0);
    Module *m = find(module);
    if (!m) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    const Kernel *kernel = fake_kernel(name);
    if (!kernel || !memmem(m->image, m->bytes, name, strlen(name))) return fake_leave(CUDA_ERROR_NOT_FOUND);
    *function = (CUfunction)kernel;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    ENTER(IN_CONTEXT, attribute, function, 0, 0);
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *value = 1024;
    return fake_leave(CUDA_SUCCESS);
}

/* Beyond 48 KiB a block has what its kernel was given here, up to what the device reports. */
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    ENTER(IN_CONTEXT, function, attribute, value, 0);
    if (!function) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || value > fake_settings.shared_optin)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    return fake_leave(CUDA_SUCCESS);
}

/* The map is what was asked for, word by word: address, type, rank, two sizes, a pitch, two box sizes. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *pitches, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    ENTER(IN_CONTEXT, map, type, rank, address);
    if ((uintptr_t)map % 64 || (uintptr_t)address % 16 || rank != 2 || interleave || !steps || steps[0] != 1 || steps[1] != 1)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (!dims[0] || !dims[1] || pitches[0] % 16 || !box[0] || !box[1] || box[0] > 256 || box[1] > 256)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *map = (CUtensorMap){.opaque = {(uint64_t)(uintptr_t)address, type, rank, dims[0], dims[1], pitches[0], box[0], box[1],
                                    swizzle, promotion, fill}};
    return fake_leave(CUDA_SUCCESS);
}

void fake_modules_reset(void) {
    while (modules) {
        Module *m = modules;
        modules = m->next;
        free(m->image);
        free(m);
    }
}
