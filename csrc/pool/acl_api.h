// What is used of Ascend's ACL, declared here so that no CANN header is needed to build.
// Layouts and numbers are its ABI; scripts/check_acl.sh holds them against the headers of the
// torch-npu wheel.
#ifndef HOTBUNK_POOL_ACL_API_H
#define HOTBUNK_POOL_ACL_API_H

#include <cstddef>
#include <cstdint>

namespace hb::acl {

using Error = int;
using Handle = void *;
using Context = void *;

constexpr Error kSuccess = 0, kRepeatedInit = 100002, kOutOfMemory = 207001, kBadAlloc = 200000;
constexpr int kHandleNone = 0, kAllocationPinned = 0, kLocationDevice = 1;
constexpr int kHbm = 1, kHbmHuge = 4, kGranularityMinimum = 0;
constexpr int kHostToDevice = 1, kDeviceToHost = 2;

struct Location {
  uint32_t id;
  int type;
};

struct PhysicalProp {
  int handle_type;
  int allocation_type;
  int attribute;
  Location location;
  uint64_t reserve;
};

// name of the member, exported symbol, result, parameters. Enumerations travel as int.
#define HB_ACL_FUNCTIONS(X)                                                                    \
  X(init, aclInit, Error, (const char *config))                                                \
  X(recent_error, aclGetRecentErrMsg, const char *, ())                                        \
  X(set_device, aclrtSetDevice, Error, (int32_t device))                                       \
  X(get_context, aclrtGetCurrentContext, Error, (Context * context))                           \
  X(set_context, aclrtSetCurrentContext, Error, (Context context))                             \
  X(synchronize, aclrtSynchronizeDevice, Error, ())                                            \
  X(granularity, aclrtMemGetAllocationGranularity, Error,                                      \
    (PhysicalProp * prop, int option, size_t *size))                                           \
  X(reserve, aclrtReserveMemAddress, Error,                                                    \
    (void **address, size_t size, size_t alignment, void *hint, uint64_t flags))               \
  X(unreserve, aclrtReleaseMemAddress, Error, (void *address))                                 \
  X(create, aclrtMallocPhysical, Error,                                                        \
    (Handle * handle, size_t size, const PhysicalProp *prop, uint64_t flags))                  \
  X(release, aclrtFreePhysical, Error, (Handle handle))                                        \
  X(map, aclrtMapMem, Error,                                                                   \
    (void *address, size_t size, size_t offset, Handle handle, uint64_t flags))                \
  X(unmap, aclrtUnmapMem, Error, (void *address))                                              \
  X(copy, aclrtMemcpy, Error, (void *to, size_t room, const void *from, size_t size, int kind)) \
  X(fill, aclrtMemset, Error, (void *to, size_t room, int32_t value, size_t size))             \
  X(info, aclrtGetMemInfo, Error, (int attribute, size_t *free, size_t *total))                \
  X(host_alloc, aclrtMallocHost, Error, (void **memory, size_t size))                          \
  X(host_free, aclrtFreeHost, Error, (void *memory))

// The same, of newer libraries: a pool works without them, and cannot share its memory.
#define HB_ACL_SHARING(X)                                                                      \
  X(export_handle, aclrtMemExportToShareableHandle, Error,                                     \
    (Handle handle, int type, uint64_t flags, uint64_t *shareable))                            \
  X(import_handle, aclrtMemImportFromShareableHandle, Error,                                   \
    (uint64_t shareable, int32_t device, Handle * handle))                                     \
  X(allow, aclrtMemSetPidToShareableHandle, Error,                                             \
    (uint64_t shareable, int32_t * pids, size_t count))

struct Api {
#define HB_MEMBER(name, symbol, result, parameters) result(*name) parameters = nullptr;
  HB_ACL_FUNCTIONS(HB_MEMBER)
  HB_ACL_SHARING(HB_MEMBER)
#undef HB_MEMBER
};

}  // namespace hb::acl

#endif  // HOTBUNK_POOL_ACL_API_H
