// The kernels that launch.cpp loads from the fatbin, by these names.
#include "bodies.h"

extern "C" __global__ void __launch_bounds__(HB_CUDA_THREADS) hb_cuda_copy(const hb_copy *table) {
  const hb_copy c = table[blockIdx.x];
  hb_copy_body(&c, threadIdx.x, blockDim.x);
}

extern "C" __global__ void __launch_bounds__(HB_CUDA_THREADS)
    hb_cuda_fingerprint(const hb_part *parts, unsigned long long *out) {
  __shared__ hb_part_keys keys;
  __shared__ uint64_t sums[HB_CUDA_THREADS / 32];
  const hb_part p = parts[blockIdx.x];
  hb_fill_keys(&p, &keys, threadIdx.x, blockDim.x);
  __syncthreads();
  uint64_t sum = hb_fingerprint_body(&p, &keys, threadIdx.x, blockDim.x);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint64_t total = 0;
    for (unsigned i = 0; i < blockDim.x / 32; ++i) total += sums[i];
    atomicAdd(out + p.out, (unsigned long long)total);
  }
}

extern "C" __global__ void __launch_bounds__(HB_CUDA_THREADS) hb_cuda_kv(hb_kv_call call) {
  const int64_t sheets = call.kv.layers * call.kv.planes;
  for (int64_t sheet = blockIdx.y; sheet < sheets; sheet += gridDim.y)
    hb_kv_body(&call, blockIdx.x, sheet, threadIdx.x, blockDim.x);
}
