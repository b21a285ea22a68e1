#include "common.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "threads.h"

#if defined(HB_X86)
#include <cpuid.h>
#endif

namespace hb::kernels {
namespace {

thread_local char detail[512] = "";

#if defined(HB_X86)
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1u) != 0;
}

bool has_avx2() {
  static const bool found = __builtin_cpu_supports("avx2") && has_f16c();
  return found;
}

bool has_avx512() {
  static const bool found = has_avx2() && __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return found;
}
#endif

const char *const kNames[] = {"auto", "scalar", "avx2", "avx512"};

// nullptr: this build or this machine lacks it.
const hb_variant *table(int32_t variant) {
  switch (variant) {
    case HB_VARIANT_SCALAR:
      return &hb_scalar;
#if defined(HB_X86)
    case HB_VARIANT_AVX2:
      return has_avx2() ? &hb_avx2 : nullptr;
    case HB_VARIANT_AVX512:
      return has_avx512() ? &hb_avx512 : nullptr;
#endif
    default:
      return nullptr;
  }
}

int32_t best() {
  if (const char *wanted = std::getenv("HOTBUNK_KERNELS")) {
    for (int32_t v = HB_VARIANT_SCALAR; v <= HB_VARIANT_AVX512; ++v)
      if (std::strcmp(wanted, kNames[v]) == 0 && table(v) != nullptr) return v;
  }
  for (int32_t v = HB_VARIANT_AVX512; v > HB_VARIANT_SCALAR; --v)
    if (table(v) != nullptr) return v;
  return HB_VARIANT_SCALAR;
}

}  // namespace

int32_t fail(int32_t code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(detail, sizeof detail, format, arguments);
  va_end(arguments);
  return code;
}

const hb_variant *variant_of(const hb_run *run) {
  int32_t wanted = run != nullptr ? run->variant : HB_VARIANT_AUTO;
  if (wanted == HB_VARIANT_AUTO) wanted = hb_kernels_variant();
  const hb_variant *found = table(wanted);
  if (found == nullptr) {
    const bool known = wanted >= HB_VARIANT_AUTO && wanted <= HB_VARIANT_AVX512;
    fail(HB_K_UNAVAILABLE, "variant %d (%s) does not run here", wanted,
         known ? kNames[wanted] : "unknown");
  }
  return found;
}

int32_t check_run(const hb_run *run) {
  if (run == nullptr) return HB_K_OK;
  if (run->device < -1) return fail(HB_K_BAD_ARGUMENT, "device %d", run->device);
  if (run->threads < 0) return fail(HB_K_BAD_ARGUMENT, "%d threads", run->threads);
  if ((run->flags & ~HB_RUN_CACHED) != 0 || (run->flags != 0 && on_device(run)))
    return fail(HB_K_BAD_ARGUMENT, "flags %#x on device %d", static_cast<unsigned>(run->flags), run->device);
  return HB_K_OK;
}

}  // namespace hb::kernels

extern "C" {

const char *hb_kernels_error(int32_t code) {
  switch (code) {
    case HB_K_OK:
      return "no error";
    case HB_K_BAD_ARGUMENT:
      return "an argument makes no sense";
    case HB_K_BAD_DTYPE:
      return "no cast between these element types";
    case HB_K_OVERLAP:
      return "bytes that are written are used elsewhere in the call";
    case HB_K_OUT_OF_RANGE:
      return "a block lies outside the cache";
    case HB_K_UNAVAILABLE:
      return "not available on this machine or in this build";
    case HB_K_NO_MEMORY:
      return "no memory for scratch space";
    case HB_K_DRIVER:
      return "a call of the device's driver failed";
    default:
      return "unknown code";
  }
}

const char *hb_kernels_detail(void) { return hb::kernels::detail; }

int32_t hb_kernels_variant(void) {
  static const int32_t chosen = hb::kernels::best();
  return chosen;
}

int32_t hb_kernels_has(int32_t variant) { return hb::kernels::table(variant) != nullptr ? 1 : 0; }

int64_t hb_kernels_cache(void) {
  // Not sysconf(): where caches are many it gives their sum, and a core reaches one of them.
  static const int64_t found = [] {
    int64_t most = 0;
    for (int i = 0; i < 8; ++i) {
      char name[80];
      std::snprintf(name, sizeof name, "/sys/devices/system/cpu/cpu0/cache/index%d/size", i);
      std::FILE *file = std::fopen(name, "re");
      if (file == nullptr) break;
      long long size = 0;
      char unit = 0;
      if (std::fscanf(file, "%lld%c", &size, &unit) == 2)
        most = std::max<int64_t>(most, size << (unit == 'M' ? 20 : unit == 'K' ? 10 : 0));
      std::fclose(file);
    }
    return most;
  }();
  return found;
}

int32_t hb_kernels_threads(void) { return hb::kernels::threads(); }

int32_t hb_kernels_set_threads(int32_t threads) {
  if (hb::kernels::set_threads(threads)) return HB_K_OK;
  return hb::kernels::fail(HB_K_BAD_ARGUMENT, "%d threads; 1 to 64 will do", threads);
}

}  // extern "C"
