"""The driver entry points kvbench calls: versions, C signatures and the structures they take.

Source: cuda.h and cudaTypedefs.h of CUDA 13. Tests compile every signature and offset here against the real headers
(tests/fake_cuda), so a wrong one is a compile error and not a wrong number.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """``name`` at the interface of CUDA ``version`` (1000 x major + 10 x minor), the plain ``symbol`` that has the same
    interface, and the C types of its ``arguments``. ``optional`` ones a driver may lack."""

    name: str
    version: int
    symbol: str
    arguments: tuple[str, ...]
    optional: bool = False


# How a C type travels. Enumerations are ints, handles and all pointers are addresses.
C_TYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "unsigned long long": ctypes.c_uint64,
    "cuuint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "CUdevice": ctypes.c_int,
    "CUdeviceptr": ctypes.c_uint64,
    "CUmemGenericAllocationHandle": ctypes.c_uint64,
    "CUdevice_attribute": ctypes.c_int,
    "CUpointer_attribute": ctypes.c_int,
    "CUfunction_attribute": ctypes.c_int,
    "CUmemAllocationGranularity_flags": ctypes.c_int,
    "CUresult": ctypes.c_int,
    "cuuint32_t": ctypes.c_uint32,
    "CUtensorMapDataType": ctypes.c_int,
    "CUtensorMapInterleave": ctypes.c_int,
    "CUtensorMapSwizzle": ctypes.c_int,
    "CUtensorMapL2promotion": ctypes.c_int,
    "CUtensorMapFloatOOBfill": ctypes.c_int,
}
HANDLES = ("CUcontext", "CUstream", "CUevent", "CUmodule", "CUfunction", "CUgraph", "CUgraphExec", "CUgraphNode")


def c_type(name: str) -> Any:
    """Return the ctypes type of a C argument type. Raises KeyError for one this table does not know."""
    return ctypes.c_void_p if name.endswith("*") or name in HANDLES else C_TYPES[name]


# key | symbol | version | arguments. A key with @ is a second interface of the same name.
_TABLE = """
cuGetErrorName             | cuGetErrorName               |  6000 | CUresult, const char**
cuGetErrorString           | cuGetErrorString             |  6000 | CUresult, const char**
cuInit                     | cuInit                       |  2000 | unsigned int
cuDriverGetVersion         | cuDriverGetVersion           |  2020 | int*
cuDeviceGetCount           | cuDeviceGetCount             |  2000 | int*
cuDeviceGet                | cuDeviceGet                  |  2000 | CUdevice*, int
cuDeviceGetName            | cuDeviceGetName              |  2000 | char*, int, CUdevice
cuDeviceGetAttribute       | cuDeviceGetAttribute         |  2000 | int*, CUdevice_attribute, CUdevice
cuDeviceGetPCIBusId        | cuDeviceGetPCIBusId          |  4010 | char*, int, CUdevice
cuDeviceTotalMem           | cuDeviceTotalMem_v2          |  3020 | size_t*, CUdevice
cuDeviceGetUuid            | cuDeviceGetUuid_v2           | 11040 | CUuuid*, CUdevice
cuDevicePrimaryCtxRetain   | cuDevicePrimaryCtxRetain     |  7000 | CUcontext*, CUdevice
cuDevicePrimaryCtxRelease  | cuDevicePrimaryCtxRelease_v2 | 11000 | CUdevice
cuCtxSetCurrent            | cuCtxSetCurrent              |  4000 | CUcontext
cuCtxGetCurrent            | cuCtxGetCurrent              |  4000 | CUcontext*
cuCtxSynchronize           | cuCtxSynchronize             |  2000 |
cuMemGetInfo               | cuMemGetInfo_v2              |  3020 | size_t*, size_t*
cuMemAlloc                 | cuMemAlloc_v2                |  3020 | CUdeviceptr*, size_t
cuMemFree                  | cuMemFree_v2                 |  3020 | CUdeviceptr
cuMemHostAlloc             | cuMemHostAlloc               |  2020 | void**, size_t, unsigned int
cuMemFreeHost              | cuMemFreeHost                |  2000 | void*
cuMemHostRegister          | cuMemHostRegister_v2         |  6050 | void*, size_t, unsigned int
cuMemHostUnregister        | cuMemHostUnregister          |  4000 | void*
cuMemHostGetDevicePointer  | cuMemHostGetDevicePointer_v2 |  3020 | CUdeviceptr*, void*, unsigned int
cuMemAllocManaged          | cuMemAllocManaged            |  6000 | CUdeviceptr*, size_t, unsigned int
cuPointerGetAttributes     | cuPointerGetAttributes       |  7000 | unsigned int, CUpointer_attribute*, void**, \
CUdeviceptr
cuStreamCreate             | cuStreamCreate               |  2000 | CUstream*, unsigned int
cuStreamDestroy            | cuStreamDestroy_v2           |  4000 | CUstream
cuStreamSynchronize        | cuStreamSynchronize          |  2000 | CUstream
cuStreamQuery              | cuStreamQuery                |  2000 | CUstream
cuStreamWaitEvent          | cuStreamWaitEvent            |  3020 | CUstream, CUevent, unsigned int
cuEventCreate              | cuEventCreate                |  2000 | CUevent*, unsigned int
cuEventDestroy             | cuEventDestroy_v2            |  4000 | CUevent
cuEventRecord              | cuEventRecord                |  2000 | CUevent, CUstream
cuEventQuery               | cuEventQuery                 |  2000 | CUevent
cuEventSynchronize         | cuEventSynchronize           |  2000 | CUevent
cuEventElapsedTime         | cuEventElapsedTime           |  2000 | float*, CUevent, CUevent
cuMemcpyAsync              | cuMemcpyAsync                |  4000 | CUdeviceptr, CUdeviceptr, size_t, CUstream
cuMemcpyHtoDAsync          | cuMemcpyHtoDAsync_v2         |  3020 | CUdeviceptr, const void*, size_t, CUstream
cuMemcpyDtoHAsync          | cuMemcpyDtoHAsync_v2         |  3020 | void*, CUdeviceptr, size_t, CUstream
cuMemcpyDtoDAsync          | cuMemcpyDtoDAsync_v2         |  3020 | CUdeviceptr, CUdeviceptr, size_t, CUstream
cuMemsetD8Async            | cuMemsetD8Async              |  3020 | CUdeviceptr, unsigned char, size_t, CUstream
cuMemsetD32Async           | cuMemsetD32Async             |  3020 | CUdeviceptr, unsigned int, size_t, CUstream
cuModuleLoadData           | cuModuleLoadData             |  2000 | CUmodule*, const void*
cuModuleUnload             | cuModuleUnload               |  2000 | CUmodule
cuModuleGetFunction        | cuModuleGetFunction          |  2000 | CUfunction*, CUmodule, const char*
cuLaunchKernel             | cuLaunchKernel               |  4000 | CUfunction, unsigned int, unsigned int, \
unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, CUstream, void**, void**
?cuFuncSetAttribute        | cuFuncSetAttribute           |  9000 | CUfunction, CUfunction_attribute, int
?cuTensorMapEncodeTiled    | cuTensorMapEncodeTiled       | 12000 | CUtensorMap*, CUtensorMapDataType, cuuint32_t, \
void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, \
CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill
?cuGraphCreate             | cuGraphCreate                | 10000 | CUgraph*, unsigned int
?cuGraphDestroy            | cuGraphDestroy               | 10000 | CUgraph
?cuGraphAddKernelNode      | cuGraphAddKernelNode_v2      | 12000 | CUgraphNode*, CUgraph, const CUgraphNode*, \
size_t, const CUDA_KERNEL_NODE_PARAMS*
?cuGraphAddMemcpyNode      | cuGraphAddMemcpyNode         | 10000 | CUgraphNode*, CUgraph, const CUgraphNode*, \
size_t, const CUDA_MEMCPY3D*, CUcontext
?cuGraphExecMemcpyNodeSetParams | cuGraphExecMemcpyNodeSetParams | 10020 | CUgraphExec, CUgraphNode, \
const CUDA_MEMCPY3D*, CUcontext
?cuGraphInstantiateWithFlags | cuGraphInstantiateWithFlags | 11040 | CUgraphExec*, CUgraph, unsigned long long
?cuGraphExecDestroy        | cuGraphExecDestroy           | 10000 | CUgraphExec
?cuGraphLaunch             | cuGraphLaunch                | 10000 | CUgraphExec, CUstream
?cuMemcpyBatchAsync        | cuMemcpyBatchAsync_v2        | 13000 | CUdeviceptr*, CUdeviceptr*, size_t*, size_t, \
CUmemcpyAttributes*, size_t*, size_t, CUstream
?cuMemcpyBatchAsync@12080  | cuMemcpyBatchAsync           | 12080 | CUdeviceptr*, CUdeviceptr*, size_t*, size_t, \
CUmemcpyAttributes*, size_t*, size_t, size_t*, CUstream
?cuMemAddressReserve       | cuMemAddressReserve          | 10020 | CUdeviceptr*, size_t, size_t, CUdeviceptr, \
unsigned long long
?cuMemAddressFree          | cuMemAddressFree             | 10020 | CUdeviceptr, size_t
?cuMemCreate               | cuMemCreate                  | 10020 | CUmemGenericAllocationHandle*, size_t, \
const CUmemAllocationProp*, unsigned long long
?cuMemRelease              | cuMemRelease                 | 10020 | CUmemGenericAllocationHandle
?cuMemMap                  | cuMemMap                     | 10020 | CUdeviceptr, size_t, size_t, \
CUmemGenericAllocationHandle, unsigned long long
?cuMemUnmap                | cuMemUnmap                   | 10020 | CUdeviceptr, size_t
?cuMemSetAccess            | cuMemSetAccess               | 10020 | CUdeviceptr, size_t, const CUmemAccessDesc*, size_t
?cuMemGetAllocationGranularity | cuMemGetAllocationGranularity | 10020 | size_t*, const CUmemAllocationProp*, \
CUmemAllocationGranularity_flags
"""


def _parse(table: str) -> dict[str, Entry]:
    entries = {}
    for line in table.strip().splitlines():
        key, symbol, version, arguments = (part.strip() for part in line.split("|"))
        kinds = tuple(kind.strip() for kind in arguments.split(",")) if arguments else ()
        optional, key = key.startswith("?"), key.lstrip("?")
        entries[key] = Entry(key.partition("@")[0], int(version), symbol, kinds, optional)
    return entries


ENTRIES = _parse(_TABLE)

# cuGetProcAddress itself cannot be asked for: the one plain symbol, new with CUDA 12.0.
GET_PROC_ADDRESS = Entry(
    "cuGetProcAddress", 12000, "cuGetProcAddress_v2",
    ("const char*", "void**", "int", "cuuint64_t", "CUdriverProcAddressQueryResult*"),
)  # fmt: skip


class MemLocation(ctypes.Structure):
    """CUmemLocation: ``type`` 1 device, 2 host, 3 NUMA node of the host; ``id`` its number."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class MemAllocationProp(ctypes.Structure):
    """CUmemAllocationProp. ``type`` 1 is pinned memory, the only one there is for cuMemCreate on a device."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", MemLocation),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", ctypes.c_ubyte * 8),
    )


class MemAccessDesc(ctypes.Structure):
    """CUmemAccessDesc. ``flags`` 3 is read and write."""

    _fields_ = (("location", MemLocation), ("flags", ctypes.c_int))


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. ``srcAccessOrder`` 1 stream order, 2 during the call, 3 any."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", MemLocation),
        ("dstLocHint", MemLocation),
        ("flags", ctypes.c_uint),
    )


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS as since CUDA 12.0. ``kern`` and ``ctx`` stay null where ``func`` is given."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("gridDimX", ctypes.c_uint),
        ("gridDimY", ctypes.c_uint),
        ("gridDimZ", ctypes.c_uint),
        ("blockDimX", ctypes.c_uint),
        ("blockDimY", ctypes.c_uint),
        ("blockDimZ", ctypes.c_uint),
        ("sharedMemBytes", ctypes.c_uint),
        ("kernelParams", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


def _end(side: str, reserved: str) -> tuple[tuple[str, Any], ...]:
    words = [(f"{side}{part}", ctypes.c_size_t) for part in ("XInBytes", "Y", "Z", "LOD")]
    return (
        *words, (f"{side}MemoryType", ctypes.c_int), (f"{side}Host", ctypes.c_void_p),
        (f"{side}Device", ctypes.c_uint64), (f"{side}Array", ctypes.c_void_p), (reserved, ctypes.c_void_p),
        (f"{side}Pitch", ctypes.c_size_t), (f"{side}Height", ctypes.c_size_t),
    )  # fmt: skip


class Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D. A copy between two addresses: memory type 4 (unified) on both sides, height and depth 1."""

    _fields_ = (
        *_end("src", "reserved0"),
        *_end("dst", "reserved1"),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
        ("Depth", ctypes.c_size_t),
    )


