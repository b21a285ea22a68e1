// What each host variant provides. The files that fill these tables are compiled for their own
// instruction sets, so they include nothing that could leave a shared inline function behind.
#ifndef HB_VARIANTS_H
#define HB_VARIANTS_H

#include <stddef.h>
#include <stdint.h>

struct hb_keys {
  // mix(j) of the words of a block: whole, and the even words', the odd words' and the upper halves
  // by themselves, for 32-bit multipliers.
  alignas(64) uint64_t whole[1024];
  alignas(64) uint64_t even[512];
  alignas(64) uint64_t odd[512];
  alignas(64) uint32_t upper[1024];
};

typedef void (*hb_cast_fn)(const void *src, void *dst, size_t count, int stream);

struct hb_variant {
  // `stream`: the result is not needed in the cache; write around it.
  void (*copy)(const void *src, void *dst, size_t bytes, int stream);
  void (*zero)(void *dst, size_t bytes, int stream);
  hb_cast_fn cast[4][4];  // [source][target], HB_F32, HB_BF16, HB_F16; unequal types only
  // Sum of word * mix(j) over words [j, j + count) of a block; both are multiples of 16.
  uint64_t (*block_sum)(const void *data, size_t j, size_t count, const hb_keys *keys);
  // The sums of the four whole blocks at data, data + apart, ..., side by side. The hardware fetches
  // ahead within a page, and a block is a page: four of them keep memory busy where one waits.
  void (*four_sums)(const void *data, size_t apart, const hb_keys *keys, uint64_t sums[4]);
  // Make streamed writes visible.
  void (*fence)(void);
};

extern const hb_variant hb_scalar;
#if defined(HB_X86)
extern const hb_variant hb_avx2;
extern const hb_variant hb_avx512;
#endif

#endif  // HB_VARIANTS_H
