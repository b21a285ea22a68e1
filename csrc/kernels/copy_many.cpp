#include <algorithm>
#include <new>
#include <vector>

#include "common.h"
#include "cuda/launch.h"
#include "threads.h"

namespace hb::kernels {
namespace {

int64_t size_of(int32_t dtype) {
  switch (dtype) {
    case HB_BYTES:
      return 1;
    case HB_F32:
      return 4;
    case HB_BF16:
    case HB_F16:
      return 2;
    default:
      return 0;
  }
}

long long number(int64_t i) { return static_cast<long long>(i); }

int32_t check_copy(const hb_copy &c, int64_t i) {
  const int64_t from = size_of(c.src_dtype), to = size_of(c.dst_dtype);
  if (from == 0 || to == 0 || (c.src_dtype == HB_BYTES) != (c.dst_dtype == HB_BYTES))
    return fail(HB_K_BAD_DTYPE, "copy %lld: no cast from type %d to type %d", number(i), c.src_dtype,
                c.dst_dtype);
  if (c.count < 0 || c.count > kMostBytes / 4)
    return fail(HB_K_BAD_ARGUMENT, "copy %lld has %lld elements", number(i), number(c.count));
  if (c.count > 0 && (c.src == nullptr || c.dst == nullptr))
    return fail(HB_K_BAD_ARGUMENT, "copy %lld has a null pointer", number(i));
  return HB_K_OK;
}

// Targets must not share a byte, and none may be read as a source.
int32_t check_overlaps(const hb_copy *table, int64_t n) {
  std::vector<Span> targets;
  targets.reserve(static_cast<size_t>(n));
  bool sorted = true;
  for (int64_t i = 0; i < n; ++i) {
    if (table[i].count == 0) continue;
    const Span s = span(table[i].dst, table[i].count * size_of(table[i].dst_dtype));
    sorted = sorted && (targets.empty() || targets.back().low <= s.low);
    targets.push_back(s);
  }
  if (targets.empty()) return HB_K_OK;
  const auto by_low = [](Span a, Span b) { return a.low < b.low; };
  if (!sorted) std::sort(targets.begin(), targets.end(), by_low);
  for (size_t i = 1; i < targets.size(); ++i)
    if (targets[i].low < targets[i - 1].high)
      return fail(HB_K_OVERLAP, "two copies write to the same bytes, at %p",
                  reinterpret_cast<void *>(targets[i].low));
  const Span hull{targets.front().low, targets.back().high};
  for (int64_t i = 0; i < n; ++i) {
    if (table[i].count == 0) continue;
    const Span s = span(table[i].src, table[i].count * size_of(table[i].src_dtype));
    if (!meet(s, hull)) continue;
    // The last target that begins before the source ends reaches furthest, too.
    auto at = std::lower_bound(targets.begin(), targets.end(), Span{s.high, 0}, by_low);
    if (at != targets.begin() && (--at)->high > s.low)
      return fail(HB_K_OVERLAP, "copy %lld reads bytes that the call writes", number(i));
  }
  return HB_K_OK;
}

// Whole copies [first, last), or one of them from element `begin` to `end`.
struct Unit {
  int64_t first, last, begin, end;
};

std::vector<Unit> units_of(const hb_copy *table, int64_t n) {
  std::vector<Unit> units;
  int64_t first = 0, held = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t width = size_of(table[i].src_dtype) + size_of(table[i].dst_dtype);
    const int64_t bytes = table[i].count * width / 2;
    if (bytes > 2 * kUnitBytes) {
      if (first < i) units.push_back({first, i, 0, -1});
      const int64_t step = 2 * kUnitBytes / width;  // both sides stay as aligned as they were
      for (int64_t at = 0; at < table[i].count; at += step)
        units.push_back({i, i + 1, at, std::min(at + step, table[i].count)});
      first = i + 1;
      held = 0;
      continue;
    }
    held += bytes;
    if (held >= kUnitBytes) {
      units.push_back({first, i + 1, 0, -1});
      first = i + 1;
      held = 0;
    }
  }
  if (first < n) units.push_back({first, n, 0, -1});
  return units;
}

void copy_part(const hb_variant &v, const hb_copy &c, int64_t begin, int64_t end, int stream) {
  if (begin >= end) return;
  const int64_t from = size_of(c.src_dtype), to = size_of(c.dst_dtype);
  const char *src = static_cast<const char *>(c.src) + begin * from;
  char *dst = static_cast<char *>(c.dst) + begin * to;
  const size_t count = static_cast<size_t>(end - begin);
  if (c.src_dtype == c.dst_dtype)
    v.copy(src, dst, count * static_cast<size_t>(to), stream);
  else
    v.cast[c.src_dtype][c.dst_dtype](src, dst, count, stream);
}

int32_t copy_on_host(const hb_copy *table, int64_t n, int64_t written, const hb_run *run) {
  const hb_variant *v = variant_of(run);
  if (v == nullptr) return HB_K_UNAVAILABLE;
  const int stream = written >= kStreamBytes && !cached(run);
  const auto do_unit = [&](const Unit &u) {
    for (int64_t i = u.first; i < u.last; ++i)
      copy_part(*v, table[i], u.begin, u.end < 0 ? table[i].count : u.end, stream);
    if (stream) v->fence();
  };
  if (written < 2 * kUnitBytes) {
    do_unit({0, n, 0, -1});
    return HB_K_OK;
  }
  const std::vector<Unit> units = units_of(table, n);
  parallel_for(static_cast<int64_t>(units.size()), threads_of(run),
               [&](int64_t i) { do_unit(units[static_cast<size_t>(i)]); });
  return HB_K_OK;
}

}  // namespace
}  // namespace hb::kernels

int32_t hb_copy_many(const hb_copy *table, int64_t n, const hb_run *run) {
  HB_GUARD({
    if (int32_t code = hb::kernels::check_run(run)) return code;
    if (n < 0 || n > hb::kernels::kMostBytes / 64 || (n > 0 && table == nullptr))
      return hb::kernels::fail(HB_K_BAD_ARGUMENT, "a table of %lld copies at %p", hb::kernels::number(n),
                      static_cast<const void *>(table));
    int64_t written = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (int32_t code = hb::kernels::check_copy(table[i], i)) return code;
      written += table[i].count * hb::kernels::size_of(table[i].dst_dtype);
      if (written > hb::kernels::kMostBytes) return hb::kernels::fail(HB_K_BAD_ARGUMENT, "too many bytes");
    }
    if (int32_t code = hb::kernels::check_overlaps(table, n)) return code;
    if (hb::kernels::on_device(run)) return hb::kernels::cuda::copy_many(table, n, run);
    return hb::kernels::copy_on_host(table, n, written, run);
  })
}
