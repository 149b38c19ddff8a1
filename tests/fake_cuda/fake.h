/* A small libcuda for tests: real signatures, no device. Device addresses are reserved but not readable, so code that
 * takes one for a host address crashes here as it would be wrong there. One lock guards everything. */
#ifndef FAKE_H
#define FAKE_H

#define __CUDA_API_VERSION_INTERNAL /* declares every version of every entry point under its own name */
#include <cuda.h>
#include <cudaTypedefs.h>
#if CUDA_VERSION < 13000
#error "fake_cuda needs cuda.h of CUDA 13.0 or later"
#endif
#include <pthread.h>
#include <stdint.h>

#define FAKE_DEVICES 8

/* Settings, by name through fake_set; the defaults are in core.c. */
typedef struct {
    int64_t devices, driver_version, total_bytes, pin_limit, die_limit, depth, alias_differs, managed, l2_bytes, sms, numa_node,
        compute_major, compute_minor, granularity, registered_attribute, shared_optin;
    int64_t virtual_time, op_ns, byte_ps, record_ns, event_quantum_ns; /* virtual_time 0: events read the host clock */
    int64_t pause; /* streams take nothing from their queues */
} Settings;
extern Settings fake_settings;

typedef struct {
    int refs, ordinal;
    uint64_t life; /* raised when the last reference goes: older handles are dead */
    CUresult sticky;
} Context;

enum { DEVICE = 1, HOSTALLOC, REGISTERED, MANAGED, KINDS };
typedef struct Range {
    int kind;
    uint64_t dptr, id;   /* dptr: what the device is given */
    char *host;          /* where the bytes are; for REGISTERED the caller's memory */
    size_t size, mapped; /* mapped: bytes to unmap */
    unsigned flags;
    Context *ctx;
    struct Range *next;
} Range;

typedef struct Event {
    Context *ctx;
    unsigned flags;
    uint64_t asked, done; /* records submitted and executed */
    uint64_t ns;
    struct Event *next;
} Event;

#define MAX_PARAMS 24
typedef struct Kernel {
    const char *name;
    int params, sizes[MAX_PARAMS];
    CUresult (*run)(void **params, const unsigned *grid, const unsigned *block, Context *ctx);
} Kernel;

enum { OP_COPY = 1, OP_SET8, OP_SET32, OP_RECORD, OP_WAIT, OP_KERNEL };
typedef struct Op {
    int kind;
    uint64_t dst, src, bytes, value; /* addresses as the device sees them; src 0: staged */
    char *staged, *host_dst;
    Event *event;
    const Kernel *kernel;
    unsigned grid[3], block[3];
    uint64_t params[MAX_PARAMS];
    struct Op *next;
} Op;

typedef struct Stream {
    Context *ctx;
    unsigned flags;
    int quit;
    uint64_t submitted, done, now; /* now: virtual nanoseconds */
    Op *head, *tail;
    pthread_t thread;
    struct Stream *next;
} Stream;

enum { FREELY = 0, AFTER_INIT = 1, IN_CONTEXT = 2 };

extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_changed;
extern int fake_stopping;

/* Begin a call: trace it, apply an armed fault, check initialisation, context and sticky errors. On success the lock is
 * held until fake_leave. A release call that is told to fail still releases, as the real ones do when they report an
 * error of earlier work; with keep set it does not. */
CUresult fake_enter(const char *name, int need, uint64_t a, uint64_t b, uint64_t c, uint64_t d);
CUresult fake_enter_release(const char *name, int need, uint64_t a, uint64_t b, CUresult *forced);
CUresult fake_leave(CUresult result);
Context *fake_context(void); /* of the calling thread; only inside a call made IN_CONTEXT */
void fake_count(const char *what, int change);

#define ENTER(need, a, b, c, d)                                                                                        \
    do {                                                                                                               \
        CUresult entered_ = fake_enter(__func__, need, (uint64_t)(a), (uint64_t)(b), (uint64_t)(c), (uint64_t)(d));    \
        if (entered_) return entered_;                                                                                 \
    } while (0)
#define RELEASE(need, a, b)                                                                                            \
    CUresult forced;                                                                                                   \
    do {                                                                                                               \
        CUresult entered_ = fake_enter_release(__func__, need, (uint64_t)(a), (uint64_t)(b), &forced);                 \
        if (entered_) return entered_;                                                                                 \
    } while (0)

/* memory.c: where `bytes` at a device address are; NULL when not all of them are there. `copying` also accepts the host
 * address of page-locked memory, as the copy calls do. */
char *fake_translate(uint64_t address, size_t bytes, int copying);
int fake_known(uint64_t address); /* 1: page-locked, device or reserved memory; 0: pageable */
void fake_memory_reset(void);

/* stream.c */
CUresult fake_submit(CUstream stream, const Op *op); /* queue a copy of op */
void fake_drain(Context *ctx); /* wait for every stream of a context */
void fake_streams_reset(void);

/* graph.c */
void fake_graphs_reset(void);

/* kernels.c */
const Kernel *fake_kernel(const char *name);
void fake_modules_reset(void);

#endif
