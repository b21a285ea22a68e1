#include "driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../common.h"
#include "bodies.h"

namespace hb::kernels::cuda {
namespace {

constexpr int kMostDevices = 64;
constexpr const char *kKernelNames[kKernels] = {"hb_cuda_copy", "hb_cuda_fingerprint",
                                                "hb_cuda_kv"};

int32_t failed(const Driver &d, const char *what, Result result) {
  const char *name = nullptr;
  if (d.error_name == nullptr || d.error_name(result, &name) != 0 || name == nullptr) name = "?";
  constexpr Result kOutOfMemory = 2;
  return fail(result == kOutOfMemory ? HB_K_NO_MEMORY : HB_K_DRIVER, "%s: %s (%d)", what, name, result);
}

// The library that has the driver. The environment may name another one.
const char *library_name() {
  const char *named = std::getenv("HOTBUNK_CUDA_LIBRARY");
  return named != nullptr && named[0] != '\0' ? named : "libcuda.so.1";
}

struct Opened {
  Driver driver;
  bool usable = false;
  int devices = 0;
  int32_t code = HB_K_UNAVAILABLE;
  std::string why;
};

Opened open_driver() {
  Opened o;
  void *library = dlopen(library_name(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char *error = dlerror();
    o.why = std::string("no CUDA driver: ") + (error != nullptr ? error : library_name());
    return o;
  }
#define HB_FIND(member, symbol, ...)                                                         \
  o.driver.member = reinterpret_cast<Driver::member##_type *>(dlsym(library, symbol));       \
  if (o.driver.member == nullptr) {                                                          \
    o.why = std::string("the CUDA driver ") + library_name() + " has no function " + symbol; \
    return o;                                                                                \
  }
  HB_CUDA_FUNCTIONS(HB_FIND)
#undef HB_FIND
  Result result = o.driver.init(0);
  const char *what = "cuInit";
  if (result == 0) {
    result = o.driver.device_count(&o.devices);
    what = "cuDeviceGetCount";
  }
  if (result != 0) {
    failed(o.driver, what, result);
    o.why = hb_kernels_detail();
    return o;
  }
  o.usable = true;
  return o;
}

const Opened &opened() {
  static const Opened *found = new Opened(open_driver());
  return *found;
}

// The fatbin lies beside this library.
std::string fatbin_path() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void *>(&library_name), &info) == 0 ||
      info.dli_fname == nullptr)
    return "";
  const std::string file = info.dli_fname;
  const size_t slash = file.rfind('/');
  return (slash == std::string::npos ? "" : file.substr(0, slash + 1)) + "hotbunk_kernels.fatbin";
}

std::vector<char> read_file(const std::string &path) {
  std::vector<char> data;
  if (std::FILE *file = std::fopen(path.c_str(), "rb")) {
    char buffer[1 << 16];
    for (size_t got; (got = std::fread(buffer, 1, sizeof buffer, file)) > 0;)
      data.insert(data.end(), buffer, buffer + got);
    std::fclose(file);
  }
  return data;
}

}  // namespace

const Driver *driver() {
  const Opened &o = opened();
  if (!o.usable) {
    fail(o.code, "%s", o.why.c_str());
    return nullptr;
  }
  return &o.driver;
}

Device *device(const Driver &, int ordinal) {
  static Device *devices = [] {
    Device *all = new Device[kMostDevices];
    for (int i = 0; i < kMostDevices; ++i) all[i].number(i);
    return all;
  }();
  if (ordinal < 0 || ordinal >= opened().devices || ordinal >= kMostDevices) {
    fail(HB_K_UNAVAILABLE, "CUDA device %d of %d", ordinal, opened().devices);
    return nullptr;
  }
  return devices + ordinal;
}

int32_t Device::open(const Driver &d, int ordinal) {
  const std::string path = fatbin_path();
  const std::vector<char> image = read_file(path);
  if (image.empty())
    return fail(HB_K_UNAVAILABLE, "no CUDA kernels at %s: this build had no nvcc", path.c_str());
  int id = 0;
  if (Result r = d.device_get(&id, ordinal)) return failed(d, "cuDeviceGet", r);
  Handle context = nullptr, module = nullptr;
  if (Result r = d.context_retain(&context, id)) return failed(d, "cuDevicePrimaryCtxRetain", r);
  if (Result r = d.context_push(context)) return failed(d, "cuCtxPushCurrent", r);
  int32_t code = HB_K_OK;
  if (Result r = d.module_load(&module, image.data())) code = failed(d, "cuModuleLoadData", r);
  for (int k = 0; k < kKernels && code == HB_K_OK; ++k)
    if (Result r = d.module_function(&kernels_[k], module, kKernelNames[k]))
      code = failed(d, kKernelNames[k], r);
  Handle popped = nullptr;
  d.context_pop(&popped);
  if (code == HB_K_OK) context_ = context;  // kept as long as the process, as torch keeps it
  return code;
}

Device::Hold::Hold(Device &device, const Driver &driver)
    : code(HB_K_OK), device_(device), driver_(driver), lock_(device.mutex_) {
  if (device.context_ == nullptr) code = device.open(driver, device.ordinal_);
  if (code != HB_K_OK) return;
  if (Result r = driver.context_push(device.context_))
    code = failed(driver, "cuCtxPushCurrent", r);
  else
    pushed_ = true;
}

Device::Hold::~Hold() {
  Handle popped = nullptr;
  if (pushed_) driver_.context_pop(&popped);
}

Address Device::Hold::scratch(size_t bytes) {
  if (bytes > device_.scratch_size_) {
    if (device_.scratch_ != 0) driver_.free(device_.scratch_);
    device_.scratch_ = 0;
    device_.scratch_size_ = 0;
    const size_t rounded = (bytes + 0xffff) & ~size_t{0xffff};
    if (Result r = driver_.allocate(&device_.scratch_, rounded)) {
      device_.scratch_ = 0;
      code = failed(driver_, "cuMemAlloc", r);
      return 0;
    }
    device_.scratch_size_ = rounded;
  }
  return device_.scratch_;
}

int32_t Device::Hold::upload(Address to, const void *from, size_t bytes, Handle stream) {
  const Result r = driver_.upload(to, from, bytes, stream);
  return r ? failed(driver_, "cuMemcpyHtoDAsync", r) : HB_K_OK;
}

int32_t Device::Hold::download(void *to, Address from, size_t bytes, Handle stream) {
  const Result r = driver_.download(to, from, bytes, stream);
  return r ? failed(driver_, "cuMemcpyDtoHAsync", r) : HB_K_OK;
}

int32_t Device::Hold::clear(Address at, size_t bytes, Handle stream) {
  const Result r = driver_.clear(at, 0, bytes, stream);
  return r ? failed(driver_, "cuMemsetD8Async", r) : HB_K_OK;
}

int32_t Device::Hold::launch(Kernel kernel, unsigned x, unsigned y, void **arguments,
                             Handle stream) {
  const Result r = driver_.launch(device_.kernels_[kernel], x, y, 1, HB_CUDA_THREADS, 1, 1, 0,
                                  stream, arguments, nullptr);
  return r ? failed(driver_, kKernelNames[kernel], r) : HB_K_OK;
}

int32_t Device::Hold::finish(Handle stream) {
  const Result r = driver_.synchronize(stream);
  return r ? failed(driver_, "cuStreamSynchronize", r) : HB_K_OK;
}

}  // namespace hb::kernels::cuda
