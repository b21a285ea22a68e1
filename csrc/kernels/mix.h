// Keys of the fingerprint; docs/fingerprint.md defines it.
#ifndef HB_MIX_H
#define HB_MIX_H

#include "casts.h"

#define HB_BLOCK_WORDS 1024
#define HB_BLOCK_BYTES 4096

// SplitMix64.
HB_BOTH uint64_t hb_mix(uint64_t x) {
  uint64_t z = (x + 1u) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

HB_BOTH uint64_t hb_outer_key(uint64_t block) { return hb_mix(0x100000000ull + block) | 1u; }

#endif  // HB_MIX_H
