// What the kernels share: errors with text, the choice of a host variant, limits.
#ifndef HB_COMMON_H
#define HB_COMMON_H

#include <cstdint>

#include "cpu/variants.h"
#include "hotbunk_kernels.h"

namespace hb::kernels {

// Keep a sentence for hb_kernels_detail() and give the code back.
[[gnu::format(printf, 2, 3)]] int32_t fail(int32_t code, const char *format, ...);

// The host variant of a run. nullptr: not usable here, and the error is kept.
const hb_variant *variant_of(const hb_run *run);

inline bool on_device(const hb_run *run) { return run != nullptr && run->device >= 0; }
inline int threads_of(const hb_run *run) { return run != nullptr ? run->threads : 0; }
inline bool cached(const hb_run *run) { return run != nullptr && (run->flags & HB_RUN_CACHED) != 0; }

// HB_K_OK, or what is wrong with the run itself.
int32_t check_run(const hb_run *run);

// No range of bytes is longer: products and sums of a few of them fit 64 bits.
constexpr int64_t kMostBytes = int64_t{1} << 56;
// Work is handed to threads in pieces of about so many bytes; less than two of them stays here.
constexpr int64_t kUnitBytes = int64_t{256} << 10;
// From so many written bytes on, writes go around the cache, unless the run says otherwise.
constexpr int64_t kStreamBytes = int64_t{4} << 20;

// A range of addresses.
struct Span {
  uintptr_t low, high;
};

inline Span span(const void *p, int64_t bytes) {
  const uintptr_t low = reinterpret_cast<uintptr_t>(p);
  return {low, low + static_cast<uintptr_t>(bytes)};
}

inline bool meet(Span a, Span b) { return a.low < b.high && b.low < a.high; }

}  // namespace hb::kernels

// The body of an entry point: nothing is thrown across the C ABI.
#define HB_GUARD(...)                                                \
  try {                                                              \
    __VA_ARGS__                                                      \
  } catch (const std::bad_alloc &) {                                 \
    return hb::kernels::fail(HB_K_NO_MEMORY, "no memory for the call's tables"); \
  }

#endif  // HB_COMMON_H
