// What one thread of a CUDA block does. Plain functions of (thread, threads), so that the fake
// driver of the tests runs the same lines on a machine without a GPU.
#ifndef HB_CUDA_BODIES_H
#define HB_CUDA_BODIES_H

#include "../casts.h"
#include "../mix.h"
#include "hotbunk_kernels.h"

#if defined(__CUDACC__)
typedef uint4 hb_quad;
#else
struct alignas(16) hb_quad {
  uint32_t x, y, z, w;
};
#endif

enum { HB_CUDA_THREADS = 256 };
enum { HB_PART_BLOCKS = 64 };  // fingerprint blocks in one part of the work

// A part of a fingerprint's piece: at most HB_PART_BLOCKS blocks, whole but at the piece's ends.
struct hb_part {
  const void *data;
  int64_t nbytes, start, out;
};

// A KV call; `ids` is device memory. op: 0 gather, 1 scatter, 2 zero.
struct hb_kv_call {
  hb_kv kv;
  const int64_t *ids;
  int64_t size, tokens;
  char *packed;
  int64_t op;
};

HB_BOTH int hb_aligned(const void *a, const void *b, uintptr_t unit) {
  return (((uintptr_t)a | (uintptr_t)b) & (unit - 1)) == 0;
}

// ---- bytes ---------------------------------------------------------------------------------

template <class Word>
HB_BOTH void hb_move_words(const char *src, char *dst, int64_t bytes, int t, int threads) {
  const int64_t to_edge = (int64_t)(-(uintptr_t)dst & (sizeof(Word) - 1));
  const int64_t head = to_edge < bytes ? to_edge : bytes;
  for (int64_t i = t; i < head; i += threads) dst[i] = src[i];
  const int64_t words = (bytes - head) / (int64_t)sizeof(Word);
  const Word *from = (const Word *)(src + head);
  Word *to = (Word *)(dst + head);
  for (int64_t i = t; i < words; i += threads) to[i] = from[i];
  for (int64_t i = head + words * (int64_t)sizeof(Word) + t; i < bytes; i += threads)
    dst[i] = src[i];
}

HB_BOTH void hb_move(const char *src, char *dst, int64_t bytes, int t, int threads) {
  const uintptr_t apart = (uintptr_t)src ^ (uintptr_t)dst;
  if ((apart & 15) == 0)
    hb_move_words<hb_quad>(src, dst, bytes, t, threads);
  else if ((apart & 3) == 0)
    hb_move_words<uint32_t>(src, dst, bytes, t, threads);
  else
    hb_move_words<char>(src, dst, bytes, t, threads);
}

HB_BOTH void hb_clear(char *dst, int64_t bytes, int t, int threads) {
  const int64_t to_edge = (int64_t)(-(uintptr_t)dst & 15);
  const int64_t head = to_edge < bytes ? to_edge : bytes;
  for (int64_t i = t; i < head; i += threads) dst[i] = 0;
  const int64_t words = (bytes - head) / 16;
  hb_quad *to = (hb_quad *)(dst + head);
  const hb_quad zeros = {0, 0, 0, 0};
  for (int64_t i = t; i < words; i += threads) to[i] = zeros;
  for (int64_t i = head + words * 16 + t; i < bytes; i += threads) dst[i] = 0;
}

// ---- casts ---------------------------------------------------------------------------------

template <int Type>
struct hb_element {
  typedef uint16_t bits;
};
template <>
struct hb_element<HB_F32> {
  typedef uint32_t bits;
};

template <int From, int To>
HB_BOTH typename hb_element<To>::bits hb_convert(typename hb_element<From>::bits x) {
  const uint32_t wide = From == HB_F32    ? (uint32_t)x
                        : From == HB_BF16 ? hb_f32_from_bf16((uint16_t)x)
                                          : hb_f32_from_f16((uint16_t)x);
  return (typename hb_element<To>::bits)(To == HB_F32    ? wide
                                         : To == HB_BF16 ? hb_bf16_from_f32(wide)
                                                         : hb_f16_from_f32(wide));
}

