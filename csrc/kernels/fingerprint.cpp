#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "common.h"
#include "cuda/launch.h"
#include "mix.h"
#include "threads.h"

namespace hb::kernels {
namespace {

const hb_keys &keys() {
  static const hb_keys made = [] {
    hb_keys k;
    for (uint32_t j = 0; j < HB_BLOCK_WORDS; ++j) {
      k.whole[j] = hb_mix(j);
      (j % 2 == 0 ? k.even : k.odd)[j / 2] = k.whole[j];
      k.upper[j] = static_cast<uint32_t>(k.whole[j] >> 32);
    }
    return k;
  }();
  return made;
}

// A lane of fewer blocks than these is over before the hardware has caught up with it.
constexpr int64_t kLaneBlocks = 4;

// Whole blocks from block `first` on: four lanes, each a quarter of them, and up to three that remain.
uint64_t sum_of_blocks(const hb_variant &v, const char *data, int64_t blocks, uint64_t first) {
  const hb_keys &k = keys();
  const int64_t lane = blocks / 4 >= kLaneBlocks ? blocks / 4 : 0;
  uint64_t total = 0, sums[4];
  for (int64_t i = 0; i < lane; ++i) {
    v.four_sums(data + i * HB_BLOCK_BYTES, static_cast<size_t>(lane) * HB_BLOCK_BYTES, &k, sums);
    for (int64_t s = 0; s < 4; ++s)
      total += hb_outer_key(first + static_cast<uint64_t>(s * lane + i)) * sums[s];
  }
  for (int64_t i = 4 * lane; i < blocks; ++i)
    total += hb_outer_key(first + static_cast<uint64_t>(i)) *
             v.block_sum(data + i * HB_BLOCK_BYTES, 0, HB_BLOCK_WORDS, &k);
  return total;
}

uint64_t sum_of(const hb_variant &v, const char *data, int64_t nbytes, int64_t start) {
  const hb_keys &k = keys();
  alignas(64) char edge[HB_BLOCK_BYTES];
  uint64_t total = 0;
  while (nbytes > 0) {
    const size_t at = static_cast<size_t>(start % HB_BLOCK_BYTES);
    if (at == 0 && nbytes >= HB_BLOCK_BYTES) {
      const int64_t blocks = nbytes / HB_BLOCK_BYTES;
      total += sum_of_blocks(v, data, blocks, static_cast<uint64_t>(start / HB_BLOCK_BYTES));
      data += blocks * HB_BLOCK_BYTES;
      start += blocks * HB_BLOCK_BYTES;
      nbytes -= blocks * HB_BLOCK_BYTES;
      continue;
    }
    const size_t part = std::min<size_t>(HB_BLOCK_BYTES - at, static_cast<size_t>(nbytes));
    const uint64_t outer = hb_outer_key(static_cast<uint64_t>(start / HB_BLOCK_BYTES));
    if ((at | part) % 64 == 0) {
      total += outer * v.block_sum(data, at / 4, part / 4, &k);
    } else {  // zeros around it add nothing
      const size_t low = at / 64 * 64, high = (at + part + 63) / 64 * 64;
      std::memset(edge, 0, high - low);
      std::memcpy(edge + (at - low), data, part);
      total += outer * v.block_sum(edge, low / 4, (high - low) / 4, &k);
    }
    data += part;
    start += static_cast<int64_t>(part);
    nbytes -= static_cast<int64_t>(part);
  }
  return total;
}

struct Unit {
  int64_t piece, begin, end;  // bytes of the piece
};

int32_t fingerprint_on_host(const hb_piece *pieces, int64_t n, int64_t total, uint64_t *out,
                            const hb_run *run) {
  const hb_variant *v = variant_of(run);
  if (v == nullptr) return HB_K_UNAVAILABLE;
  const auto sum_part = [&](int64_t i, int64_t begin, int64_t end) {
    const hb_piece &p = pieces[i];
    return sum_of(*v, static_cast<const char *>(p.data) + begin, end - begin, p.start + begin);
  };
  if (total < 2 * kUnitBytes) {
    for (int64_t i = 0; i < n; ++i) out[i] = sum_part(i, 0, pieces[i].nbytes);
    return HB_K_OK;
  }
  std::vector<Unit> units;
  for (int64_t i = 0; i < n; ++i) {
    out[i] = 0;
    int64_t at = 0;
    while (at < pieces[i].nbytes) {  // cut where blocks end
      const int64_t into = (pieces[i].start + at) % HB_BLOCK_BYTES;
      const int64_t end = std::min(at + kUnitBytes - into, pieces[i].nbytes);
      units.push_back({i, at, end});
      at = end;
    }
  }
  parallel_for(static_cast<int64_t>(units.size()), threads_of(run), [&](int64_t u) {
    const Unit &unit = units[static_cast<size_t>(u)];
    const uint64_t sum = sum_part(unit.piece, unit.begin, unit.end);
    __atomic_fetch_add(out + unit.piece, sum, __ATOMIC_RELAXED);
  });
  return HB_K_OK;
}

}  // namespace
}  // namespace hb::kernels

int32_t hb_fingerprint(const hb_piece *pieces, int64_t n, uint64_t *out, const hb_run *run) {
  HB_GUARD({
    if (int32_t code = hb::kernels::check_run(run)) return code;
    if (n < 0 || n > hb::kernels::kMostBytes / 64 || (n > 0 && (pieces == nullptr || out == nullptr)))
      return hb::kernels::fail(HB_K_BAD_ARGUMENT, "%lld pieces", static_cast<long long>(n));
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
      const hb_piece &p = pieces[i];
      if (p.nbytes < 0 || p.nbytes > hb::kernels::kMostBytes || p.start < 0 || p.start > INT64_MAX / 2 ||
          (p.nbytes > 0 && p.data == nullptr))
        return hb::kernels::fail(HB_K_BAD_ARGUMENT, "piece %lld: %lld bytes at %p, from byte %lld",
                        static_cast<long long>(i), static_cast<long long>(p.nbytes), p.data,
                        static_cast<long long>(p.start));
      total += p.nbytes;
      if (total > hb::kernels::kMostBytes) return hb::kernels::fail(HB_K_BAD_ARGUMENT, "too many bytes");
    }
    if (hb::kernels::on_device(run)) return hb::kernels::cuda::fingerprint(pieces, n, out, run);
    return hb::kernels::fingerprint_on_host(pieces, n, total, out, run);
  })
}
