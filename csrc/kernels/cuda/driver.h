// The CUDA driver, opened when it is first asked for. No CUDA header and no link-time library: the
// few types and functions used are declared here, as the driver's stable ABI has them.
#ifndef HB_CUDA_DRIVER_H
#define HB_CUDA_DRIVER_H

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace hb::kernels::cuda {

using Result = int;
using Address = unsigned long long;  // CUdeviceptr
using Handle = void *;               // CUcontext, CUmodule, CUfunction, CUstream

// Functions of libcuda, by the names they are looked up under.
#define HB_CUDA_FUNCTIONS(X)                                                             \
  X(init, "cuInit", Result(unsigned))                                                    \
  X(device_count, "cuDeviceGetCount", Result(int *))                                     \
  X(device_get, "cuDeviceGet", Result(int *, int))                                       \
  X(context_retain, "cuDevicePrimaryCtxRetain", Result(Handle *, int))                   \
  X(context_push, "cuCtxPushCurrent_v2", Result(Handle))                                 \
  X(context_pop, "cuCtxPopCurrent_v2", Result(Handle *))                                 \
  X(module_load, "cuModuleLoadData", Result(Handle *, const void *))                     \
  X(module_function, "cuModuleGetFunction", Result(Handle *, Handle, const char *))      \
  X(allocate, "cuMemAlloc_v2", Result(Address *, size_t))                                \
  X(free, "cuMemFree_v2", Result(Address))                                               \
  X(upload, "cuMemcpyHtoDAsync_v2", Result(Address, const void *, size_t, Handle))       \
  X(download, "cuMemcpyDtoHAsync_v2", Result(void *, Address, size_t, Handle))           \
  X(clear, "cuMemsetD8Async", Result(Address, unsigned char, size_t, Handle))            \
  X(launch, "cuLaunchKernel",                                                            \
    Result(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
           Handle, void **, void **))                                                    \
  X(synchronize, "cuStreamSynchronize", Result(Handle))                                  \
  X(error_name, "cuGetErrorName", Result(Result, const char **))

struct Driver {
#define HB_MEMBER(member, symbol, ...)         \
  using member##_type = __VA_ARGS__;           \
  member##_type *member = nullptr;
  HB_CUDA_FUNCTIONS(HB_MEMBER)
#undef HB_MEMBER
};

enum Kernel { kCopy, kFingerprint, kKv, kKernels };

// One device: its primary context (the one that torch uses), the module, scratch memory.
class Device {
 public:
  // A call's hold on a device: its context is current and its scratch memory is the call's own.
  class Hold {
   public:
    Hold(Device &device, const Driver &driver);
    ~Hold();
    Hold(const Hold &) = delete;
    Hold &operator=(const Hold &) = delete;
    int32_t code;  // HB_K_OK, or why the device cannot be used

    // Scratch memory of at least `bytes`, the same for the whole call. 0: none; `code` says why.
    Address scratch(size_t bytes);
    int32_t upload(Address to, const void *from, size_t bytes, Handle stream);
    int32_t download(void *to, Address from, size_t bytes, Handle stream);
    int32_t clear(Address at, size_t bytes, Handle stream);
    int32_t launch(Kernel kernel, unsigned x, unsigned y, void **arguments, Handle stream);
    // Wait for the stream, so that scratch memory and results are settled.
    int32_t finish(Handle stream);

   private:
    Device &device_;
    const Driver &driver_;
    std::unique_lock<std::mutex> lock_;
    bool pushed_ = false;
  };

 private:
  friend class Hold;
  int32_t open(const Driver &driver, int ordinal);
  std::mutex mutex_;
  int ordinal_ = -1;
  Handle context_ = nullptr;
  Handle kernels_[kKernels] = {};
  Address scratch_ = 0;
  size_t scratch_size_ = 0;

 public:
  void number(int ordinal) { ordinal_ = ordinal; }
};

// The driver; nullptr when it cannot be used, and the error is kept.
const Driver *driver();
// A device of it; nullptr when there is none of that number, and the error is kept.
Device *device(const Driver &driver, int ordinal);

}  // namespace hb::kernels::cuda

#endif  // HB_CUDA_DRIVER_H
