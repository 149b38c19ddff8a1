/* Initialisation, devices, contexts, errors, entry points by version, and the controls tests use. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/syscall.h>

#define MIB (1ll << 20)
static const Settings DEFAULTS = {
    .devices = 1, .driver_version = 13000, .total_bytes = 256 * MIB, .pin_limit = INT64_MAX, .die_limit = INT64_MAX, .depth = 1024,
    .alias_differs = 1, .managed = 1, .l2_bytes = 60 * MIB, .sms = 4, .numa_node = -1, .compute_major = 9,
    .compute_minor = 0, .granularity = 2 * MIB, .event_quantum_ns = 1, .shared_optin = 232448,
};
Settings fake_settings;
pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_changed = PTHREAD_COND_INITIALIZER;
int fake_stopping;

static int initialised;
static Context contexts[FAKE_DEVICES];
static __thread Context *current;
static __thread uint64_t current_life, current_epoch;
static uint64_t epoch = 1; /* of resets: a thread of an earlier test has no current context any more */

/* -- controls ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const char *name;
    uint64_t thread, args[4];
} Call;
#define TRACE 65536
static Call trace[TRACE];
static uint64_t calls;

static struct {
    char name[64]; /* "" for any */
    int64_t left;
    CUresult code;
    int keep, sticky, fired;
} fault;

#define COUNTERS 16
static struct {
    const char *name;
    int64_t live;
} counters[COUNTERS];

void fake_count(const char *what, int change) {
    for (int i = 0; i < COUNTERS; i++) {
        if (!counters[i].name) counters[i].name = what;
        if (!strcmp(counters[i].name, what)) {
            counters[i].live += change;
            return;
        }
    }
    abort();
}

int64_t fake_live(const char *what) { /* NULL: everything together */
    int64_t sum = 0;
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < COUNTERS && counters[i].name; i++)
        if (!what || !strcmp(counters[i].name, what)) sum += counters[i].live;
    pthread_mutex_unlock(&fake_lock);
    return sum;
}

int64_t fake_live_at(int i, const char **name) { /* for listing: NULL name ends it */
    *name = i < COUNTERS ? counters[i].name : NULL;
    return *name ? counters[i].live : 0;
}

