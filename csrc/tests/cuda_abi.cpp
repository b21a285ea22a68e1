// Our declarations of the CUDA driver API against cuda.h. Compiled where there is one, never run.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "../pool/cuda_api.h"
#include "same.h"

namespace ours = hb::cuda;

static_assert(sizeof(ours::AllocationProp) == sizeof(CUmemAllocationProp));
static_assert(alignof(ours::AllocationProp) == alignof(CUmemAllocationProp));
static_assert(offsetof(ours::AllocationProp, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(ours::AllocationProp, alloc_flags) ==
              offsetof(CUmemAllocationProp, allocFlags));
static_assert(offsetof(ours::AllocationProp, alloc_flags.gpu_direct_rdma_capable) ==
              offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
static_assert(sizeof(ours::AccessDesc) == sizeof(CUmemAccessDesc));
static_assert(offsetof(ours::AccessDesc, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(std::is_same_v<ours::Address, CUdeviceptr>);
static_assert(std::is_same_v<ours::Handle, CUmemGenericAllocationHandle>);
static_assert(std::is_same_v<ours::Device, CUdevice>);
static_assert(sizeof(ours::Result) == sizeof(CUresult));
static_assert(ours::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(ours::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(ours::kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(ours::kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(ours::kRead == CU_MEM_ACCESS_FLAGS_PROT_READ);
static_assert(ours::kReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(ours::kGranularityMinimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(ours::kAttributeVmm == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(ours::kAttributeRdma ==
              CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);

#define HB_SAME(member, function) \
  static_assert(Same<decltype(ours::Api::member), decltype(function)>::value)

HB_SAME(init, cuInit);
HB_SAME(get_error_string, cuGetErrorString);
HB_SAME(device_get, cuDeviceGet);
HB_SAME(device_attribute, cuDeviceGetAttribute);
HB_SAME(retain, cuDevicePrimaryCtxRetain);
HB_SAME(drop, cuDevicePrimaryCtxRelease);
HB_SAME(push, cuCtxPushCurrent);
HB_SAME(pop, cuCtxPopCurrent);
HB_SAME(synchronize, cuCtxSynchronize);
HB_SAME(granularity, cuMemGetAllocationGranularity);
HB_SAME(reserve, cuMemAddressReserve);
HB_SAME(unreserve, cuMemAddressFree);
HB_SAME(create, cuMemCreate);
HB_SAME(release, cuMemRelease);
HB_SAME(map, cuMemMap);
HB_SAME(set_access, cuMemSetAccess);
HB_SAME(unmap, cuMemUnmap);
static_assert(ours::kAttributeFdHandles ==
              CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(ours::kHandleFd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(offsetof(ours::AllocationProp, requested_handle_types) ==
              offsetof(CUmemAllocationProp, requestedHandleTypes));
HB_SAME(export_handle, cuMemExportToShareableHandle);
HB_SAME(import_handle, cuMemImportFromShareableHandle);
HB_SAME(to_host, cuMemcpyDtoH);
HB_SAME(from_host, cuMemcpyHtoD);
HB_SAME(fill, cuMemsetD8);
HB_SAME(info, cuMemGetInfo);
HB_SAME(host_alloc, cuMemHostAlloc);
HB_SAME(host_free, cuMemFreeHost);
