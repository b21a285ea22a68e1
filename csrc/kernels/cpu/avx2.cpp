// 32 bytes at a time; needs AVX2 and F16C.
#include <immintrin.h>

#include "scalar.h"

namespace {

__m256i load(const char *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
__m128i load_half(const char *p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }
void store(char *p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), x); }
void stream_out(char *p, __m256i x) { _mm256_stream_si256(reinterpret_cast<__m256i *>(p), x); }
size_t to_boundary(const void *p) { return (32 - (reinterpret_cast<uintptr_t>(p) & 31)) & 31; }

void copy(const void *src, void *dst, size_t bytes, int stream) {
  if (!stream || bytes < 256) {
    memcpy(dst, src, bytes);
    return;
  }
  const char *s = static_cast<const char *>(src);
  char *d = static_cast<char *>(dst);
  const size_t head = to_boundary(d);
  memcpy(d, s, head);
  size_t i = head;
  for (; i + 128 <= bytes; i += 128) {
    const __m256i a = load(s + i), b = load(s + i + 32), c = load(s + i + 64), e = load(s + i + 96);
    stream_out(d + i, a);
    stream_out(d + i + 32, b);
    stream_out(d + i + 64, c);
    stream_out(d + i + 96, e);
  }
  memcpy(d + i, s + i, bytes - i);
}

void zero(void *dst, size_t bytes, int stream) {
  if (!stream || bytes < 256) {
    memset(dst, 0, bytes);
    return;
  }
  char *d = static_cast<char *>(dst);
  size_t i = to_boundary(d);
  memset(d, 0, i);
  for (; i + 32 <= bytes; i += 32) stream_out(d + i, _mm256_setzero_si256());
  memset(d + i, 0, bytes - i);
}

void fence() { _mm_sfence(); }

// Eight f32, as bf16 in the low halves of eight 32-bit lanes.
__m256i bf16_lanes(__m256i x) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi32(0x7fffffff));
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  const __m256i quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(sum, quiet, nan), 16);
}

