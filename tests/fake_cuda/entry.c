/* Error texts and entry points by version. Each line of the table is checked by the compiler twice: the function has
 * the type cuda.h declares, and that is the type cudaTypedefs.h gives this version of this name. */
#include "fake.h"

#include <stddef.h>
#include <string.h>

static const struct {
    CUresult code;
    const char *name, *text;
} ERRORS[] = {
#define AT(code, text) {code, #code, text}
    AT(CUDA_SUCCESS, "no error"),
    AT(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    AT(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    AT(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    AT(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    AT(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    AT(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    AT(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    AT(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    AT(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    AT(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    AT(CUDA_ERROR_NOT_READY, "device not ready"),
    AT(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    AT(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    AT(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    AT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    AT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    AT(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    AT(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    AT(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    AT(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "system has unsupported display driver / cuda driver combination"),
    AT(CUDA_ERROR_UNKNOWN, "unknown error"),
#undef AT
};
#define KNOWN (sizeof ERRORS / sizeof *ERRORS)

CUresult cuGetErrorName(CUresult error, const char **name) {
    for (size_t i = 0; i < KNOWN; i++)
        if (ERRORS[i].code == error) return *name = ERRORS[i].name, CUDA_SUCCESS;
    return *name = NULL, CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    for (size_t i = 0; i < KNOWN; i++)
        if (ERRORS[i].code == error) return *text = ERRORS[i].text, CUDA_SUCCESS;
    return *text = NULL, CUDA_ERROR_INVALID_VALUE;
}

static const struct {
    const char *name;
    int version;
    void *function;
} ENTRIES[] = {
#define SAME(a, b) __builtin_types_compatible_p(__typeof__(&(a)), b)
#define CHECKED(a, b) (0 * sizeof(struct { int x; _Static_assert(SAME(a, b), #a " is not a " #b); }))
#define AT(base, version, symbol) {#base, version + CHECKED(symbol, PFN_##base##_v##version), (void *)symbol}
    AT(cuGetErrorName, 6000, cuGetErrorName),
    AT(cuGetErrorString, 6000, cuGetErrorString),
    AT(cuInit, 2000, cuInit),
    AT(cuDriverGetVersion, 2020, cuDriverGetVersion),
    AT(cuDeviceGetCount, 2000, cuDeviceGetCount),
    AT(cuDeviceGet, 2000, cuDeviceGet),
    AT(cuDeviceGetName, 2000, cuDeviceGetName),
    AT(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute),
    AT(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId),
    AT(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2),
    AT(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2),
    AT(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain),
    AT(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2),
    AT(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState),
    AT(cuCtxSetCurrent, 4000, cuCtxSetCurrent),
    AT(cuCtxGetCurrent, 4000, cuCtxGetCurrent),
    AT(cuCtxGetDevice, 2000, cuCtxGetDevice),
    AT(cuCtxSynchronize, 2000, cuCtxSynchronize),
    AT(cuMemGetInfo, 3020, cuMemGetInfo_v2),
    AT(cuMemAlloc, 3020, cuMemAlloc_v2),
    AT(cuMemFree, 3020, cuMemFree_v2),
    AT(cuMemHostAlloc, 2020, cuMemHostAlloc),
    AT(cuMemFreeHost, 2000, cuMemFreeHost),
    AT(cuMemHostRegister, 6050, cuMemHostRegister_v2),
    AT(cuMemHostUnregister, 4000, cuMemHostUnregister),
    AT(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2),
    AT(cuMemHostGetFlags, 2030, cuMemHostGetFlags),
    AT(cuMemAllocManaged, 6000, cuMemAllocManaged),
    AT(cuPointerGetAttribute, 4000, cuPointerGetAttribute),
    AT(cuPointerGetAttributes, 7000, cuPointerGetAttributes),
    AT(cuMemAddressReserve, 10020, cuMemAddressReserve),
    AT(cuMemAddressFree, 10020, cuMemAddressFree),
    AT(cuMemCreate, 10020, cuMemCreate),
    AT(cuMemRelease, 10020, cuMemRelease),
    AT(cuMemMap, 10020, cuMemMap),
    AT(cuMemUnmap, 10020, cuMemUnmap),
    AT(cuMemSetAccess, 10020, cuMemSetAccess),
    AT(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity),
    AT(cuStreamCreate, 2000, cuStreamCreate),
    AT(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority),
    AT(cuStreamDestroy, 4000, cuStreamDestroy_v2),
    AT(cuStreamSynchronize, 2000, cuStreamSynchronize),
    AT(cuStreamQuery, 2000, cuStreamQuery),
    AT(cuStreamWaitEvent, 3020, cuStreamWaitEvent),
    AT(cuStreamGetCtx, 9020, cuStreamGetCtx),
    AT(cuEventCreate, 2000, cuEventCreate),
    AT(cuEventDestroy, 4000, cuEventDestroy_v2),
    AT(cuEventRecord, 2000, cuEventRecord),
    AT(cuEventQuery, 2000, cuEventQuery),
    AT(cuEventSynchronize, 2000, cuEventSynchronize),
    AT(cuEventElapsedTime, 2000, cuEventElapsedTime),
    AT(cuMemcpyAsync, 4000, cuMemcpyAsync),
    AT(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2),
    AT(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2),
    AT(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2),
    AT(cuMemcpyBatchAsync, 12080, cuMemcpyBatchAsync),
    AT(cuMemcpyBatchAsync, 13000, cuMemcpyBatchAsync_v2),
    AT(cuMemsetD8Async, 3020, cuMemsetD8Async),
    AT(cuMemsetD32Async, 3020, cuMemsetD32Async),
    AT(cuModuleLoadData, 2000, cuModuleLoadData),
    AT(cuModuleUnload, 2000, cuModuleUnload),
    AT(cuModuleGetFunction, 2000, cuModuleGetFunction),
    AT(cuFuncGetAttribute, 2020, cuFuncGetAttribute),
    AT(cuFuncSetAttribute, 9000, cuFuncSetAttribute),
    AT(cuTensorMapEncodeTiled, 12000, cuTensorMapEncodeTiled),
    AT(cuLaunchKernel, 4000, cuLaunchKernel),
    AT(cuGraphCreate, 10000, cuGraphCreate),
    AT(cuGraphDestroy, 10000, cuGraphDestroy),
    AT(cuGraphAddKernelNode, 12000, cuGraphAddKernelNode_v2),
    AT(cuGraphAddMemcpyNode, 10000, cuGraphAddMemcpyNode),
    AT(cuGraphExecMemcpyNodeSetParams, 10020, cuGraphExecMemcpyNodeSetParams),
    AT(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags),
    AT(cuGraphExecDestroy, 10000, cuGraphExecDestroy),
    AT(cuGraphLaunch, 10000, cuGraphLaunch),
    AT(cuGetProcAddress, 12000, cuGetProcAddress_v2),
#undef AT
};

/* As the documentation of cuGetProcAddress has it: the newest version not above the asked one; a name that is not there
 * is success with a null pointer and the reason in *status. */
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    ENTER(FREELY, version, flags, 0, 0);
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    int best = 0;
    *function = NULL;
    if (version > fake_settings.driver_version) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < sizeof ENTRIES / sizeof *ENTRIES; i++) {
        if (strcmp(ENTRIES[i].name, symbol)) continue;
        if (ENTRIES[i].version > version) {
            if (!best) found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        } else if (ENTRIES[i].version > best) {
            best = ENTRIES[i].version;
            *function = ENTRIES[i].function;
            found = CU_GET_PROC_ADDRESS_SUCCESS;
        }
    }
    if (status) *status = found;
    return fake_leave(CUDA_SUCCESS);
}
