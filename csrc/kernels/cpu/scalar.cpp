// The variant for any processor.
#include "scalar.h"

namespace {

void copy(const void *src, void *dst, size_t bytes, int) { memcpy(dst, src, bytes); }
void zero(void *dst, size_t bytes, int) { memset(dst, 0, bytes); }
void fence() {}

template <void (*tail)(const void *, void *, size_t, size_t)>
void cast(const void *src, void *dst, size_t count, int) {
  tail(src, dst, 0, count);
}

uint64_t block_sum(const void *data, size_t j, size_t count, const hb_keys *keys) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += hb_load4(data, i) * keys->whole[j + i];
  return sum;
}

void four_sums(const void *data, size_t apart, const hb_keys *keys, uint64_t sums[4]) {
  for (size_t s = 0; s < 4; ++s)
    sums[s] = block_sum(static_cast<const char *>(data) + s * apart, 0, 1024, keys);
}

}  // namespace

const hb_variant hb_scalar = {
    copy,
    zero,
    {{nullptr, nullptr, nullptr, nullptr},
     {nullptr, nullptr, cast<hb_tail_f32_bf16>, cast<hb_tail_f32_f16>},
     {nullptr, cast<hb_tail_bf16_f32>, nullptr, cast<hb_tail_bf16_f16>},
     {nullptr, cast<hb_tail_f16_f32>, cast<hb_tail_f16_bf16>, nullptr}},
    block_sum,
    four_sums,
    fence,
};