__m256i f32_of_bf16(__m128i x) { return _mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16); }
__m256i f32_of_f16(__m128i x) { return _mm256_castps_si256(_mm256_cvtph_ps(x)); }
__m128i f16_of_f32(__m256i x) {
  return _mm256_cvtps_ph(_mm256_castsi256_ps(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
__m256i bf16_of_f32(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(bf16_lanes(a), bf16_lanes(b)), 0xd8);
}
__m256i f16_of_f32(__m256i a, __m256i b) { return _mm256_set_m128i(f16_of_f32(b), f16_of_f32(a)); }

// A cast: bytes of an element on both sides, elements a step, and a step: 32 bytes of the result.
struct F32ToBf16 {
  static constexpr size_t in = 4, out = 2, step = 16;
  static __m256i go(const char *s) { return bf16_of_f32(load(s), load(s + 32)); }
  static void tail(const void *s, void *d, size_t i, size_t n) { hb_tail_f32_bf16(s, d, i, n); }
};
struct F32ToF16 {
  static constexpr size_t in = 4, out = 2, step = 16;
  static __m256i go(const char *s) { return f16_of_f32(load(s), load(s + 32)); }
  static void tail(const void *s, void *d, size_t i, size_t n) { hb_tail_f32_f16(s, d, i, n); }
};
struct Bf16ToF32 {
  static constexpr size_t in = 2, out = 4, step = 8;
  static __m256i go(const char *s) { return f32_of_bf16(load_half(s)); }
  static void tail(const void *s, void *d, size_t i, size_t n) { hb_tail_bf16_f32(s, d, i, n); }
};
struct F16ToF32 {
  static constexpr size_t in = 2, out = 4, step = 8;
  static __m256i go(const char *s) { return f32_of_f16(load_half(s)); }
  static void tail(const void *s, void *d, size_t i, size_t n) { hb_tail_f16_f32(s, d, i, n); }
};
struct Bf16ToF16 {
  static constexpr size_t in = 2, out = 2, step = 16;
  static __m256i go(const char *s) {
    return f16_of_f32(f32_of_bf16(load_half(s)), f32_of_bf16(load_half(s + 16)));
  }
  static void tail(const void *s, void *d, size_t i, size_t n) { hb_tail_bf16_f16(s, d, i, n); }
};
struct F16ToBf16 {
  static constexpr size_t in = 2, out = 2, step = 16;
  static __m256i go(const char *s) {
    return bf16_of_f32(f32_of_f16(load_half(s)), f32_of_f16(load_half(s + 16)));
  }
  static void tail(const void *s, void *d, size_t i, size_t n) { hb_tail_f16_bf16(s, d, i, n); }
};

template <class Op>
void cast(const void *src, void *dst, size_t count, int stream) {
  const char *s = static_cast<const char *>(src);
  char *d = static_cast<char *>(dst);
  const size_t head = to_boundary(dst) / Op::out;
  size_t i = 0;
  if (stream && to_boundary(dst) % Op::out == 0 && head < count) {
    Op::tail(src, dst, 0, head);
    for (i = head; i + Op::step <= count; i += Op::step)
      stream_out(d + i * Op::out, Op::go(s + i * Op::in));
  } else {
    for (; i + Op::step <= count; i += Op::step) store(d + i * Op::out, Op::go(s + i * Op::in));
  }
  Op::tail(src, dst, i, count);
}

// The keys of 8 words, and what the sums of their products grow in: 32 by 32 bits for the lower half
// of a key, and the upper half's product modulo 2^32.
struct Keys8 {
  __m256i even, odd, upper;
  Keys8(const hb_keys *keys, size_t j)
      : even(load(reinterpret_cast<const char *>(keys->even + j / 2))),
        odd(load(reinterpret_cast<const char *>(keys->odd + j / 2))),
        upper(load(reinterpret_cast<const char *>(keys->upper + j))) {}
};

struct Sum {
  __m256i low = _mm256_setzero_si256(), high = low;

  void add(const char *p, const Keys8 &k) {
    const __m256i w = load(p);
    low = _mm256_add_epi64(low, _mm256_mul_epu32(w, k.even));
    low = _mm256_add_epi64(low, _mm256_mul_epu32(_mm256_srli_epi64(w, 32), k.odd));
    high = _mm256_add_epi32(high, _mm256_mullo_epi32(w, k.upper));
  }

  uint64_t total() const {
    alignas(32) uint64_t lows[4];
    alignas(32) uint32_t highs[8];
    store(reinterpret_cast<char *>(lows), low);
    store(reinterpret_cast<char *>(highs), high);
    uint32_t top = 0;
    for (uint32_t x : highs) top += x;
    return lows[0] + lows[1] + lows[2] + lows[3] + (static_cast<uint64_t>(top) << 32);
  }
};

uint64_t block_sum(const void *data, size_t j, size_t count, const hb_keys *keys) {
  const char *p = static_cast<const char *>(data);
  Sum even, odd;
  for (size_t i = 0; i < count; i += 16) {
    even.add(p + 4 * i, Keys8(keys, j + i));
    odd.add(p + 4 * i + 32, Keys8(keys, j + i + 8));
  }
  return even.total() + odd.total();
}

void four_sums(const void *data, size_t apart, const hb_keys *keys, uint64_t sums[4]) {
  const char *p = static_cast<const char *>(data);
  Sum a, b, c, d;
  for (size_t i = 0; i < 1024; i += 8) {
    const Keys8 k(keys, i);
    a.add(p + 4 * i, k);
    b.add(p + 4 * i + apart, k);
    c.add(p + 4 * i + 2 * apart, k);
    d.add(p + 4 * i + 3 * apart, k);
  }
  sums[0] = a.total();
  sums[1] = b.total();
  sums[2] = c.total();
  sums[3] = d.total();
}

}  // namespace

const hb_variant hb_avx2 = {
    copy,
    zero,
    {{nullptr, nullptr, nullptr, nullptr},
     {nullptr, nullptr, cast<F32ToBf16>, cast<F32ToF16>},
     {nullptr, cast<Bf16ToF32>, nullptr, cast<Bf16ToF16>},
     {nullptr, cast<F16ToF32>, cast<F16ToBf16>, nullptr}},
    block_sum,
    four_sums,
    fence,
};