STRUCTURES: dict[str, Any] = {
    "CUDA_MEMCPY3D": Memcpy3D,
    "CUmemLocation": MemLocation,
    "CUmemAllocationProp": MemAllocationProp,
    "CUmemAccessDesc": MemAccessDesc,
    "CUmemcpyAttributes": MemcpyAttributes,
    "CUDA_KERNEL_NODE_PARAMS": KernelNodeParams,
}

# Numbers of cuda.h, under the names it gives them; the tests compare each with the header.
CONSTANTS: dict[str, int] = {
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16,
    "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE": 38,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
    "CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY": 83,
    "CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS": 89,
    "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 91,
    "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97,
    "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID": 134,
    "CU_POINTER_ATTRIBUTE_MEMORY_TYPE": 2,
    "CU_POINTER_ATTRIBUTE_DEVICE_POINTER": 3,
    "CU_POINTER_ATTRIBUTE_IS_MANAGED": 8,
    "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL": 9,
    "CU_MEMORYTYPE_HOST": 1,
    "CU_MEMORYTYPE_DEVICE": 2,
    "CU_MEMORYTYPE_UNIFIED": 4,
    "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8,
    "CU_TENSOR_MAP_DATA_TYPE_FLOAT32": 7,
    "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16": 9,
    "CU_TENSOR_MAP_SWIZZLE_128B": 3,
    "CU_TENSOR_MAP_L2_PROMOTION_L2_128B": 2,
    "CU_MEMHOSTALLOC_PORTABLE": 1,
    "CU_MEMHOSTALLOC_DEVICEMAP": 2,
    "CU_MEMHOSTREGISTER_PORTABLE": 1,
    "CU_MEMHOSTREGISTER_DEVICEMAP": 2,
    "CU_MEM_ATTACH_GLOBAL": 1,
    "CU_STREAM_NON_BLOCKING": 1,
    "CU_EVENT_DEFAULT": 0,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NO_DEVICE": 100,
    "CUDA_ERROR_NOT_READY": 600,
    "CUDA_ERROR_NOT_PERMITTED": 800,
    "CUDA_ERROR_NOT_SUPPORTED": 801,
}

# After these nothing works in this process any more: cuda.h says of each that the context or the process must end.
# ECC and NVLink errors carry no such sentence there, but what they left in memory cannot be told.
STICKY: dict[int, str] = {
    214: "CUDA_ERROR_ECC_UNCORRECTABLE",
    220: "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    226: "CUDA_ERROR_CONTAINED",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT",
    709: "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    710: "CUDA_ERROR_ASSERT",
    714: "CUDA_ERROR_HARDWARE_STACK_ERROR",
    715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    717: "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    721: "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    810: "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    911: "CUDA_ERROR_EXTERNAL_DEVICE",
}
