// 64 bytes at a time; needs AVX-512 F, BW, DQ and VL. The BF16 extension is left alone: its
// conversion flushes denormals.
#include <immintrin.h>

#include "scalar.h"

namespace {

__m512i load(const char *p) { return _mm512_loadu_si512(p); }
__m256i load_half(const char *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
void store(char *p, __m512i x) { _mm512_storeu_si512(p, x); }
void stream_out(char *p, __m512i x) { _mm512_stream_si512(reinterpret_cast<__m512i *>(p), x); }
size_t to_boundary(const void *p) { return (64 - (reinterpret_cast<uintptr_t>(p) & 63)) & 63; }
__mmask64 first(size_t bytes) { return bytes >= 64 ? ~0ull : (1ull << bytes) - 1; }

// Fewer than 64 bytes, without a branch on how many; but none is no store, since a masked one takes
// its line into the cache even for that.
void copy_edge(const char *s, char *d, size_t bytes) {
  if (bytes == 0) return;
  const __mmask64 mask = first(bytes);
  _mm512_mask_storeu_epi8(d, mask, _mm512_maskz_loadu_epi8(mask, s));
}

void copy(const void *src, void *dst, size_t bytes, int stream) {
  if (!stream || bytes < 256) {
    memcpy(dst, src, bytes);
    return;
  }
  const char *s = static_cast<const char *>(src);
  char *d = static_cast<char *>(dst);
  size_t i = to_boundary(d);
  copy_edge(s, d, i);
  for (; i + 256 <= bytes; i += 256) {
    const __m512i a = load(s + i), b = load(s + i + 64);
    const __m512i c = load(s + i + 128), e = load(s + i + 192);
    stream_out(d + i, a);
    stream_out(d + i + 64, b);
    stream_out(d + i + 128, c);
    stream_out(d + i + 192, e);
  }
  for (; i + 64 <= bytes; i += 64) stream_out(d + i, load(s + i));
  copy_edge(s + i, d + i, bytes - i);
}

void zero(void *dst, size_t bytes, int stream) {
  if (!stream || bytes < 256) {
    memset(dst, 0, bytes);
    return;
  }
  char *d = static_cast<char *>(dst);
  size_t i = to_boundary(d);
  if (i != 0) _mm512_mask_storeu_epi8(d, first(i), _mm512_setzero_si512());
  for (; i + 64 <= bytes; i += 64) stream_out(d + i, _mm512_setzero_si512());
  if (i != bytes) _mm512_mask_storeu_epi8(d + i, first(bytes - i), _mm512_setzero_si512());
}

void fence() { _mm_sfence(); }

__m256i bf16_of_f32(__m512i x) {
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi32(0x7fffffff));
  const __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  const __m512i quiet = _mm512_or_si512(x, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(sum, nan, quiet), 16));
}

__m512i f32_of_bf16(__m256i x) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
__m512i f32_of_f16(__m256i x) { return _mm512_castps_si512(_mm512_cvtph_ps(x)); }
__m256i f16_of_f32(__m512i x) {
  return _mm512_cvtps_ph(_mm512_castsi512_ps(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
__m512i both(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// A cast: bytes of an element on both sides, elements a step, and a step: 64 bytes of the result.
struct F32ToBf16 {
  static constexpr size_t in = 4, out = 2, step = 32;
  static __m512i go(const char *s) { return both(bf16_of_f32(load(s)), bf16_of_f32(load(s + 64))); }
  static void tail(const void *s, void *d, size_t i, size_t n) { hb_tail_f32_bf16(s, d, i, n); }
};
struct F32ToF16 {
  static constexpr size_t in = 4, out = 2, step = 32;
  static __m512i go(const char *s) { return both(f16_of_f32(load(s)), f16_of_f32(load(s + 64))); }
  static void tail(const void *s, void *d, size_t i, size_t n) { hb_tail_f32_f16(s, d, i, n); }
};
struct Bf16ToF32 {
  static constexpr size_t in = 2, out = 4, step = 16;
  static __m512i go(const char *s) { return f32_of_bf16(load_half(s)); }
  static void tail(const void *s, void *d, size_t i, size_t n) { hb_tail_bf16_f32(s, d, i, n); }
};
struct F16ToF32 {
  static constexpr size_t in = 2, out = 4, step = 16;
  static __m512i go(const char *s) { return f32_of_f16(load_half(s)); }
  static void tail(const void *s, void *d, size_t i, size_t n) { hb_tail_f16_f32(s, d, i, n); }
};
struct Bf16ToF16 {
  static constexpr size_t in = 2, out = 2, step = 32;
  static __m512i go(const char *s) {
    return both(f16_of_f32(f32_of_bf16(load_half(s))), f16_of_f32(f32_of_bf16(load_half(s + 32))));
  }
  static void tail(const void *s, void *d, size_t i, size_t n) { hb_tail_bf16_f16(s, d, i, n); }
};
struct F16ToBf16 {
  static constexpr size_t in = 2, out = 2, step = 32;
  static __m512i go(const char *s) {
    return both(bf16_of_f32(f32_of_f16(load_half(s))), bf16_of_f32(f32_of_f16(load_half(s + 32))));
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

// Words times keys, 16 at a time: `at` bytes on in the data, and twice as many in the keys.
__m512i products(const char *p, size_t at, __m512i low_keys, __m512i high_keys) {
  const __m512i low = _mm512_cvtepu32_epi64(load_half(p + at));
  const __m512i high = _mm512_cvtepu32_epi64(load_half(p + at + 32));
  return _mm512_add_epi64(_mm512_mullo_epi64(low, low_keys), _mm512_mullo_epi64(high, high_keys));
}

uint64_t sum_of(__m512i x) {
  alignas(64) uint64_t parts[8];  // the header's own reduction adds as signed numbers
  store(reinterpret_cast<char *>(parts), x);
  uint64_t total = 0;
  for (uint64_t part : parts) total += part;
  return total;
}

// The hardware's own prefetching begins anew at every page; a prefetch beyond the end is nothing.
constexpr size_t kAhead = 512;

uint64_t block_sum(const void *data, size_t j, size_t count, const hb_keys *keys) {
  const char *p = static_cast<const char *>(data);
  const char *key = reinterpret_cast<const char *>(keys->whole + j);
  __m512i a = _mm512_setzero_si512();
  for (size_t at = 0; at < 4 * count; at += 64) {
    _mm_prefetch(p + at + kAhead, _MM_HINT_T0);
    a = _mm512_add_epi64(a, products(p, at, load(key + 2 * at), load(key + 2 * at + 64)));
  }
  return sum_of(a);
}

void four_sums(const void *data, size_t apart, const hb_keys *keys, uint64_t sums[4]) {
  const char *p = static_cast<const char *>(data);
  const char *key = reinterpret_cast<const char *>(keys->whole);
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (size_t at = 0; at < 4 * 1024; at += 64) {
    const __m512i low = load(key + 2 * at), high = load(key + 2 * at + 64);
    a = _mm512_add_epi64(a, products(p, at, low, high));
    b = _mm512_add_epi64(b, products(p + apart, at, low, high));
    c = _mm512_add_epi64(c, products(p + 2 * apart, at, low, high));
    d = _mm512_add_epi64(d, products(p + 3 * apart, at, low, high));
  }
  sums[0] = sum_of(a);
  sums[1] = sum_of(b);
  sums[2] = sum_of(c);
  sums[3] = sum_of(d);
}

}  // namespace

const hb_variant hb_avx512 = {
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
