// libcuda.so.1 for machines without a GPU: the symbols the CUDA path uses, over host memory, with
// the fake device's controls. Loaded in place of the real one; never shipped.
#include <cstdlib>
#include <cstring>

#include "../pool/cuda_api.h"
#include "../pool/fake_device.h"

namespace {

using namespace hb::cuda;

hb::FakeDevice &device() {
  static hb::FakeDevice made(uint64_t{256} << 20);
  return made;
}

int64_t pinned = 0;
thread_local int64_t depth = 0;  // of the context stack
Context const context = reinterpret_cast<Context>(0x1234);

// Real drivers refuse calls without a current context.
Result with_context(const char *name) {
  if (int code = device().enter(name)) return code;
  return depth > 0 ? kSuccess : 201;
}

#define HB_ENTER(name)                                 \
  do {                                                 \
    if (Result error = with_context(name)) return error; \
  } while (0)

}  // namespace

#define HB_EXPORT extern "C" __attribute__((visibility("default")))

HB_EXPORT Result cuInit(unsigned) { return device().enter("cuInit"); }

HB_EXPORT Result cuGetErrorString(Result error, const char **text) {
  *text = error == kOutOfMemory ? "out of memory" : "a fake error";
  return kSuccess;
}

HB_EXPORT Result cuDeviceGet(Device *found, int ordinal) {
  *found = ordinal;
  return ordinal == 0 ? device().enter("cuDeviceGet") : 101;
}

HB_EXPORT Result cuDeviceGetAttribute(int *value, int attribute, Device) {
  *value = attribute == kAttributeVmm || attribute == kAttributeFdHandles;
  return device().enter("cuDeviceGetAttribute");
}

HB_EXPORT Result cuDevicePrimaryCtxRetain(Context *made, Device) {
  *made = context;
  return device().enter("cuDevicePrimaryCtxRetain");
}

HB_EXPORT Result cuDevicePrimaryCtxRelease_v2(Device) {
  return device().enter("cuDevicePrimaryCtxRelease");
}

HB_EXPORT Result cuCtxPushCurrent_v2(Context) {
  if (int code = device().enter("cuCtxPushCurrent")) return code;
  ++depth;
  return kSuccess;
}

HB_EXPORT Result cuCtxPopCurrent_v2(Context *popped) {
  if (depth < 1) return 201;
  --depth;
  *popped = context;
  return kSuccess;
}

HB_EXPORT Result cuCtxSynchronize() { return with_context("cuCtxSynchronize"); }

HB_EXPORT Result cuMemGetAllocationGranularity(size_t *size, const AllocationProp *prop, int) {
  HB_ENTER("cuMemGetAllocationGranularity");
  *size = hb::FakeDevice::kGranularity;
  return prop->type == kAllocationPinned ? kSuccess : kInvalidValue;
}

HB_EXPORT Result cuMemAddressReserve(Address *address, size_t size, size_t, Address,
                                     unsigned long long) {
  HB_ENTER("cuMemAddressReserve");
  uint64_t found = 0;
  if (size % hb::FakeDevice::kGranularity) return kInvalidValue;
  if (!device().reserve(size, &found)) return kOutOfMemory;
  *address = found;
  return kSuccess;
}

HB_EXPORT Result cuMemAddressFree(Address address, size_t) {
  HB_ENTER("cuMemAddressFree");
  device().unreserve(address);
  return kSuccess;
}

HB_EXPORT Result cuMemCreate(Handle *handle, size_t size, const AllocationProp *prop,
                             unsigned long long) {
  HB_ENTER("cuMemCreate");
  if (prop->requested_handle_types != kHandleFd) return kInvalidValue;
  uint64_t made = 0;
  if (!device().create(size, &made)) return kOutOfMemory;
  *handle = made - 1;  // 0 is a valid handle of the real driver, too
  return kSuccess;
}

HB_EXPORT Result cuMemRelease(Handle handle) {
  HB_ENTER("cuMemRelease");
  return device().destroy(handle + 1) ? kSuccess : kInvalidValue;
}