template <class Bits>
HB_BOTH Bits hb_get(const char *p) {  // any alignment
  uint32_t x = 0;
  for (unsigned k = 0; k < sizeof(Bits); ++k) x |= (uint32_t)(uint8_t)p[k] << (8 * k);
  return (Bits)x;
}

template <class Bits>
HB_BOTH void hb_put(char *p, Bits x) {
  for (unsigned k = 0; k < sizeof(Bits); ++k) p[k] = (char)((uint32_t)x >> (8 * k));
}

template <int From, int To>
HB_BOTH void hb_cast(const char *src, char *dst, int64_t count, int t, int threads) {
  typedef typename hb_element<From>::bits In;
  typedef typename hb_element<To>::bits Out;
  int64_t done = 0;
  if (hb_aligned(src, dst, 16)) {  // eight elements at a time
    for (int64_t i = t; i < count / 8; i += threads) {
      hb_quad in[2], out[2];
      for (unsigned k = 0; k < sizeof(In) / 2; ++k)
        in[k] = ((const hb_quad *)src)[i * (int64_t)(sizeof(In) / 2) + k];
      for (int k = 0; k < 8; ++k) ((Out *)out)[k] = hb_convert<From, To>(((const In *)in)[k]);
      for (unsigned k = 0; k < sizeof(Out) / 2; ++k)
        ((hb_quad *)dst)[i * (int64_t)(sizeof(Out) / 2) + k] = out[k];
    }
    done = count / 8 * 8;
  } else if (hb_aligned(src, src, sizeof(In)) && hb_aligned(dst, dst, sizeof(Out))) {
    for (int64_t i = t; i < count; i += threads)
      ((Out *)dst)[i] = hb_convert<From, To>(((const In *)src)[i]);
    done = count;
  }
  for (int64_t i = done + t; i < count; i += threads)
    hb_put<Out>(dst + i * (int64_t)sizeof(Out),
                hb_convert<From, To>(hb_get<In>(src + i * (int64_t)sizeof(In))));
}

HB_BOTH void hb_copy_body(const hb_copy *c, int t, int threads) {
  const char *src = (const char *)c->src;
  char *dst = (char *)c->dst;
  if (c->src_dtype == c->dst_dtype) {
    const int64_t size = c->src_dtype == HB_BYTES ? 1 : c->src_dtype == HB_F32 ? 4 : 2;
    hb_move(src, dst, c->count * size, t, threads);
    return;
  }
  switch (c->src_dtype * 4 + c->dst_dtype) {
    case HB_F32 * 4 + HB_BF16:
      return hb_cast<HB_F32, HB_BF16>(src, dst, c->count, t, threads);
    case HB_F32 * 4 + HB_F16:
      return hb_cast<HB_F32, HB_F16>(src, dst, c->count, t, threads);
    case HB_BF16 * 4 + HB_F32:
      return hb_cast<HB_BF16, HB_F32>(src, dst, c->count, t, threads);
    case HB_BF16 * 4 + HB_F16:
      return hb_cast<HB_BF16, HB_F16>(src, dst, c->count, t, threads);
    case HB_F16 * 4 + HB_F32:
      return hb_cast<HB_F16, HB_F32>(src, dst, c->count, t, threads);
    case HB_F16 * 4 + HB_BF16:
      return hb_cast<HB_F16, HB_BF16>(src, dst, c->count, t, threads);
  }
}

// ---- fingerprint ---------------------------------------------------------------------------

// Keys that the block's threads share: first filled by all of them, then read by all of them.
struct hb_part_keys {
  uint64_t inner[HB_BLOCK_WORDS];
  uint64_t outer[HB_PART_BLOCKS + 1];
};

