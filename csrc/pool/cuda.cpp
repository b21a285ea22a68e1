// NVIDIA memory through the driver API: physical memory in handles, mapped into reserved ranges.
// The driver is opened with dlopen when a pool asks for it, never linked.
#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "cuda_api.h"
#include "driver.h"

namespace hb {
namespace {

using namespace cuda;

class CudaDriver : public Driver {
 public:
  CudaDriver() {
    addressable = direct = false;
    fresh_is_zero = false;
    per_process = false;
  }

  ~CudaDriver() override {
    if (context_) api_.drop(device_);
    // The library stays open: others in this process use it, and drivers do not survive dlclose.
  }

  Status open(int ordinal, const char *library) {
    const char *path = library && *library ? library : getenv("HOTBUNK_CUDA_LIBRARY");
    if (!path || !*path) path = "libcuda.so.1";
    void *loaded = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!loaded) return unavailable(std::string("no CUDA driver: ") + dlerror());
#define HB_LOAD(name, symbol, parameters)                                   \
  api_.name = reinterpret_cast<decltype(api_.name)>(dlsym(loaded, symbol)); \
  if (!api_.name) return unavailable(std::string(path) + " has no " + symbol);
    HB_CUDA_FUNCTIONS(HB_LOAD)
#undef HB_LOAD
    if (Result error = api_.init(0)) return unavailable(said("cuInit", error));
    if (Result error = api_.device_get(&device_, ordinal))
      return unavailable(said("cuDeviceGet", error));
    int able = 0;
    if (api_.device_attribute(&able, kAttributeVmm, device_) || !able)
      return unavailable("CUDA device " + std::to_string(ordinal) +
                         " has no virtual memory management");
    prop_ = {};
    prop_.type = kAllocationPinned;
    prop_.location = {kLocationDevice, device_};
    int rdma = 0;  // transports may register what lies here
    if (!api_.device_attribute(&rdma, kAttributeRdma, device_) && rdma)
      prop_.alloc_flags.gpu_direct_rdma_capable = 1;
    int fds = 0;  // memory that can be passed to another process must be made for it
    if (!api_.device_attribute(&fds, kAttributeFdHandles, device_) && fds)
      prop_.requested_handle_types = kHandleFd;
    // The primary context is the one that torch uses: addresses are valid in both.
    if (Result error = api_.retain(&context_, device_)) {
      context_ = nullptr;
      return unavailable(said("cuDevicePrimaryCtxRetain", error));
    }
    size_t unit = 0;
    Status status = call("cuMemGetAllocationGranularity",
                         [&] { return api_.granularity(&unit, &prop_, kGranularityMinimum); });
    if (status.failed()) return unavailable(status.text);
    granularity = unit;
    kind = "cuda:" + std::to_string(ordinal);
    return {};
  }

  Status reserve(uint64_t size, uint64_t *address) override {
    Address found = 0;
    Status status = call("cuMemAddressReserve",
                         [&] { return api_.reserve(&found, size, 0, 0, 0); }, size);
    if (status.failed()) return status;
    *address = found;
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[found] = size;
    return {};
  }

  void unreserve(uint64_t address) override {
    size_t size = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = sizes_.find(address);
      if (found == sizes_.end()) return;
      size = found->second;
      sizes_.erase(found);
    }
    call("cuMemAddressFree", [&] { return api_.unreserve(address, size); });
  }

  Status create(uint64_t, uint64_t size, uint64_t *handle) override {
    Handle made = 0;
    Status status =
        call("cuMemCreate", [&] { return api_.create(&made, size, &prop_, 0); }, size);
    if (!status.failed()) *handle = made + 1;  // the driver does not promise that 0 is none
    return status;
  }

  Status destroy(uint64_t, uint64_t handle) override {
    return call("cuMemRelease", [&] { return api_.release(handle - 1); });
  }

  Status map(uint64_t address, uint64_t size, uint64_t *handle) override {
    return map_for(address, size, *handle, kReadWrite);
  }

  Status map_read_only(uint64_t address, uint64_t size, uint64_t *handle) override {
    return map_for(address, size, *handle, kRead);
  }

