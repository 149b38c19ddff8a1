/* Device, page-locked and managed memory, what a pointer is, and virtual memory management over memfds. */
#define _GNU_SOURCE
#include "fake.h"

#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static Range *ranges;
static uint64_t ids;
static const char *const KIND[KINDS] = {"", "device", "hostalloc", "registered", "managed"};

typedef struct Handle {
    uint64_t id;
    int fd, held, maps;
    size_t size;
    struct Handle *next;
} Handle;
typedef struct Reservation {
    uint64_t va;
    char *shadow; /* where the host sees what is mapped at va */
    size_t size;
    struct Reservation *next;
} Reservation;
typedef struct Mapping {
    uint64_t va;
    size_t size;
    Handle *handle;
    int access;
    struct Mapping *next;
} Mapping;
static Handle *handles;
static Reservation *reservations;
static Mapping *mappings;

static size_t pages(size_t bytes) { return (bytes + 4095) & ~(size_t)4095; }

static void *plain(size_t bytes, int prot) {
    void *got = mmap(NULL, bytes, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return got == MAP_FAILED ? NULL : got;
}

static int64_t held(int kind) {
    int64_t sum = 0;
    for (Range *r = ranges; r; r = r->next)
        if (r->kind == kind) sum += (int64_t)r->size;
    return sum;
}

static int64_t device_free(void) {
    int64_t sum = held(DEVICE);
    for (Handle *h = handles; h; h = h->next) sum += (int64_t)h->size;
    return fake_settings.total_bytes - sum;
}

static int inside(uint64_t start, size_t size, uint64_t address, size_t bytes) {
    return address >= start && address - start <= size && bytes <= size - (address - start);
}

static Range *of_device(uint64_t address, size_t bytes) {
    for (Range *r = ranges; r; r = r->next)
        if (inside(r->dptr, r->size, address, bytes) && address < r->dptr + r->size) return r;
    return NULL;
}

static Range *of_host(uint64_t address, size_t bytes) {
    for (Range *r = ranges; r; r = r->next)
        if (r->kind != DEVICE && inside((uint64_t)r->host, r->size, address, bytes) &&
            address < (uint64_t)r->host + r->size)
            return r;
    return NULL;
}

static Reservation *reserved(uint64_t address, size_t bytes) {
    for (Reservation *r = reservations; r; r = r->next)
        if (inside(r->va, r->size, address, bytes)) return r;
    return NULL;
}

static int mapped(uint64_t address, size_t bytes) { /* every byte mapped and accessible */
    while (bytes) {
        Mapping *m = mappings;
        while (m && !(m->access && address >= m->va && address < m->va + m->size)) m = m->next;
        if (!m) return 0;
        size_t part = m->va + m->size - address;
        if (part > bytes) part = bytes;
        address += part, bytes -= part;
    }
    return 1;
}

static int backed(uint64_t address) { /* mapped, whether it may be accessed or not */
    for (Mapping *m = mappings; m; m = m->next)
        if (address >= m->va && address < m->va + m->size) return 1;
    return 0;
}

char *fake_translate(uint64_t address, size_t bytes, int copying) {
    Range *r = of_device(address, bytes);
    if (r) return r->host + (address - r->dptr);
    r = of_host(address, bytes);
    if (r && (copying || !fake_settings.alias_differs)) return (char *)address;
    Reservation *v = reserved(address, bytes);
    return v && mapped(address, bytes) ? v->shadow + (address - v->va) : NULL;
}

int fake_known(uint64_t address) { return of_device(address, 0) || of_host(address, 0) || reserved(address, 0); }

static void unlink_range(Range *gone) {
    Range **link = &ranges;
    while (*link != gone) link = &(*link)->next;
    *link = gone->next;
    fake_count(KIND[gone->kind], -1);
    if (gone->dptr != (uint64_t)gone->host) munmap((void *)gone->dptr, gone->mapped);
    if (gone->kind != REGISTERED) munmap(gone->host, gone->mapped);
    free(gone);
}

/* own: the caller's memory for REGISTERED, else NULL. */
static CUresult add(int kind, size_t size, unsigned flags, void *own, Range **out) {
    size_t mapping = pages(size);
    int separate = kind == DEVICE || (kind != MANAGED && fake_settings.alias_differs);
    char *host = own ? own : plain(mapping, PROT_READ | PROT_WRITE);
    void *alias = separate ? plain(mapping, PROT_NONE) : host;
    if (!host || !alias) {
        if (host && !own) munmap(host, mapping);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    Range *r = calloc(1, sizeof *r);
    *r = (Range){.kind = kind, .dptr = (uint64_t)alias, .id = ++ids, .host = host, .size = size, .mapped = mapping,
                 .flags = flags, .ctx = fake_context(), .next = ranges};
    ranges = r;
    fake_count(KIND[kind], 1);
    *out = r;
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
    ENTER(IN_CONTEXT, 0, 0, 0, 0);
    *available = (size_t)device_free();
    *total = (size_t)fake_settings.total_bytes;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytes) {
    ENTER(IN_CONTEXT, bytes, 0, 0, 0);
    Range *r;
    if (!bytes) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if ((int64_t)bytes > device_free()) return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    CUresult wrong = add(DEVICE, bytes, 0, NULL, &r);
    if (!wrong) *dptr = r->dptr;
    return fake_leave(wrong);
}

CUresult cuMemAllocManaged(CUdeviceptr *dptr, size_t bytes, unsigned int flags) {
    ENTER(IN_CONTEXT, bytes, flags, 0, 0);
    Range *r;
    if (!fake_settings.managed) return fake_leave(CUDA_ERROR_NOT_SUPPORTED);
    if (!bytes || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    CUresult wrong = add(MANAGED, bytes, flags, NULL, &r);
    if (!wrong) *dptr = r->dptr;
    return fake_leave(wrong);
}

CUresult cuMemFree_v2(CUdeviceptr dptr) {
    RELEASE(IN_CONTEXT, dptr, 0);
    if (!dptr) return fake_leave(forced);
    Range *r = of_device(dptr, 0);
    if (!r || r->dptr != dptr || (r->kind != DEVICE && r->kind != MANAGED)) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    fake_drain(r->ctx); /* frees wait for the device, as the real one does */
    unlink_range(r);
    return fake_leave(forced);
}

CUresult cuMemHostAlloc(void **p, size_t bytes, unsigned int flags) {
    ENTER(IN_CONTEXT, bytes, flags, 0, 0);
    Range *r;
    if (!bytes) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (held(HOSTALLOC) + held(REGISTERED) + (int64_t)bytes > fake_settings.pin_limit)
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    CUresult wrong = add(HOSTALLOC, bytes, flags, NULL, &r);
    if (!wrong) *p = r->host;
    return fake_leave(wrong);
}

static CUresult give_back(void *p, int kind, CUresult otherwise, CUresult forced) {
    Range *r = of_host((uint64_t)p, 0);
    if (!r || r->host != p || r->kind != kind) return fake_leave(otherwise);
    fake_drain(r->ctx);
    unlink_range(r);
    return fake_leave(forced);
}

CUresult cuMemFreeHost(void *p) {
    RELEASE(IN_CONTEXT, p, 0);
    return give_back(p, HOSTALLOC, CUDA_ERROR_INVALID_VALUE, forced);
}

CUresult cuMemHostRegister_v2(void *p, size_t bytes, unsigned int flags) {
    ENTER(IN_CONTEXT, p, bytes, flags, 0);
    Range *r;
    unsigned char seen;
    if (!p || !bytes) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (mincore((void *)((uint64_t)p & ~4095ull), 4096, &seen)) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (of_host((uint64_t)p, 0) || of_host((uint64_t)p + bytes - 1, 0))
        return fake_leave(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    if (held(REGISTERED) + (int64_t)bytes > fake_settings.die_limit) kill(getpid(), SIGKILL); /* as the OOM killer */
    if (held(HOSTALLOC) + held(REGISTERED) + (int64_t)bytes > fake_settings.pin_limit)
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    return fake_leave(add(REGISTERED, bytes, flags, p, &r));
}

CUresult cuMemHostUnregister(void *p) {
    RELEASE(IN_CONTEXT, p, 0);
    return give_back(p, REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, forced);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *dptr, void *p, unsigned int flags) {
    ENTER(IN_CONTEXT, p, flags, 0, 0);
    Range *r = of_host((uint64_t)p, 1);
    if (!r || flags) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *dptr = r->dptr + ((uint64_t)p - (uint64_t)r->host);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *p) {
    ENTER(IN_CONTEXT, p, 0, 0, 0);
    Range *r = of_host((uint64_t)p, 1);
    if (!r) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *flags = r->flags;
    return fake_leave(CUDA_SUCCESS);
}

/* -- what a pointer is ----------------------------------------------------------------------------------------------- */

static CUresult attribute(void *data, CUpointer_attribute which, uint64_t address) {
    Range *r = of_device(address, 1);
    if (!r) r = of_host(address, 1);
    Reservation *v = r ? NULL : reserved(address, 1);
    if (!r && !v) return CUDA_ERROR_INVALID_VALUE;
    uint64_t offset = !r ? 0 : address >= r->dptr && address < r->dptr + r->size ? address - r->dptr
                                                                                 : address - (uint64_t)r->host;
    int on_device = !r || r->kind == DEVICE;
    switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = (CUcontext)(r ? r->ctx : NULL); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = on_device || r->kind == MANAGED ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        /* a test can let page-locked memory look like what a wrong driver or label would make of it */
        if (r && r->kind == REGISTERED && fake_settings.registered_attribute)
            *(unsigned *)data = (unsigned)fake_settings.registered_attribute;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = r ? r->dptr + offset : address; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (on_device) return CUDA_ERROR_INVALID_VALUE;
        *(void **)data = r->host + offset;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)data = r && r->kind == MANAGED; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = r && r->ctx ? r->ctx->ordinal : 0; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = r ? r->dptr : v->va; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = r ? r->size : v->size; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(uint64_t *)data = r ? r->id : 0; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned *)data = r ? 1 : (unsigned)backed(address); break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute which, CUdeviceptr ptr) {
    ENTER(IN_CONTEXT, which, ptr, 0, 0);
    return fake_leave(attribute(data, which, ptr));
}

/* Unlike the single question, an unknown pointer is no error here: every answer is zero. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *which, void **data, CUdeviceptr ptr) {
    ENTER(IN_CONTEXT, count, ptr, 0, 0);
    for (unsigned i = 0; i < count; i++) {
        int wide = which[i] == CU_POINTER_ATTRIBUTE_CONTEXT || which[i] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ||
                   which[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER || which[i] == CU_POINTER_ATTRIBUTE_BUFFER_ID ||
                   which[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR || which[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE;
        memset(data[i], 0, wide ? 8 : 4);
        attribute(data[i], which[i], ptr);
    }
    return fake_leave(CUDA_SUCCESS);
}

/* -- virtual memory management --------------------------------------------------------------------------------------- */

static int whole(uint64_t value) { return value && value % (uint64_t)fake_settings.granularity == 0; }

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option) {
    ENTER(AFTER_INIT, option, 0, 0, 0);
    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *bytes = (size_t)fake_settings.granularity;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    ENTER(AFTER_INIT, size, alignment, hint, flags);
    if (!whole(size) || flags) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    void *va = plain(size, PROT_NONE), *shadow = plain(size, PROT_NONE);
    if (!va || !shadow) {
        if (va) munmap(va, size);
        if (shadow) munmap(shadow, size);
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    Reservation *r = calloc(1, sizeof *r);
    *r = (Reservation){.va = (uint64_t)va, .shadow = shadow, .size = size, .next = reservations};
    reservations = r;
    fake_count("reservations", 1);
    *ptr = r->va;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
    RELEASE(AFTER_INIT, ptr, size);
    Reservation **link = &reservations;
    while (*link && (*link)->va != ptr) link = &(*link)->next;
    Reservation *r = *link;
    if (!r || r->size != size) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    for (Mapping *m = mappings; m; m = m->next)
        if (inside(r->va, r->size, m->va, m->size)) return fake_leave(CUDA_ERROR_INVALID_VALUE); /* still mapped */
    *link = r->next;
    munmap((void *)r->va, r->size);
    munmap(r->shadow, r->size);
    free(r);
    fake_count("reservations", -1);
    return fake_leave(forced);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
    ENTER(AFTER_INIT, size, flags, 0, 0);
    if (!whole(size) || flags || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop->location.id >= fake_settings.devices)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if ((int64_t)size > device_free()) return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) {
        if (fd >= 0) close(fd);
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    Handle *h = calloc(1, sizeof *h);
    *h = (Handle){.id = ++ids, .fd = fd, .held = 1, .size = size, .next = handles};
    handles = h;
    fake_count("handles", 1);
    *handle = h->id;
    return fake_leave(CUDA_SUCCESS);
}

static Handle *find_handle(uint64_t id) {
    Handle *h = handles;
    while (h && h->id != id) h = h->next;
    return h;
}

static void drop_handle(Handle *gone) { /* memory goes with the last mapping, as documented for cuMemRelease */
    if (gone->held || gone->maps) return;
    Handle **link = &handles;
    while (*link != gone) link = &(*link)->next;
    *link = gone->next;
    close(gone->fd);
    free(gone);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    RELEASE(AFTER_INIT, handle, 0);
    Handle *h = find_handle(handle);
    if (!h || !h->held) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    h->held = 0;
    fake_count("handles", -1);
    drop_handle(h);
    return fake_leave(forced);
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    ENTER(AFTER_INIT, ptr, size, offset, handle);
    Handle *h = find_handle(handle);
    Reservation *r = reserved(ptr, size);
    if (!h || !h->held || !r || !whole(size) || flags || ptr % (uint64_t)4096 || offset > h->size ||
        size > h->size - offset || (offset && !whole(offset)))
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    for (Mapping *m = mappings; m; m = m->next)
        if (ptr < m->va + m->size && m->va < ptr + size) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    void *at = r->shadow + (ptr - r->va);
    if (mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, h->fd, (off_t)offset) == MAP_FAILED)
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    Mapping *m = calloc(1, sizeof *m);
    *m = (Mapping){.va = ptr, .size = size, .handle = h, .next = mappings};
    mappings = m;
    h->maps++;
    fake_count("mappings", 1);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count) {
    ENTER(AFTER_INIT, ptr, size, count, 0);
    size_t covered = 0;
    if (count != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    for (Mapping *m = mappings; m; m = m->next)
        if (inside(ptr, size, m->va, m->size)) covered += m->size;
    if (!size || covered != size) return fake_leave(CUDA_ERROR_INVALID_VALUE); /* whole mappings only */
    for (Mapping *m = mappings; m; m = m->next)
        if (inside(ptr, size, m->va, m->size)) m->access = desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
    RELEASE(AFTER_INIT, ptr, size);
    size_t covered = 0;
    Reservation *r = reserved(ptr, size);
    for (Mapping *m = mappings; m; m = m->next)
        if (inside(ptr, size, m->va, m->size)) covered += m->size;
    if (!r || !size || covered != size) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    for (Mapping **link = &mappings; *link;) {
        Mapping *m = *link;
        if (!inside(ptr, size, m->va, m->size)) {
            link = &m->next;
            continue;
        }
        *link = m->next;
        m->handle->maps--;
        drop_handle(m->handle);
        free(m);
        fake_count("mappings", -1);
    }
    mmap(r->shadow + (ptr - r->va), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return fake_leave(forced);
}

void fake_memory_reset(void) {
    while (ranges) unlink_range(ranges);
    while (mappings) {
        Mapping *m = mappings;
        mappings = m->next;
        m->handle->maps--;
        free(m);
    }
    while (reservations) {
        Reservation *r = reservations;
        reservations = r->next;
        munmap((void *)r->va, r->size);
        munmap(r->shadow, r->size);
        free(r);
    }
    while (handles) {
        handles->held = 0;
        drop_handle(handles);
    }
}

/* Tests look at and change what a device address holds. */
int fake_peek(uint64_t address, void *out, size_t bytes) {
    pthread_mutex_lock(&fake_lock);
    char *at = fake_translate(address, bytes, 0);
    if (at) memcpy(out, at, bytes);
    pthread_mutex_unlock(&fake_lock);
    return at ? 0 : -1;
}

int fake_poke(uint64_t address, const void *from, size_t bytes) {
    pthread_mutex_lock(&fake_lock);
    char *at = fake_translate(address, bytes, 0);
    if (at) memcpy(at, from, bytes);
    pthread_mutex_unlock(&fake_lock);
    return at ? 0 : -1;
}
