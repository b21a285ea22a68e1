// Casts of single elements, in integers, so that no rounding mode and no flush-to-zero of the
// process or the chip can change a result. Shared by the scalar variant, the tails of the vector
// variants and the CUDA kernels.
#ifndef HB_CASTS_H
#define HB_CASTS_H

#include <stdint.h>

#if defined(__CUDACC__)
#define HB_BOTH static __device__ __forceinline__
#else
#define HB_BOTH static inline
#endif

HB_BOTH uint16_t hb_bf16_from_f32(uint32_t x) {
  if ((x & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((x >> 16) | 0x40u);
  return (uint16_t)((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
}

HB_BOTH uint32_t hb_f32_from_bf16(uint16_t x) { return (uint32_t)x << 16; }

HB_BOTH uint16_t hb_f16_from_f32(uint32_t x) {
  const uint32_t sign = (x >> 16) & 0x8000u;
  const uint32_t a = x & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // rounds to infinity
  if (a >= 0x38800000u) {                                   // a normal number
    const uint32_t b = a - 0x38000000u;
    return (uint16_t)(sign | ((b + 0xfffu + ((b >> 13) & 1u)) >> 13));
  }
  if (a < 0x33000000u) return (uint16_t)sign;  // under half of the smallest denormal
  const uint32_t shift = 126u - (a >> 23);     // 14 to 24
  const uint32_t m = (a & 0x7fffffu) | 0x800000u;
  const uint32_t half = (1u << (shift - 1)) - 1u;
  return (uint16_t)(sign | ((m + half + ((m >> shift) & 1u)) >> shift));
}

HB_BOTH uint32_t hb_f32_from_f16(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
  uint32_t e = (h >> 10) & 31u, m = h & 0x3ffu;
  if (e == 31u) return sign | 0x7f800000u | (m << 13) | (m ? 0x400000u : 0u);
  if (e == 0) {
    if (m == 0) return sign;
    e = 1;
    while (!(m & 0x400u)) {
      m <<= 1;
      --e;  // may pass zero: the sum below takes it as a negative number
    }
    m &= 0x3ffu;
  }
  return sign | ((e + 112u) << 23) | (m << 13);
}

#endif  // HB_CASTS_H
