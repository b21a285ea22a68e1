// Ascend memory through ACL: as CUDA's, with handles mapped into reserved ranges.
#include <dlfcn.h>

#include <cstdlib>

#include "acl_api.h"
#include "driver.h"
#include "ranges.h"

namespace hb {
namespace {

using namespace acl;

class AclDriver : public Driver {
 public:
  AclDriver() {
    addressable = direct = false;
    fresh_is_zero = false;
    per_process = false;
  }

  Status open(int device, const char *library) {
    const char *path = library && *library ? library : getenv("HOTBUNK_ACL_LIBRARY");
    if (!path || !*path) path = "libascendcl.so";
    void *loaded = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!loaded) return unavailable(std::string("no ACL library: ") + dlerror());
#define HB_LOAD(name, symbol, result, parameters)                            \
  api_.name = reinterpret_cast<decltype(api_.name)>(dlsym(loaded, #symbol)); \
  if (!api_.name) return unavailable(std::string(path) + " has no " #symbol);
    HB_ACL_FUNCTIONS(HB_LOAD)
#undef HB_LOAD
#define HB_LOAD(name, symbol, result, parameters) \
  api_.name = reinterpret_cast<decltype(api_.name)>(dlsym(loaded, #symbol));
    HB_ACL_SHARING(HB_LOAD)
#undef HB_LOAD
    Error error = api_.init(nullptr);
    if (error && error != kRepeatedInit) return unavailable(said("aclInit", error));
    Context before = nullptr;  // none is an error, too, and means the same
    bool had = !api_.get_context(&before) && before;
    error = api_.set_device(device);
    if (!error) error = api_.get_context(&context_);
    if (had) api_.set_context(before);
    if (error) return unavailable(said("aclrtSetDevice", error));
    prop_ = {};
    prop_.handle_type = kHandleNone;
    prop_.allocation_type = kAllocationPinned;
    prop_.attribute = kHbmHuge;
    prop_.location = {static_cast<uint32_t>(device), kLocationDevice};
    size_t unit = 0;
    Status status = call("aclrtMemGetAllocationGranularity",
                         [&] { return api_.granularity(&prop_, kGranularityMinimum, &unit); });
    if (status.failed()) return unavailable(status.text);
    granularity = unit;
    device_ = device;
    kind = "acl:" + std::to_string(device);
    return {};
  }

  Status reserve(uint64_t size, uint64_t *address) override {
    void *found = nullptr;
    Status status = call("aclrtReserveMemAddress",
                         [&] { return api_.reserve(&found, size, 0, nullptr, 0); }, size);
    *address = reinterpret_cast<uint64_t>(found);
    return status;
  }

  void unreserve(uint64_t address) override {
    call("aclrtReleaseMemAddress", [&] { return api_.unreserve(pointer(address)); });
  }

  Status create(uint64_t, uint64_t size, uint64_t *handle) override {
    Handle made = nullptr;
    Status status =
        call("aclrtMallocPhysical", [&] { return api_.create(&made, size, &prop_, 0); }, size);
    if (!status.failed()) *handle = reinterpret_cast<uint64_t>(made);
    return status;
  }

  Status destroy(uint64_t, uint64_t handle) override {
    return call("aclrtFreePhysical", [&] { return api_.release(pointer(handle)); });
  }

  Status map(uint64_t address, uint64_t size, uint64_t *handle) override {
    return call("aclrtMapMem", [&] {
      return api_.map(pointer(address), size, 0, pointer(*handle), 0);
    });
  }

  Status unmap(uint64_t address, uint64_t, uint64_t *) override {
    return call("aclrtUnmapMem", [&] { return api_.unmap(pointer(address)); });
  }

  Status to_host(void *to, uint64_t from, uint64_t size) override {
    return call("aclrtMemcpy",
                [&] { return api_.copy(to, size, pointer(from), size, kDeviceToHost); });
  }

  Status from_host(uint64_t to, const void *from, uint64_t size) override {
    return call("aclrtMemcpy",
                [&] { return api_.copy(pointer(to), size, from, size, kHostToDevice); });
  }

  Status zero(uint64_t to, uint64_t size) override {
    return call("aclrtMemset", [&] { return api_.fill(pointer(to), size, 0, size); });
  }

  Status sync() override {
    return call("aclrtSynchronizeDevice", [&] { return api_.synchronize(); });
  }

  Status info(uint64_t *free, uint64_t *total) override {
    size_t left = 0, all = 0;
    Status status = call("aclrtGetMemInfo", [&] { return api_.info(kHbm, &left, &all); });
    *free = left;
    *total = all;
    return status;
  }

  // A handle is a number here, and good for the processes that its owner names.
  Status export_memory(uint64_t, uint64_t handle, hb_shared *shared) override {
    if (!api_.export_handle || !api_.allow)
      return unavailable(kind + ": this ACL library has no handles for other processes");
    Status status = call("aclrtMemExportToShareableHandle", [&] {
      return api_.export_handle(pointer(handle), kHandleNone, 0, &shared->number);
    });
    if (status.failed()) return status;
    int32_t peer = shared->peer;
    return call("aclrtMemSetPidToShareableHandle",
                [&] { return api_.allow(shared->number, &peer, 1); });
  }

  Status import_memory(const hb_shared &shared, uint64_t *handle) override {
    if (!api_.import_handle)
      return unavailable(kind + ": this ACL library has no handles of other processes");
    Handle made = nullptr;
    Status status = call("aclrtMemImportFromShareableHandle", [&] {
      return api_.import_handle(shared.number, device_, &made);
    });
    if (!status.failed()) *handle = reinterpret_cast<uint64_t>(made);
    return status;
  }

  void *staging(uint64_t size) override {
    void *memory = nullptr;
    Status status = call("aclrtMallocHost", [&] { return api_.host_alloc(&memory, size); });
    return status.failed() ? nullptr : memory;
  }

  void free_staging(void *memory) override {
    call("aclrtFreeHost", [&] { return api_.host_free(memory); });
  }

 private:
  static Status unavailable(const std::string &why) {
    return Status::error(HB_E_UNAVAILABLE, why);
  }

  std::string said(const char *function, Error error) const {
    const char *text = api_.recent_error ? api_.recent_error() : nullptr;
    return std::string(function) + ": error " + std::to_string(error) +
           (text ? std::string(": ") + text : "");
  }

  // Within our device's context; the caller's own is current again afterwards.
  template <typename Call>
  Status call(const char *function, Call run, uint64_t size = 0) {
    Context before = nullptr;
    bool had = !api_.get_context(&before) && before && before != context_;
    if (Error error = api_.set_context(context_))
      return Status::error(HB_E_DRIVER, said("aclrtSetCurrentContext", error), error);
    Error error = run();
    bool short_of = error == kOutOfMemory || error == kBadAlloc;
    size_t free = 0, total = 0;
    Status status;
    if (error)
      status = Status::error(short_of ? HB_E_NOMEM : HB_E_DRIVER, kind + ": " + said(function, error),
                             error);
    if (short_of) api_.info(kHbm, &free, &total);
    status.needed = size;
    status.free = free;
    if (had) api_.set_context(before);
    return status;
  }

  Api api_;
  int device_ = 0;
  Context context_ = nullptr;
  PhysicalProp prop_{};
};

}  // namespace

Status acl_driver(int device, const char *library, std::unique_ptr<Driver> *driver) {
  auto made = std::make_unique<AclDriver>();
  Status status = made->open(device, library);
  if (!status.failed()) *driver = std::move(made);
  return status;
}

}  // namespace hb