  Status map_for(uint64_t address, uint64_t size, uint64_t handle, int flags) {
    Status status =
        call("cuMemMap", [&] { return api_.map(address, size, 0, handle - 1, 0); }, size);
    if (status.failed()) return status;
    AccessDesc access{{kLocationDevice, device_}, flags};
    status = call("cuMemSetAccess", [&] { return api_.set_access(address, size, &access, 1); }, size);
    if (status.failed()) call("cuMemUnmap", [&] { return api_.unmap(address, size); });
    return status;
  }

  Status unmap(uint64_t address, uint64_t size, uint64_t *) override {
    return call("cuMemUnmap", [&] { return api_.unmap(address, size); });
  }

  Status to_host(void *to, uint64_t from, uint64_t size) override {
    return call("cuMemcpyDtoH", [&] { return api_.to_host(to, from, size); });
  }

  Status from_host(uint64_t to, const void *from, uint64_t size) override {
    return call("cuMemcpyHtoD", [&] { return api_.from_host(to, from, size); });
  }

  Status zero(uint64_t to, uint64_t size) override {
    return call("cuMemsetD8", [&] { return api_.fill(to, 0, size); });
  }

  Status sync() override {
    return call("cuCtxSynchronize", [&] { return api_.synchronize(); });
  }

  Status info(uint64_t *free, uint64_t *total) override {
    size_t left = 0, all = 0;
    Status status = call("cuMemGetInfo", [&] { return api_.info(&left, &all); });
    *free = left;
    *total = all;
    return status;
  }

  Status export_memory(uint64_t, uint64_t handle, hb_shared *shared) override {
    if (prop_.requested_handle_types != kHandleFd)
      return unavailable(kind + " has no handles for other processes");
    int fd = -1;
    Status status = call("cuMemExportToShareableHandle",
                         [&] { return api_.export_handle(&fd, handle - 1, kHandleFd, 0); });
    if (!status.failed()) shared->fd = fd;
    return status;
  }

  Status import_memory(const hb_shared &shared, uint64_t *handle) override {
    Handle made = 0;
    void *fd = reinterpret_cast<void *>(static_cast<intptr_t>(shared.fd));
    Status status = call("cuMemImportFromShareableHandle",
                         [&] { return api_.import_handle(&made, fd, kHandleFd); });
    if (!status.failed()) *handle = made + 1;
    return status;
  }

  // Page-locked, so that copies run at the speed of the bus.
  void *staging(uint64_t size) override {
    void *memory = nullptr;
    Status status = call("cuMemHostAlloc", [&] { return api_.host_alloc(&memory, size, 0); });
    return status.failed() ? nullptr : memory;
  }

  void free_staging(void *memory) override {
    call("cuMemFreeHost", [&] { return api_.host_free(memory); });
  }

 private:
  static Status unavailable(const std::string &why) {
    return Status::error(HB_E_UNAVAILABLE, why);
  }

  std::string said(const char *function, Result error) const {
    const char *text = nullptr;
    api_.get_error_string(error, &text);
    return std::string(function) + ": " + (text ? text : "unknown error") + " (" +
           std::to_string(error) + ")";
  }

  // Within our context; the caller's own is current again afterwards.
  template <typename Call>
  Status call(const char *function, Call run, uint64_t size = 0) {
    if (Result error = api_.push(context_))
      return Status::error(HB_E_DRIVER, said("cuCtxPushCurrent", error), error);
    Result error = run();
    size_t free = 0, total = 0;
    if (error == kOutOfMemory) api_.info(&free, &total);
    Context popped = nullptr;
    api_.pop(&popped);
    if (!error) return {};
    Status status = Status::error(error == kOutOfMemory ? HB_E_NOMEM : HB_E_DRIVER,
                                  kind + ": " + said(function, error), error);
    status.needed = size;
    status.free = free;
    return status;
  }

  Api api_;
  Device device_ = 0;
  Context context_ = nullptr;
  AllocationProp prop_{};
  std::mutex mutex_;
  std::map<uint64_t, size_t> sizes_;
};

}  // namespace

Status cuda_driver(int device, const char *library, std::unique_ptr<Driver> *driver) {
  auto made = std::make_unique<CudaDriver>();
  Status status = made->open(device, library);
  if (!status.failed()) *driver = std::move(made);
  return status;
}

}  // namespace hb
