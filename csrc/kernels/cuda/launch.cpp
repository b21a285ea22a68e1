#include "launch.h"

#include <algorithm>
#include <vector>

#include "../common.h"
#include "bodies.h"
#include "driver.h"

namespace hb::kernels::cuda {
namespace {

constexpr int64_t kPartBytes = HB_PART_BLOCKS * HB_BLOCK_BYTES;
constexpr unsigned kMostSheets = 65535;  // of a grid's second dimension

Handle stream_of(const hb_run *run) { return run->stream; }

// Parts that the blocks of one launch copy, none longer than kPartBytes.
std::vector<hb_copy> split(const hb_copy *table, int64_t n) {
  std::vector<hb_copy> parts;
  parts.reserve(static_cast<size_t>(n));
  const auto size = [](int32_t dtype) -> int64_t {
    return dtype == HB_BYTES ? 1 : dtype == HB_F32 ? 4 : 2;
  };
  for (int64_t i = 0; i < n; ++i) {
    const hb_copy &c = table[i];
    const int64_t from = size(c.src_dtype), to = size(c.dst_dtype);
    const int64_t step = kPartBytes / std::max(from, to);
    for (int64_t at = 0; at < c.count; at += step)
      parts.push_back({static_cast<const char *>(c.src) + at * from,
                       static_cast<char *>(c.dst) + at * to, std::min(step, c.count - at),
                       c.src_dtype, c.dst_dtype});
  }
  return parts;
}

}  // namespace

int32_t copy_many(const hb_copy *table, int64_t n, const hb_run *run) {
  const Driver *d = driver();
  Device *on = d == nullptr ? nullptr : device(*d, run->device);
  if (on == nullptr) return HB_K_UNAVAILABLE;
  const std::vector<hb_copy> parts = split(table, n);
  Device::Hold hold(*on, *d);
  if (hold.code != HB_K_OK || parts.empty()) return hold.code;
  const size_t bytes = parts.size() * sizeof(hb_copy);
  Address at = hold.scratch(bytes);
  if (at == 0) return hold.code;
  if (int32_t code = hold.upload(at, parts.data(), bytes, stream_of(run))) return code;
  void *arguments[] = {&at};
  const unsigned blocks = static_cast<unsigned>(parts.size());
  if (int32_t code = hold.launch(kCopy, blocks, 1, arguments, stream_of(run))) return code;
  return hold.finish(stream_of(run));
}

int32_t fingerprint(const hb_piece *pieces, int64_t n, uint64_t *out, const hb_run *run) {
  const Driver *d = driver();
  Device *on = d == nullptr ? nullptr : device(*d, run->device);
  if (on == nullptr) return HB_K_UNAVAILABLE;
  std::vector<hb_part> parts;
  for (int64_t i = 0; i < n; ++i) {
    out[i] = 0;
    int64_t at = 0;
    while (at < pieces[i].nbytes) {  // cut where blocks end
      const int64_t start = pieces[i].start + at;
      const int64_t end =
          std::min(at + kPartBytes - start % HB_BLOCK_BYTES, pieces[i].nbytes);
      parts.push_back({static_cast<const char *>(pieces[i].data) + at, end - at, start, i});
      at = end;
    }
  }
  Device::Hold hold(*on, *d);
  if (hold.code != HB_K_OK || parts.empty()) return hold.code;
  // Sums first, then the parts.
  const size_t sums = static_cast<size_t>(n) * sizeof(uint64_t);
  const size_t bytes = parts.size() * sizeof(hb_part);
  Address out_at = hold.scratch(sums + bytes);
  if (out_at == 0) return hold.code;
  Address parts_at = out_at + sums;
  Handle stream = stream_of(run);
  if (int32_t code = hold.clear(out_at, sums, stream)) return code;
  if (int32_t code = hold.upload(parts_at, parts.data(), bytes, stream)) return code;
  void *arguments[] = {&parts_at, &out_at};
  const unsigned blocks = static_cast<unsigned>(parts.size());
  if (int32_t code = hold.launch(kFingerprint, blocks, 1, arguments, stream)) return code;
  if (int32_t code = hold.download(out, out_at, sums, stream)) return code;
  return hold.finish(stream);
}

int32_t kv(KvOp op, const hb_kv &cache, const hb_blocks &blocks, void *packed, const hb_run *run) {
  const Driver *d = driver();
  Device *on = d == nullptr ? nullptr : device(*d, run->device);
  if (on == nullptr) return HB_K_UNAVAILABLE;
  Device::Hold hold(*on, *d);
  if (hold.code != HB_K_OK) return hold.code;
  const int64_t used = (blocks.tokens + blocks.size - 1) / blocks.size;
  const size_t bytes = static_cast<size_t>(used) * sizeof(int64_t);
  const Address ids = hold.scratch(bytes);
  if (ids == 0) return hold.code;
  if (int32_t code = hold.upload(ids, blocks.ids, bytes, stream_of(run))) return code;
  hb_kv_call call{cache,
                  reinterpret_cast<const int64_t *>(ids),
                  blocks.size,
                  blocks.tokens,
                  static_cast<char *>(packed),
                  static_cast<int64_t>(op)};
  void *arguments[] = {&call};
  const int64_t sheets = cache.layers * cache.planes;
  const unsigned y = static_cast<unsigned>(std::min<int64_t>(sheets, kMostSheets));
  if (int32_t code = hold.launch(kKv, static_cast<unsigned>(used), y, arguments, stream_of(run)))
    return code;
  return hold.finish(stream_of(run));
}

}  // namespace hb::kernels::cuda

int32_t hb_kernels_cuda(int32_t ordinal) {
  const hb::kernels::cuda::Driver *d = hb::kernels::cuda::driver();
  hb::kernels::cuda::Device *on = d == nullptr ? nullptr : hb::kernels::cuda::device(*d, ordinal);
  if (on == nullptr) return HB_K_UNAVAILABLE;
  return hb::kernels::cuda::Device::Hold(*on, *d).code;
}