HB_BOTH void hb_fill_keys(const hb_part *p, hb_part_keys *keys, int t, int threads) {
  for (int j = t; j < HB_BLOCK_WORDS; j += threads) keys->inner[j] = hb_mix((uint64_t)j);
  const uint64_t first = (uint64_t)(p->start / HB_BLOCK_BYTES);
  for (int b = t; b <= HB_PART_BLOCKS; b += threads) keys->outer[b] = hb_outer_key(first + b);
}

HB_BOTH uint64_t hb_term(const hb_part_keys *keys, int64_t first_block, int64_t word, uint32_t x) {
  return x * keys->inner[word % HB_BLOCK_WORDS] *
         keys->outer[word / HB_BLOCK_WORDS - first_block];
}

// The word's bytes that lie in the part, wherever it begins.
HB_BOTH uint32_t hb_word_by_bytes(const hb_part *p, int64_t word) {
  uint32_t x = 0;
  for (int k = 0; k < 4; ++k) {
    const int64_t at = 4 * word + k - p->start;
    if (at >= 0 && at < p->nbytes)
      x |= (uint32_t)((const uint8_t *)p->data)[at] << (8 * k);
  }
  return x;
}

// This thread's share of the part's sum.
HB_BOTH uint64_t hb_fingerprint_body(const hb_part *p, const hb_part_keys *keys, int t,
                                     int threads) {
  const int64_t end = p->start + p->nbytes, block = p->start / HB_BLOCK_BYTES;
  const int64_t low = p->start / 4, high = (end + 3) / 4;  // words touched
  const uintptr_t base = (uintptr_t)p->data - (uintptr_t)p->start;
  uint64_t sum = 0;
  int64_t inner_low = low, inner_high = low;  // words read four at a time
  if ((base & 15) == 0) {
    inner_low = (p->start + 15) / 16 * 4;
    inner_high = end / 16 * 4;
    if (inner_low > inner_high) inner_low = inner_high = low;
    for (int64_t w = inner_low + 4 * t; w < inner_high; w += 4 * threads) {
      const hb_quad q = *(const hb_quad *)(base + 4 * (uintptr_t)w);
      const uint64_t *k = keys->inner + w % HB_BLOCK_WORDS;
      sum += (q.x * k[0] + q.y * k[1] + q.z * k[2] + q.w * k[3]) *
             keys->outer[w / HB_BLOCK_WORDS - block];
    }
  }
  for (int64_t w = low + t; w < inner_low; w += threads)
    sum += hb_term(keys, block, w, hb_word_by_bytes(p, w));
  const int whole = (base & 3) == 0;
  for (int64_t w = inner_high + t; w < high; w += threads) {
    const int inside = 4 * w >= p->start && 4 * w + 4 <= end;
    const uint32_t x = whole && inside ? *(const uint32_t *)(base + 4 * (uintptr_t)w)
                                       : hb_word_by_bytes(p, w);
    sum += hb_term(keys, block, w, x);
  }
  return sum;
}

// ---- KV ------------------------------------------------------------------------------------

// Block `b` of the table in one of the layers' planes.
HB_BOTH void hb_kv_body(const hb_kv_call *c, int64_t b, int64_t sheet, int t, int threads) {
  const hb_kv *kv = &c->kv;
  const int64_t token = b * c->size;
  const int64_t left = c->tokens - token, count = left < c->size ? left : c->size;
  char *place = (char *)kv->base + sheet / kv->planes * kv->layer_stride +
                sheet % kv->planes * kv->plane_stride + c->ids[b] * c->size * kv->slot_stride;
  char *other = c->packed + (sheet * c->tokens + token) * kv->row;
  const int dense = kv->slot_stride == kv->row;
  const int64_t steps = dense ? 1 : count, bytes = dense ? count * kv->row : kv->row;
  for (int64_t i = 0; i < steps; ++i, place += kv->slot_stride, other += kv->row) {
    if (c->op == 0) hb_move(place, other, bytes, t, threads);
    if (c->op == 1) hb_move(other, place, bytes, t, threads);
    if (c->op == 2) hb_clear(place, bytes, t, threads);
  }
}

#endif  // HB_CUDA_BODIES_H