HB_EXPORT Result cuMemMap(Address address, size_t size, size_t, Handle handle,
                          unsigned long long) {
  HB_ENTER("cuMemMap");
  return device().map(address, size, handle + 1, PROT_NONE) ? kSuccess : kInvalidValue;
}

HB_EXPORT Result cuMemSetAccess(Address address, size_t size, const AccessDesc *desc, size_t) {
  HB_ENTER("cuMemSetAccess");
  if (desc->flags != kReadWrite && desc->flags != kRead) return kInvalidValue;
  return device().access(address, size, desc->flags == kReadWrite) ? kSuccess : kInvalidValue;
}

HB_EXPORT Result cuMemUnmap(Address address, size_t) {
  HB_ENTER("cuMemUnmap");
  return device().unmap(address) ? kSuccess : kInvalidValue;
}

HB_EXPORT Result cuMemExportToShareableHandle(void *shareable, Handle handle, int type,
                                              unsigned long long) {
  HB_ENTER("cuMemExportToShareableHandle");
  int fd = type == kHandleFd ? device().export_file(handle + 1) : -1;
  if (fd < 0) return kInvalidValue;
  *static_cast<int *>(shareable) = fd;
  return kSuccess;
}

HB_EXPORT Result cuMemImportFromShareableHandle(Handle *handle, void *shareable, int type) {
  HB_ENTER("cuMemImportFromShareableHandle");
  // The driver knows the size itself: here it is the file's.
  int fd = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
  off_t size = lseek(fd, 0, SEEK_END);
  uint64_t made = 0;
  if (type != kHandleFd || size < 0 || !device().import_file(fd, size, &made)) return kInvalidValue;
  *handle = made - 1;
  return kSuccess;
}

HB_EXPORT Result cuMemcpyDtoH_v2(void *to, Address from, size_t size) {
  HB_ENTER("cuMemcpyDtoH");
  memcpy(to, hb::pointer(from), size);
  return kSuccess;
}

HB_EXPORT Result cuMemcpyHtoD_v2(Address to, const void *from, size_t size) {
  HB_ENTER("cuMemcpyHtoD");
  memcpy(hb::pointer(to), from, size);
  return kSuccess;
}

HB_EXPORT Result cuMemsetD8_v2(Address to, unsigned char value, size_t size) {
  HB_ENTER("cuMemsetD8");
  memset(hb::pointer(to), value, size);
  return kSuccess;
}

HB_EXPORT Result cuMemGetInfo_v2(size_t *free, size_t *total) {
  HB_ENTER("cuMemGetInfo");
  uint64_t left = 0, all = 0;
  device().info(&left, &all);
  *free = left;
  *total = all;
  return kSuccess;
}

HB_EXPORT Result cuMemHostAlloc(void **memory, size_t size, unsigned) {
  HB_ENTER("cuMemHostAlloc");
  *memory = malloc(size);
  __atomic_add_fetch(&pinned, 1, __ATOMIC_RELAXED);
  return kSuccess;
}

HB_EXPORT Result cuMemFreeHost(void *memory) {
  HB_ENTER("cuMemFreeHost");
  free(memory);
  __atomic_sub_fetch(&pinned, 1, __ATOMIC_RELAXED);
  return kSuccess;
}

// -- controls, as of the fake driver; codes are CUresults

HB_EXPORT void fake_cuda_fail(const char *function, uint64_t nth, int code) {
  device().fail(function, nth, code);
}

HB_EXPORT void fake_cuda_lie(uint64_t bytes, uint64_t after, uint64_t looks) {
  device().lie(bytes, after, looks);
}

HB_EXPORT int64_t fake_cuda_count(const char *what) {
  std::string name = what;
  if (name == "pinned") return __atomic_load_n(&pinned, __ATOMIC_RELAXED);
  if (name == "contexts") return depth;
  return device().count(name);
}
