// Our declarations of ACL against its own headers; see scripts/check_acl.sh. Compiled, never run.
#include <acl/acl.h>
#include <acl/acl_rt.h>

#include <cstddef>

#include "../pool/acl_api.h"
#include "same.h"

namespace ours = hb::acl;

static_assert(sizeof(ours::PhysicalProp) == sizeof(aclrtPhysicalMemProp));
static_assert(offsetof(ours::PhysicalProp, handle_type) ==
              offsetof(aclrtPhysicalMemProp, handleType));
static_assert(offsetof(ours::PhysicalProp, allocation_type) ==
              offsetof(aclrtPhysicalMemProp, allocationType));
static_assert(offsetof(ours::PhysicalProp, attribute) == offsetof(aclrtPhysicalMemProp, memAttr));
static_assert(offsetof(ours::PhysicalProp, location) == offsetof(aclrtPhysicalMemProp, location));
static_assert(offsetof(ours::PhysicalProp, reserve) == offsetof(aclrtPhysicalMemProp, reserve));
static_assert(sizeof(ours::Location) == sizeof(aclrtMemLocation));
static_assert(offsetof(ours::Location, type) == offsetof(aclrtMemLocation, type));
static_assert(sizeof(ours::Handle) == sizeof(aclrtDrvMemHandle));
static_assert(sizeof(ours::Error) == sizeof(aclError));
static_assert(ours::kSuccess == ACL_SUCCESS);
static_assert(ours::kRepeatedInit == ACL_ERROR_REPEAT_INITIALIZE);
static_assert(ours::kOutOfMemory == ACL_ERROR_RT_MEMORY_ALLOCATION);
static_assert(ours::kBadAlloc == ACL_ERROR_BAD_ALLOC);
static_assert(ours::kHandleNone == ACL_MEM_HANDLE_TYPE_NONE);
static_assert(ours::kAllocationPinned == ACL_MEM_ALLOCATION_TYPE_PINNED);
static_assert(ours::kLocationDevice == ACL_MEM_LOCATION_TYPE_DEVICE);
static_assert(ours::kHbm == ACL_HBM_MEM);
static_assert(ours::kHbmHuge == ACL_HBM_MEM_HUGE);
static_assert(ours::kGranularityMinimum == ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(ours::kHostToDevice == ACL_MEMCPY_HOST_TO_DEVICE);
static_assert(ours::kDeviceToHost == ACL_MEMCPY_DEVICE_TO_HOST);

#define HB_SAME(member, function) \
  static_assert(Same<decltype(ours::Api::member), decltype(function)>::value)

HB_SAME(init, aclInit);
HB_SAME(recent_error, aclGetRecentErrMsg);
HB_SAME(set_device, aclrtSetDevice);
HB_SAME(get_context, aclrtGetCurrentContext);
HB_SAME(set_context, aclrtSetCurrentContext);
HB_SAME(synchronize, aclrtSynchronizeDevice);
HB_SAME(granularity, aclrtMemGetAllocationGranularity);
HB_SAME(reserve, aclrtReserveMemAddress);
HB_SAME(unreserve, aclrtReleaseMemAddress);
HB_SAME(create, aclrtMallocPhysical);
HB_SAME(release, aclrtFreePhysical);
HB_SAME(map, aclrtMapMem);
HB_SAME(unmap, aclrtUnmapMem);
HB_SAME(copy, aclrtMemcpy);
HB_SAME(fill, aclrtMemset);
HB_SAME(info, aclrtGetMemInfo);
HB_SAME(host_alloc, aclrtMallocHost);
HB_SAME(host_free, aclrtFreeHost);
HB_SAME(export_handle, aclrtMemExportToShareableHandle);
HB_SAME(import_handle, aclrtMemImportFromShareableHandle);
HB_SAME(allow, aclrtMemSetPidToShareableHandle);
