// What is used of the CUDA driver API, declared here so that no CUDA header is needed to build.
// Layouts and numbers are the driver's ABI; tests/cuda_abi.cpp holds them against cuda.h where
// there is one.
#ifndef HOTBUNK_POOL_CUDA_API_H
#define HOTBUNK_POOL_CUDA_API_H

#include <cstddef>
#include <cstdint>

namespace hb::cuda {

using Result = int;
using Device = int;
using Context = struct ContextOpaque *;
using Address = unsigned long long;
using Handle = unsigned long long;

constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2;
constexpr int kAllocationPinned = 1, kLocationDevice = 1, kRead = 1, kReadWrite = 3, kGranularityMinimum = 0;
constexpr int kAttributeVmm = 102, kAttributeFdHandles = 103, kAttributeRdma = 110;
constexpr int kHandleNone = 0, kHandleFd = 1;

struct Location {
  int type;
  int id;
};

struct AllocationProp {
  int type;
  int requested_handle_types;
  Location location;
  void *win32_handle_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } alloc_flags;
};

struct AccessDesc {
  Location location;
  int flags;
};

// name of the member, exported symbol, parameters
#define HB_CUDA_FUNCTIONS(X)                                                                \
  X(init, "cuInit", (unsigned flags))                                                       \
  X(get_error_string, "cuGetErrorString", (Result error, const char **text))                \
  X(device_get, "cuDeviceGet", (Device * device, int ordinal))                              \
  X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, Device device))   \
  X(retain, "cuDevicePrimaryCtxRetain", (Context * context, Device device))                 \
  X(drop, "cuDevicePrimaryCtxRelease_v2", (Device device))                                  \
  X(push, "cuCtxPushCurrent_v2", (Context context))                                         \
  X(pop, "cuCtxPopCurrent_v2", (Context * context))                                         \
  X(synchronize, "cuCtxSynchronize", ())                                                    \
  X(granularity, "cuMemGetAllocationGranularity",                                           \
    (size_t * size, const AllocationProp *prop, int option))                                \
  X(reserve, "cuMemAddressReserve",                                                         \
    (Address * address, size_t size, size_t alignment, Address hint, unsigned long long f)) \
  X(unreserve, "cuMemAddressFree", (Address address, size_t size))                          \
  X(create, "cuMemCreate",                                                                  \
    (Handle * handle, size_t size, const AllocationProp *prop, unsigned long long flags))   \
  X(release, "cuMemRelease", (Handle handle))                                               \
  X(map, "cuMemMap",                                                                        \
    (Address address, size_t size, size_t offset, Handle handle, unsigned long long flags)) \
  X(set_access, "cuMemSetAccess",                                                           \
    (Address address, size_t size, const AccessDesc *desc, size_t count))                   \
  X(unmap, "cuMemUnmap", (Address address, size_t size))                                    \
  X(export_handle, "cuMemExportToShareableHandle",                                           \
    (void *shareable, Handle handle, int type, unsigned long long flags))                   \
  X(import_handle, "cuMemImportFromShareableHandle",                                        \
    (Handle * handle, void *shareable, int type))                                           \
  X(to_host, "cuMemcpyDtoH_v2", (void *to, Address from, size_t size))                      \
  X(from_host, "cuMemcpyHtoD_v2", (Address to, const void *from, size_t size))              \
  X(fill, "cuMemsetD8_v2", (Address to, unsigned char value, size_t size))                  \
  X(info, "cuMemGetInfo_v2", (size_t *free, size_t *total))                                 \
  X(host_alloc, "cuMemHostAlloc", (void **memory, size_t size, unsigned flags))             \
  X(host_free, "cuMemFreeHost", (void *memory))

struct Api {
#define HB_MEMBER(name, symbol, parameters) Result(*name) parameters = nullptr;
  HB_CUDA_FUNCTIONS(HB_MEMBER)
#undef HB_MEMBER
};

}  // namespace hb::cuda

#endif  // HOTBUNK_POOL_CUDA_API_H
