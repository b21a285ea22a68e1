#include <algorithm>
#include <array>
#include <new>
#include <vector>

#include "common.h"
#include "cuda/launch.h"
#include "threads.h"

namespace hb::kernels {
namespace {

long long number(int64_t i) { return static_cast<long long>(i); }

// Every place must have bytes of its own: sorted by stride, each dimension must step over the
// whole of the smaller ones.
int32_t check_cache(const hb_kv *kv) {
  if (kv == nullptr || kv->layers < 0 || kv->planes < 0 || kv->slots < 0 || kv->row < 0)
    return fail(HB_K_BAD_ARGUMENT, "no cache, or one of negative size");
  std::array<std::array<int64_t, 2>, 3> dims{{{kv->slot_stride, kv->slots},
                                              {kv->plane_stride, kv->planes},
                                              {kv->layer_stride, kv->layers}}};
  std::sort(dims.begin(), dims.end());
  int64_t extent = kv->row;
  if (extent > kMostBytes) return fail(HB_K_BAD_ARGUMENT, "rows of %lld bytes", number(extent));
  for (const auto &[stride, size] : dims) {
    if (size <= 1) continue;
    if (stride < extent || size > kMostBytes / std::max<int64_t>(stride, 1))
      return fail(HB_K_BAD_ARGUMENT, "a stride of %lld bytes over places of %lld", number(stride),
                  number(extent));
    extent += stride * (size - 1);
    if (extent > kMostBytes) return fail(HB_K_BAD_ARGUMENT, "too many bytes");
  }
  return HB_K_OK;
}

Span extent_of(const hb_kv &kv) {
  if (kv.layers == 0 || kv.planes == 0 || kv.slots == 0) return span(kv.base, 0);
  return span(kv.base, kv.layer_stride * (kv.layers - 1) + kv.plane_stride * (kv.planes - 1) +
                           kv.slot_stride * (kv.slots - 1) + kv.row);
}

int32_t check_blocks(const hb_kv &kv, const hb_blocks *b, bool once) {
  if (b == nullptr || b->n < 0 || b->size < 1 || b->tokens < 0 || (b->n > 0 && b->ids == nullptr))
    return fail(HB_K_BAD_ARGUMENT, "no block table, or sizes that make no sense");
  const int64_t needed = b->tokens / b->size + (b->tokens % b->size != 0);
  if (needed > b->n)
    return fail(HB_K_OUT_OF_RANGE, "%lld blocks of %lld slots for %lld tokens", number(b->n),
                number(b->size), number(b->tokens));
  const int64_t blocks = kv.slots / b->size;
  std::vector<bool> seen(once ? static_cast<size_t>(blocks) : 0);
  for (int64_t i = 0; i < needed; ++i) {
    const int64_t id = b->ids[i];
    if (id < 0 || id >= blocks)
      return fail(HB_K_OUT_OF_RANGE, "block %lld of %lld", number(id), number(blocks));
    if (!once) continue;
    if (seen[static_cast<size_t>(id)])
      return fail(HB_K_OVERLAP, "block %lld comes twice", number(id));
    seen[static_cast<size_t>(id)] = true;
  }
  return HB_K_OK;
}

// Neighbouring slots that are neighbouring tokens, too.
struct Run {
  int64_t slot, token, count;
};

std::vector<Run> runs_of(const hb_blocks &b, int64_t most, bool any_order) {
  std::vector<Run> runs;
  if (any_order) {  // by address, so that neighbours meet
    std::vector<int64_t> ids(b.ids, b.ids + (b.tokens + b.size - 1) / b.size);
    const int64_t last = ids.empty() ? 0 : ids.back();
    const int64_t rest = b.tokens % b.size;  // the last block may be zeroed in part
    if (rest != 0) ids.pop_back();
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    for (const int64_t id : ids) {
      if (!runs.empty() && runs.back().slot + runs.back().count == id * b.size &&
          runs.back().count + b.size <= most)
        runs.back().count += b.size;
      else
        runs.push_back({id * b.size, 0, b.size});
    }
    if (rest != 0) runs.push_back({last * b.size, 0, rest});
    return runs;
  }
  for (int64_t token = 0; token < b.tokens; token += b.size) {
    const int64_t slot = b.ids[token / b.size] * b.size;
    int64_t count = std::min(b.size, b.tokens - token);
    if (!runs.empty() && runs.back().slot + runs.back().count == slot &&
        runs.back().count + count <= most) {
      runs.back().count += count;
    } else {
      runs.push_back({slot, token, count});
    }
  }
  return runs;
}

int32_t kv_on_host(KvOp op, const hb_kv &kv, const hb_blocks &b, char *packed, const hb_run *run) {
  const hb_variant *v = variant_of(run);
  if (v == nullptr) return HB_K_UNAVAILABLE;
  const int64_t sheets = kv.layers * kv.planes;
  const int64_t total = sheets * b.tokens * kv.row;
  if (total == 0) return HB_K_OK;
  const int stream = total >= kStreamBytes && !cached(run);
  const bool dense = kv.slot_stride == kv.row || kv.slots == 1;
  const std::vector<Run> runs = runs_of(b, std::max<int64_t>(1, 4 * kUnitBytes / kv.row),
                                        op == KvOp::kZero);
  const int64_t n = static_cast<int64_t>(runs.size());

  const auto move = [&](char *place, char *other, int64_t bytes) {
    const size_t size = static_cast<size_t>(bytes);
    if (op == KvOp::kGather) v->copy(place, other, size, stream);
    if (op == KvOp::kScatter) v->copy(other, place, size, stream);
    if (op == KvOp::kZero) v->zero(place, size, stream);
  };
  const auto do_item = [&](int64_t sheet, int64_t nth) {
    const Run &r = runs[static_cast<size_t>(nth)];
    char *place = static_cast<char *>(kv.base) + sheet / kv.planes * kv.layer_stride +
                  sheet % kv.planes * kv.plane_stride + r.slot * kv.slot_stride;
    char *other = packed == nullptr ? nullptr : packed + (sheet * b.tokens + r.token) * kv.row;
    if (dense) {
      move(place, other, r.count * kv.row);
      return;
    }
    for (int64_t i = 0; i < r.count; ++i)
      move(place + i * kv.slot_stride, other == nullptr ? nullptr : other + i * kv.row, kv.row);
  };

  const int64_t items = sheets * n;
  const int64_t together = std::max<int64_t>(1, items / std::max<int64_t>(1, total / kUnitBytes));
  const int64_t units = (items + together - 1) / together;
  const auto do_unit = [&](int64_t unit) {
    const int64_t begin = unit * together, end = std::min(items, begin + together);
    int64_t sheet = begin / n, nth = begin % n;  // a division for every item would show
    for (int64_t i = begin; i < end; ++i) {
      do_item(sheet, nth);
      if (++nth == n) ++sheet, nth = 0;
    }
    if (stream) v->fence();
  };
  if (total < 2 * kUnitBytes) {
    for (int64_t i = 0; i < units; ++i) do_unit(i);
  } else {
    parallel_for(units, threads_of(run), do_unit);
  }
  return HB_K_OK;
}

int32_t kv_call(KvOp op, const hb_kv *kv, const hb_blocks *blocks, char *packed,
                const hb_run *run) {
  if (int32_t code = check_run(run)) return code;
  if (int32_t code = check_cache(kv)) return code;
  if (int32_t code = check_blocks(*kv, blocks, op == KvOp::kScatter)) return code;
  if (kv->row == 0 || kv->layers == 0 || kv->planes == 0) return HB_K_OK;
  const int64_t places = kv->layers * kv->planes;  // within the extent, so no overflow
  if (blocks->tokens > kMostBytes / kv->row / places)  // blocks may repeat in a gather
    return fail(HB_K_BAD_ARGUMENT, "too many bytes");
  const int64_t bytes = places * blocks->tokens * kv->row;
  if (bytes == 0) return HB_K_OK;
  if (kv->base == nullptr || (op != KvOp::kZero && packed == nullptr))
    return fail(HB_K_BAD_ARGUMENT, "a null pointer");
  if (op != KvOp::kZero && meet(extent_of(*kv), span(packed, bytes)))
    return fail(HB_K_OVERLAP, "the packed rows lie inside the cache");
  if (on_device(run)) return cuda::kv(op, *kv, *blocks, packed, run);
  return kv_on_host(op, *kv, *blocks, packed, run);
}

}  // namespace
}  // namespace hb::kernels

int32_t hb_kv_gather(const hb_kv *kv, const hb_blocks *blocks, void *out, const hb_run *run) {
  HB_GUARD(return hb::kernels::kv_call(hb::kernels::KvOp::kGather, kv, blocks, static_cast<char *>(out), run);)
}

int32_t hb_kv_scatter(const hb_kv *kv, const hb_blocks *blocks, const void *in, const hb_run *run) {
  HB_GUARD(return hb::kernels::kv_call(hb::kernels::KvOp::kScatter, kv, blocks,
                              static_cast<char *>(const_cast<void *>(in)), run);)
}

int32_t hb_kv_zero(const hb_kv *kv, const hb_blocks *blocks, const hb_run *run) {
  HB_GUARD(return hb::kernels::kv_call(hb::kernels::KvOp::kZero, kv, blocks, nullptr, run);)
}
