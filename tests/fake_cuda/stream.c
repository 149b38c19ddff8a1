/* Streams that run behind the caller's back, one thread each, and the events, copies and launches they carry out. */
#define _GNU_SOURCE
#include "fake.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static Stream *streams, *defaults[FAKE_DEVICES];
static Event *events;
static struct {
    int64_t left;
    CUresult code;
} op_fault;

void fake_fail_op(int64_t k, CUresult code) { /* the k-th operation a stream executes from now on breaks its context */
    pthread_mutex_lock(&fake_lock);
    op_fault.left = k, op_fault.code = code;
    pthread_mutex_unlock(&fake_lock);
}

static uint64_t host_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void spend(Stream *s, uint64_t bytes) {
    s->now += (uint64_t)(fake_settings.op_ns + (int64_t)bytes * fake_settings.byte_ps / 1000);
}

static CUresult copy(Stream *s, Op *op) {
    char *to = op->host_dst ? op->host_dst : fake_translate(op->dst, op->bytes, 1);
    char *from = op->staged ? op->staged : fake_translate(op->src, op->bytes, 1);
    if (!to || !from) return CUDA_ERROR_ILLEGAL_ADDRESS; /* freed or unmapped after it was submitted */
    memmove(to, from, op->bytes);
    spend(s, op->bytes);
    return CUDA_SUCCESS;
}

static CUresult set(Stream *s, Op *op) {
    char *to = fake_translate(op->dst, op->bytes, 1);
    if (!to) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (op->kind == OP_SET8) memset(to, (int)op->value, op->bytes);
    else
        for (size_t i = 0; i < op->bytes / 4; i++) memcpy(to + 4 * i, &op->value, 4);
    spend(s, op->bytes);
    return CUDA_SUCCESS;
}

static void record(Stream *s, Op *op) {
    s->now += (uint64_t)fake_settings.record_ns;
    uint64_t ns = fake_settings.virtual_time ? s->now : host_ns();
    op->event->ns = ns - ns % (uint64_t)fake_settings.event_quantum_ns;
    op->event->done = op->value;
}

static CUresult execute(Stream *s, Op *op) {
    if (op_fault.left && !--op_fault.left) return op_fault.code;
    void *params[MAX_PARAMS];
    switch (op->kind) {
    case OP_COPY: return copy(s, op);
    case OP_SET8:
    case OP_SET32: return set(s, op);
    case OP_RECORD: record(s, op); return CUDA_SUCCESS;
    case OP_WAIT:
        while (op->event->done < op->value && !fake_stopping && !s->ctx->sticky)
            pthread_cond_wait(&fake_changed, &fake_lock);
        if (op->event->ns > s->now && fake_settings.virtual_time) s->now = op->event->ns;
        return CUDA_SUCCESS;
    default:
        for (int i = 0; i < MAX_PARAMS; i++) params[i] = &op->params[i];
        CUresult result = op->kernel->run(params, op->grid, op->block, s->ctx);
        spend(s, 0);
        return result;
    }
}

static void *work(void *argument) {
    Stream *s = argument;
    pthread_mutex_lock(&fake_lock);
    for (;;) {
        while (!fake_stopping && (s->head ? fake_settings.pause : !s->quit))
            pthread_cond_wait(&fake_changed, &fake_lock);
        if (fake_stopping || !s->head) break;
        Op *op = s->head;
        /* after an error nothing more runs in the context, and everything waiting comes back with it */
        CUresult result = s->ctx->sticky ? CUDA_SUCCESS : execute(s, op);
        if (result) s->ctx->sticky = result;
        s->head = op->next;
        s->done++;
        free(op->staged);
        free(op);
        pthread_cond_broadcast(&fake_changed);
    }
    pthread_mutex_unlock(&fake_lock);
    return NULL;
}

static Stream *start(unsigned flags) {
    Stream *s = calloc(1, sizeof *s);
    s->ctx = fake_context();
    s->flags = flags;
    if (pthread_create(&s->thread, NULL, work, s)) {
        free(s);
        return NULL;
    }
    s->next = streams;
    streams = s;
    return s;
}

static Stream *find(CUstream handle) {
    if (!handle || handle == CU_STREAM_LEGACY) { /* the legacy default stream, without its waiting for the others */
        Stream **own = &defaults[fake_context()->ordinal];
        if (!*own) *own = start(0);
        return *own;
    }
    for (Stream *s = streams; s; s = s->next)
        if ((CUstream)s == handle && !s->quit && s->ctx == fake_context()) return s;
    return NULL;
}

static Event *find_event(CUevent handle) {
    Event *e = events;
    while (e && (CUevent)e != handle) e = e->next;
    return e && e->ctx ? e : NULL;
}

static CUresult submit(Stream *s, const Op *op) {
    Op *queued = malloc(sizeof *queued);
    /* the real queue holds about 1024 operations; beyond that submission waits for the device */
    while ((int64_t)(s->submitted - s->done) >= fake_settings.depth && !fake_stopping && !s->ctx->sticky)
        pthread_cond_wait(&fake_changed, &fake_lock);
    *queued = *op;
    queued->next = NULL;
    if (s->head) s->tail->next = queued;
    else s->head = queued;
    s->tail = queued;
    s->submitted++;
    pthread_cond_broadcast(&fake_changed);
    return CUDA_SUCCESS;
}

