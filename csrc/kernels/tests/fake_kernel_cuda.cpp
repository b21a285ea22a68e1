// A CUDA driver for machines without one: device memory is host memory, and a launch runs the
// kernels' own bodies, thread after thread. It counts, checks what a driver would check, and fails
// when it is told to. For tests only.
//
// FAKE_KERNEL_CUDA_FAIL=name:n   the n-th call (from 1) of that function fails
// FAKE_KERNEL_CUDA_LOG=file      a line for each call
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "bodies.h"

namespace {

enum : int { kOk = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoContext = 201, kNotFound = 500 };

std::recursive_mutex mutex;
std::map<std::string, int> calls;
std::map<unsigned long long, size_t> allocations;
int context_object, module_object;
thread_local int depth = 0;  // contexts on this thread's stack

// Count a call; whether it is to fail.
bool failing(const char *name, const std::string &arguments = "") {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const int n = ++calls[name];
  if (const char *path = std::getenv("FAKE_KERNEL_CUDA_LOG")) {
    if (std::FILE *log = std::fopen(path, "a")) {
      std::fprintf(log, "%s %s\n", name, arguments.c_str());
      std::fclose(log);
    }
  }
  const char *wanted = std::getenv("FAKE_KERNEL_CUDA_FAIL");
  return wanted != nullptr && std::string(name) + ":" + std::to_string(n) == wanted;
}

bool inside(unsigned long long address, size_t bytes) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  auto at = allocations.upper_bound(address);
  if (at == allocations.begin()) return false;
  --at;
  return address + bytes <= at->first + at->second;
}

const char *const kNames[] = {"hb_cuda_copy", "hb_cuda_fingerprint", "hb_cuda_kv"};

}  // namespace

extern "C" {

int cuInit(unsigned flags) { return failing("cuInit") || flags != 0 ? 999 : kOk; }

int cuDeviceGetCount(int *count) {
  *count = 1;
  return failing("cuDeviceGetCount") ? kInvalidValue : kOk;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = 7;  // not the ordinal, so that nobody takes one for the other
  return failing("cuDeviceGet") || ordinal != 0 ? 101 : kOk;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = &context_object;
  return failing("cuDevicePrimaryCtxRetain") || device != 7 ? kInvalidValue : kOk;
}

int cuCtxPushCurrent_v2(void *context) {
  if (failing("cuCtxPushCurrent") || context != &context_object) return kInvalidValue;
  ++depth;
  return kOk;
}

int cuCtxPopCurrent_v2(void **context) {
  failing("cuCtxPopCurrent");
  if (depth == 0) return kNoContext;
  --depth;
  *context = &context_object;
  return kOk;
}

int cuModuleLoadData(void **module, const void *image) {
  *module = &module_object;
  if (depth == 0) return kNoContext;
  return failing("cuModuleLoadData") || image == nullptr ? 200 : kOk;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  if (failing("cuModuleGetFunction", name) || module != &module_object) return kInvalidValue;
  for (const char *const &known : kNames) {
    if (std::strcmp(known, name) == 0) {
      *function = const_cast<char **>(const_cast<char *const *>(&known));
      return kOk;
    }
  }
  return kNotFound;
}

int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
  if (depth == 0) return kNoContext;
  if (failing("cuMemAlloc", std::to_string(bytes))) return kOutOfMemory;
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  void *memory = std::malloc(bytes);
  *address = reinterpret_cast<unsigned long long>(memory);
  allocations[*address] = bytes;
  return kOk;
}

int cuMemFree_v2(unsigned long long address) {
  if (depth == 0) return kNoContext;
  failing("cuMemFree");
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (allocations.erase(address) != 1) return kInvalidValue;
  std::free(reinterpret_cast<void *>(address));
  return kOk;
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *) {
  if (depth == 0) return kNoContext;
  if (failing("cuMemcpyHtoDAsync", std::to_string(bytes)) || !inside(to, bytes))
    return kInvalidValue;
  std::memcpy(reinterpret_cast<void *>(to), from, bytes);
  return kOk;
}

int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *) {
  if (depth == 0) return kNoContext;
  if (failing("cuMemcpyDtoHAsync", std::to_string(bytes)) || !inside(from, bytes))
    return kInvalidValue;
  std::memcpy(to, reinterpret_cast<void *>(from), bytes);
  return kOk;
}

int cuMemsetD8Async(unsigned long long at, unsigned char value, size_t bytes, void *) {
  if (depth == 0) return kNoContext;
  if (failing("cuMemsetD8Async") || !inside(at, bytes)) return kInvalidValue;
  std::memset(reinterpret_cast<void *>(at), value, bytes);
  return kOk;
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
  if (depth == 0) return kNoContext;
  const char *name = *static_cast<const char *const *>(function);
  char text[160];
  std::snprintf(text, sizeof text, "%s %u %u %u %u %p", name, x, y, z, bx, stream);
  if (failing("cuLaunchKernel", text)) return 719;
  if (x == 0 || y == 0 || z != 1 || y > 65535 || bx == 0 || bx > 1024 || by != 1 || bz != 1 ||
      shared != 0 || extra != nullptr)
    return kInvalidValue;
  const int threads = static_cast<int>(bx);
  if (name == kNames[0]) {
    const auto *table = *static_cast<const hb_copy *const *>(arguments[0]);
    for (unsigned b = 0; b < x; ++b)
      for (int t = 0; t < threads; ++t) hb_copy_body(table + b, t, threads);
  } else if (name == kNames[1]) {
    const auto *parts = *static_cast<const hb_part *const *>(arguments[0]);
    auto *out = *static_cast<uint64_t *const *>(arguments[1]);
    const auto keys = std::make_unique<hb_part_keys>();
    for (unsigned b = 0; b < x; ++b) {
      for (int t = 0; t < threads; ++t) hb_fill_keys(parts + b, keys.get(), t, threads);
      for (int t = 0; t < threads; ++t)
        out[parts[b].out] += hb_fingerprint_body(parts + b, keys.get(), t, threads);
    }
  } else {
    const auto &call = *static_cast<const hb_kv_call *>(arguments[0]);
    const int64_t sheets = call.kv.layers * call.kv.planes;
    for (unsigned b = 0; b < x; ++b)
      for (unsigned row = 0; row < y; ++row)
        for (int64_t sheet = row; sheet < sheets; sheet += y)
          for (int t = 0; t < threads; ++t) hb_kv_body(&call, b, sheet, t, threads);
  }
  return kOk;
}

int cuStreamSynchronize(void *) {
  if (depth == 0) return kNoContext;
  return failing("cuStreamSynchronize") ? 719 : kOk;
}

int cuGetErrorName(int code, const char **name) {
  *name = code == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return kOk;
}

// For tests: how often a function was called; contexts left on this thread's stack.
int fake_kernel_cuda_calls(const char *name) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  return calls[name];
}
int fake_kernel_cuda_depth() { return depth; }

}  // extern "C"
