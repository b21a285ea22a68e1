// Loops without vectors: the scalar variant, and the tails of the others.
#ifndef HB_SCALAR_H
#define HB_SCALAR_H

#include <string.h>

#include "../casts.h"
#include "variants.h"

static inline uint32_t hb_load4(const void *p, size_t i) {
  uint32_t x;
  memcpy(&x, (const char *)p + 4 * i, 4);
  return x;
}

static inline uint16_t hb_load2(const void *p, size_t i) {
  uint16_t x;
  memcpy(&x, (const char *)p + 2 * i, 2);
  return x;
}

static inline void hb_store4(void *p, size_t i, uint32_t x) { memcpy((char *)p + 4 * i, &x, 4); }
static inline void hb_store2(void *p, size_t i, uint16_t x) { memcpy((char *)p + 2 * i, &x, 2); }

#define HB_SCALAR_CAST(name, load, store, convert)                                    \
  static inline void name(const void *src, void *dst, size_t i, size_t count) {       \
    for (; i < count; ++i) store(dst, i, convert(load(src, i)));                      \
  }

static inline uint16_t hb_f16_from_bf16(uint16_t x) { return hb_f16_from_f32(hb_f32_from_bf16(x)); }
static inline uint16_t hb_bf16_from_f16(uint16_t x) { return hb_bf16_from_f32(hb_f32_from_f16(x)); }

HB_SCALAR_CAST(hb_tail_f32_bf16, hb_load4, hb_store2, hb_bf16_from_f32)
HB_SCALAR_CAST(hb_tail_f32_f16, hb_load4, hb_store2, hb_f16_from_f32)
HB_SCALAR_CAST(hb_tail_bf16_f32, hb_load2, hb_store4, hb_f32_from_bf16)
HB_SCALAR_CAST(hb_tail_f16_f32, hb_load2, hb_store4, hb_f32_from_f16)
HB_SCALAR_CAST(hb_tail_bf16_f16, hb_load2, hb_store2, hb_f16_from_bf16)
HB_SCALAR_CAST(hb_tail_f16_bf16, hb_load2, hb_store2, hb_bf16_from_f16)

#endif  // HB_SCALAR_H