CUresult fake_submit(CUstream stream, const Op *op) {
    Stream *s = find(stream);
    return s ? submit(s, op) : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult finish(Stream *s) {
    uint64_t until = s->submitted;
    while (s->done < until && !fake_stopping) pthread_cond_wait(&fake_changed, &fake_lock);
    return s->ctx->sticky;
}

void fake_drain(Context *ctx) {
    for (Stream *s = streams; s; s = s->next)
        if (s->ctx == ctx) finish(s);
}

void fake_streams_reset(void) {
    while (streams) {
        Stream *s = streams;
        pthread_join(s->thread, NULL);
        streams = s->next;
        while (s->head) {
            Op *op = s->head;
            s->head = op->next;
            free(op->staged);
            free(op);
        }
        free(s);
    }
    while (events) {
        Event *e = events;
        events = e->next;
        free(e);
    }
    memset(defaults, 0, sizeof defaults);
    op_fault.left = 0;
}

/* -- streams and events ---------------------------------------------------------------------------------------------- */

static CUresult create(CUstream *stream, unsigned flags) {
    if (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    Stream *s = start(flags);
    if (!s) return CUDA_ERROR_OUT_OF_MEMORY;
    fake_count("streams", 1);
    *stream = (CUstream)s;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    ENTER(IN_CONTEXT, flags, 0, 0, 0);
    return fake_leave(create(stream, flags));
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    ENTER(IN_CONTEXT, flags, priority, 0, 0);
    return fake_leave(create(stream, flags));
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    RELEASE(IN_CONTEXT, stream, 0);
    Stream *s = stream ? find(stream) : NULL;
    if (!s) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    s->quit = 1;
    fake_count("streams", -1);
    pthread_cond_broadcast(&fake_changed);
    return fake_leave(forced); /* what is queued still runs; the thread is joined at reset */
}

CUresult cuStreamSynchronize(CUstream stream) {
    ENTER(IN_CONTEXT, stream, 0, 0, 0);
    Stream *s = find(stream);
    return fake_leave(s ? finish(s) : CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuStreamQuery(CUstream stream) {
    ENTER(IN_CONTEXT, stream, 0, 0, 0);
    Stream *s = find(stream);
    if (!s) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    return fake_leave(s->done < s->submitted ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *ctx) {
    ENTER(IN_CONTEXT, stream, 0, 0, 0);
    Stream *s = find(stream);
    if (!s) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    *ctx = (CUcontext)s->ctx;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    ENTER(IN_CONTEXT, stream, event, flags, 0);
    Stream *s = find(stream);
    Event *e = find_event(event);
    if (!s || !e) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    Op op = {.kind = OP_WAIT, .event = e, .value = e->asked};
    return fake_leave(submit(s, &op));
}

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    ENTER(IN_CONTEXT, flags, 0, 0, 0);
    Event *e = calloc(1, sizeof *e);
    *e = (Event){.ctx = fake_context(), .flags = flags, .next = events};
    events = e;
    fake_count("events", 1);
    *event = (CUevent)e;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent event) {
    RELEASE(IN_CONTEXT, event, 0);
    Event *e = find_event(event);
    if (!e) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    e->ctx = NULL; /* a record may still be queued: the memory stays until reset */
    fake_count("events", -1);
    return fake_leave(forced);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER(IN_CONTEXT, event, stream, 0, 0);
    Stream *s = find(stream);
    Event *e = find_event(event);
    if (!s || !e) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    Op op = {.kind = OP_RECORD, .event = e, .value = ++e->asked};
    return fake_leave(submit(s, &op));
}

CUresult cuEventQuery(CUevent event) {
    ENTER(IN_CONTEXT, event, 0, 0, 0);
    Event *e = find_event(event);
    if (!e) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    return fake_leave(e->done < e->asked ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

CUresult cuEventSynchronize(CUevent event) {
    ENTER(IN_CONTEXT, event, 0, 0, 0);
    Event *e = find_event(event);
    if (!e) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    Context *ctx = e->ctx;
    uint64_t until = e->asked;
    while (e->done < until && !ctx->sticky && !fake_stopping) pthread_cond_wait(&fake_changed, &fake_lock);
    return fake_leave(ctx->sticky);
}

CUresult cuEventElapsedTime(float *ms, CUevent begin, CUevent end) {
    ENTER(IN_CONTEXT, begin, end, 0, 0);
    Event *a = find_event(begin), *b = find_event(end);
    if (!a || !b || !a->asked || !b->asked || ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING))
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    if (a->done < a->asked || b->done < b->asked) return fake_leave(CUDA_ERROR_NOT_READY);
    *ms = (float)((double)(int64_t)(b->ns - a->ns) / 1e6);
    return fake_leave(CUDA_SUCCESS);
}

/* -- work ------------------------------------------------------------------------------------------------------------ */

/* Page-locked and device memory is read when the operation runs, so a source changed too early is copied changed (T9).
 * Pageable sources are staged now: the call returns before the device has the bytes (T8); pageable targets block. */
static CUresult enqueue_copy(CUstream stream, uint64_t dst, uint64_t src, size_t bytes) {
    Stream *s = find(stream);
    if (!s) return CUDA_ERROR_INVALID_HANDLE;
    if (!bytes) return CUDA_SUCCESS;
    if (!dst || !src) return CUDA_ERROR_INVALID_VALUE;
    Op op = {.kind = OP_COPY, .dst = dst, .src = src, .bytes = bytes};
    if (fake_known(dst) ? !fake_translate(dst, bytes, 1) : 0) return CUDA_ERROR_INVALID_VALUE;
    if (fake_known(src) ? !fake_translate(src, bytes, 1) : 0) return CUDA_ERROR_INVALID_VALUE;
    if (!fake_known(src)) {
        op.staged = malloc(bytes);
        memcpy(op.staged, (void *)src, bytes);
    }
    if (!fake_known(dst)) op.host_dst = (char *)dst;
    CUresult result = submit(s, &op);
    return op.host_dst && !result ? finish(s) : result;
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    ENTER(IN_CONTEXT, dst, src, bytes, stream);
    return fake_leave(enqueue_copy(stream, dst, src, bytes));
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
    ENTER(IN_CONTEXT, dst, src, bytes, stream);
    if (!fake_known(dst)) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    return fake_leave(enqueue_copy(stream, dst, (uint64_t)src, bytes));
}

CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    ENTER(IN_CONTEXT, dst, src, bytes, stream);
    if (!fake_known(src)) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    return fake_leave(enqueue_copy(stream, (uint64_t)dst, src, bytes));
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    ENTER(IN_CONTEXT, dst, src, bytes, stream);
    if (!fake_known(dst) || !fake_known(src)) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    return fake_leave(enqueue_copy(stream, dst, src, bytes));
}

static CUresult batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
                      size_t *indices, size_t n, CUstream stream) {
    if (!stream || stream == CU_STREAM_LEGACY || !count || !n || n > count || indices[0])
        return CUDA_ERROR_INVALID_VALUE; /* "must not be legacy NULL stream"; the first attribute starts at 0 */
    for (size_t i = 0; i < n; i++)
        if (attributes[i].srcAccessOrder < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM ||
            attributes[i].srcAccessOrder > CU_MEMCPY_SRC_ACCESS_ORDER_ANY || (i && indices[i] <= indices[i - 1]))
            return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        CUresult wrong = enqueue_copy(stream, dsts[i], srcs[i], sizes[i]);
        if (wrong) return wrong;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                            CUmemcpyAttributes *attributes, size_t *indices, size_t n, size_t *failed,
                            CUstream stream) {
    ENTER(IN_CONTEXT, count, n, failed, stream);
    if (failed) *failed = SIZE_MAX; /* a caller of the other ABI hands its stream here and something odd as stream */
    return fake_leave(batch(dsts, srcs, sizes, count, attributes, indices, n, stream));
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                               CUmemcpyAttributes *attributes, size_t *indices, size_t n, CUstream stream) {
    ENTER(IN_CONTEXT, count, n, 0, stream);
    return fake_leave(batch(dsts, srcs, sizes, count, attributes, indices, n, stream));
}

static CUresult enqueue_set(CUstream stream, int kind, uint64_t dst, uint64_t value, size_t bytes) {
    Stream *s = find(stream);
    if (!s) return CUDA_ERROR_INVALID_HANDLE;
    if (!bytes) return CUDA_SUCCESS;
    if (!fake_translate(dst, bytes, 1)) return CUDA_ERROR_INVALID_VALUE;
    Op op = {.kind = kind, .dst = dst, .bytes = bytes, .value = value};
    return submit(s, &op);
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream) {
    ENTER(IN_CONTEXT, dst, value, count, stream);
    return fake_leave(enqueue_set(stream, OP_SET8, dst, value, count));
}

CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned int value, size_t count, CUstream stream) {
    ENTER(IN_CONTEXT, dst, value, count, stream);
    if (dst % 4) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    return fake_leave(enqueue_set(stream, OP_SET32, dst, value, 4 * count));
}

CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                        unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **params,
                        void **extra) {
    ENTER(IN_CONTEXT, f, gx, bx, stream);
    Stream *s = find(stream);
    const Kernel *kernel = (const Kernel *)f;
    if (!s || !kernel || !kernel->run) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    if (extra || !gx || !gy || !gz || !bx || !by || !bz || (uint64_t)bx * by * bz > 1024)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    Op op = {.kind = OP_KERNEL, .kernel = kernel, .grid = {gx, gy, gz}, .block = {bx, by, bz}};
    for (int i = 0; i < kernel->params; i++) memcpy(&op.params[i], params[i], (size_t)kernel->sizes[i]);
    return fake_leave(submit(s, &op));
}