static int64_t *setting(const char *name) {
#define AT(field)                                                                                                      \
    if (!strcmp(name, #field)) return &fake_settings.field
    AT(devices); AT(driver_version); AT(total_bytes); AT(pin_limit); AT(die_limit); AT(depth); AT(alias_differs); AT(managed);
    AT(l2_bytes); AT(sms); AT(numa_node); AT(compute_major); AT(compute_minor); AT(granularity);
    AT(registered_attribute); AT(shared_optin); AT(virtual_time); AT(op_ns); AT(byte_ps); AT(record_ns); AT(event_quantum_ns);
    AT(pause);
#undef AT
    return NULL;
}

int fake_set(const char *name, int64_t value) {
    int64_t *field = setting(name);
    if (!field) return -1;
    pthread_mutex_lock(&fake_lock);
    *field = value;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
    return 0;
}

void fake_fail(const char *name, int64_t k, CUresult code, int keep, int sticky) { /* the k-th call from now on */
    pthread_mutex_lock(&fake_lock);
    snprintf(fault.name, sizeof fault.name, "%s", name ? name : "");
    fault.left = k, fault.code = code, fault.keep = keep, fault.sticky = sticky, fault.fired = 0;
    pthread_mutex_unlock(&fake_lock);
}

int fake_fired(void) { return fault.fired; }
uint64_t fake_calls(void) { return calls; }
const Call *fake_call(uint64_t i) { return i < calls && i < TRACE ? &trace[i] : NULL; }
void fake_forget(void) { calls = 0; }

void fake_reset(void) {
    pthread_mutex_lock(&fake_lock);
    fake_stopping = 1;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
    fake_streams_reset();
    pthread_mutex_lock(&fake_lock);
    fake_memory_reset();
    fake_modules_reset();
    fake_graphs_reset();
    fake_settings = DEFAULTS;
    memset(&fault, 0, sizeof fault);
    for (int i = 0; i < COUNTERS; i++) counters[i].live = 0;
    for (int i = 0; i < FAKE_DEVICES; i++) {
        uint64_t life = contexts[i].life + 1;
        contexts[i] = (Context){.ordinal = i, .life = life};
    }
    calls = 0, initialised = 0, fake_stopping = 0, epoch++;
    pthread_mutex_unlock(&fake_lock);
}

__attribute__((constructor)) static void begin(void) {
    static char words[512];
    fake_reset();
    /* A child process cannot be handed calls, so it may be handed words: FAKE_CUDA="pin_limit=1048576,devices=2" */
    snprintf(words, sizeof words, "%s", getenv("FAKE_CUDA") ? getenv("FAKE_CUDA") : "");
    for (char *rest = words, *word; (word = strsep(&rest, ","));) {
        char *equals = strchr(word, '=');
        if (!equals) continue;
        *equals = 0;
        if (fake_set(word, atoll(equals + 1))) abort();
    }
}

/* -- entering a call ------------------------------------------------------------------------------------------------ */

static CUresult injected(const char *name) {
    if (!fault.left || (fault.name[0] && strcmp(fault.name, name))) return CUDA_SUCCESS;
    if (--fault.left) return CUDA_SUCCESS;
    fault.fired = 1;
    if (fault.sticky && current) current->sticky = fault.code;
    return fault.code;
}

static CUresult usable(int need) {
    if (need >= AFTER_INIT && !initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (need < IN_CONTEXT) return CUDA_SUCCESS;
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    if (current->life != current_life || !current->refs) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return current->sticky;
}

static CUresult enter(const char *name, int need, const uint64_t *args, CUresult *forced) {
    pthread_mutex_lock(&fake_lock);
    if (current_epoch != epoch) current = NULL, current_epoch = epoch;
    if (calls < TRACE) {
        trace[calls] = (Call){name, (uint64_t)syscall(SYS_gettid), {args[0], args[1], args[2], args[3]}};
    }
    calls++;
    CUresult wrong = injected(name);
    if (wrong && forced && !fault.keep && !fault.sticky) {
        *forced = wrong;
        wrong = CUDA_SUCCESS;
    }
    if (!wrong) wrong = usable(need);
    if (wrong) pthread_mutex_unlock(&fake_lock);
    return wrong;
}

CUresult fake_enter(const char *name, int need, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    uint64_t args[4] = {a, b, c, d};
    return enter(name, need, args, NULL);
}

CUresult fake_enter_release(const char *name, int need, uint64_t a, uint64_t b, CUresult *forced) {
    uint64_t args[4] = {a, b, 0, 0};
    *forced = CUDA_SUCCESS;
    return enter(name, need, args, forced);
}

CUresult fake_leave(CUresult result) {
    pthread_mutex_unlock(&fake_lock);
    return result;
}

Context *fake_context(void) { return current; }

/* -- initialisation and devices ------------------------------------------------------------------------------------- */

CUresult cuInit(unsigned int flags) {
    ENTER(FREELY, flags, 0, 0, 0);
    if (flags) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (!fake_settings.devices) return fake_leave(CUDA_ERROR_NO_DEVICE);
    initialised = 1;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDriverGetVersion(int *version) {
    ENTER(FREELY, 0, 0, 0, 0);
    *version = (int)fake_settings.driver_version;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetCount(int *count) {
    ENTER(AFTER_INIT, 0, 0, 0, 0);
    *count = (int)fake_settings.devices;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(AFTER_INIT, ordinal, 0, 0, 0);
    if (ordinal < 0 || ordinal >= fake_settings.devices) return fake_leave(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return fake_leave(CUDA_SUCCESS);
}

#define CHECK_DEVICE(dev)                                                                                              \
    if ((dev) < 0 || (dev) >= fake_settings.devices) return fake_leave(CUDA_ERROR_INVALID_DEVICE)

CUresult cuDeviceGetName(char *name, int len, CUdevice dev) {
    ENTER(AFTER_INIT, len, dev, 0, 0);
    CHECK_DEVICE(dev);
    snprintf(name, (size_t)len, "Fake GPU %d", dev);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice dev) {
    ENTER(AFTER_INIT, len, dev, 0, 0);
    CHECK_DEVICE(dev);
    snprintf(id, (size_t)len, "0000:F%d:00.0", dev); /* upper case, as the driver writes it; sysfs has lower case */
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
    ENTER(AFTER_INIT, dev, 0, 0, 0);
    CHECK_DEVICE(dev);
    *bytes = (size_t)fake_settings.total_bytes;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev) {
    ENTER(AFTER_INIT, dev, 0, 0, 0);
    CHECK_DEVICE(dev);
    for (int i = 0; i < 16; i++) uuid->bytes[i] = (char)(16 * dev + i);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice dev) {
    ENTER(AFTER_INIT, attribute, dev, 0, 0);
    CHECK_DEVICE(dev);
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = (int)fake_settings.compute_major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = (int)fake_settings.compute_minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = (int)fake_settings.sms; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = (int)fake_settings.l2_bytes; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = (int)fake_settings.shared_optin; break;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *value = (int)fake_settings.numa_node; break;
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: *value = (int)fake_settings.managed; break;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: *value = !fake_settings.alias_differs; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *value = 0; break;
    default: return fake_leave(CUDA_ERROR_INVALID_VALUE);
    }
    return fake_leave(CUDA_SUCCESS);
}

/* -- contexts ------------------------------------------------------------------------------------------------------ */

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice dev) {
    ENTER(AFTER_INIT, dev, 0, 0, 0);
    CHECK_DEVICE(dev);
    contexts[dev].refs++;
    fake_count("contexts", 1);
    *ctx = (CUcontext)&contexts[dev];
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    RELEASE(AFTER_INIT, dev, 0);
    CHECK_DEVICE(dev);
    Context *ctx = &contexts[dev];
    if (!ctx->refs) return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    fake_count("contexts", -1);
    if (!--ctx->refs) ctx->life++, ctx->sticky = CUDA_SUCCESS;
    return fake_leave(forced);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active) {
    ENTER(AFTER_INIT, dev, 0, 0, 0);
    CHECK_DEVICE(dev);
    *flags = 0, *active = contexts[dev].refs > 0;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuCtxSetCurrent(CUcontext ctx) {
    ENTER(AFTER_INIT, ctx, 0, 0, 0);
    Context *found = (Context *)ctx;
    if (found && (found < contexts || found >= contexts + FAKE_DEVICES || !found->refs))
        return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    current = found;
    current_life = found ? found->life : 0;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *ctx) {
    ENTER(AFTER_INIT, 0, 0, 0, 0);
    *ctx = (CUcontext)(current && current->life == current_life ? current : NULL);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(IN_CONTEXT, 0, 0, 0, 0);
    *device = current->ordinal;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuCtxSynchronize(void) {
    ENTER(IN_CONTEXT, 0, 0, 0, 0);
    fake_drain(current);
    return fake_leave(current->sticky);
}
