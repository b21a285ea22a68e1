// The CUDA twins. Arguments were checked by the caller.
#ifndef HB_CUDA_LAUNCH_H
#define HB_CUDA_LAUNCH_H

#include "hotbunk_kernels.h"

namespace hb::kernels {

enum class KvOp { kGather = 0, kScatter = 1, kZero = 2 };

namespace cuda {

int32_t copy_many(const hb_copy *table, int64_t n, const hb_run *run);
int32_t fingerprint(const hb_piece *pieces, int64_t n, uint64_t *out, const hb_run *run);
int32_t kv(KvOp op, const hb_kv &kv, const hb_blocks &blocks, void *packed, const hb_run *run);

}  // namespace cuda
}  // namespace hb::kernels

#endif  // HB_CUDA_LAUNCH_H
