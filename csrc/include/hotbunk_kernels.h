// Kernels for weights and KV, one signature for the host and for CUDA.
//
// Each function checks everything it can before it writes its first byte and returns when the work
// is done. HB_K_OK or a negative code comes back; hb_kernels_detail() says what exactly was wrong.
// All functions may be called from any thread, at the same time; they never throw and never exit.
// Memory that a call reads must not be written by anyone else meanwhile.
#ifndef HOTBUNK_KERNELS_H
#define HOTBUNK_KERNELS_H

#include "hotbunk.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  HB_K_OK = 0,
  HB_K_BAD_ARGUMENT = -1,  // a null pointer, a negative count, strides that overlap
  HB_K_BAD_DTYPE = -2,     // an element type, or a pair of them, that has no cast
  HB_K_OVERLAP = -3,       // bytes that are written are read or written elsewhere in the call
  HB_K_OUT_OF_RANGE = -4,  // a block outside the cache, or fewer blocks than tokens need
  HB_K_UNAVAILABLE = -5,   // this machine, or this build, cannot run that variant or device
  HB_K_NO_MEMORY = -6,     // no memory for scratch space
  HB_K_DRIVER = -7,        // a call of the device's driver failed
};

// What a code means. Static text, also for codes that nobody knows.
HB_API const char *hb_kernels_error(int32_t code);

// What went wrong in this thread's last failed call: text that is valid until its next one.
HB_API const char *hb_kernels_detail(void);

// ---- where and how -------------------------------------------------------------------------

enum { HB_VARIANT_AUTO = 0, HB_VARIANT_SCALAR = 1, HB_VARIANT_AVX2 = 2, HB_VARIANT_AVX512 = 3 };

// Flags of a run. A bit that has no name here is refused.
enum {
  // Host only: writes stay in the cache, however many there are. For what is read next, by this
  // process or another one, and has room there (hb_kernels_cache()); else large writes go around it.
  HB_RUN_CACHED = 1,
};

// NULL means the host, the best variant and the process's thread count.
typedef struct hb_run {
  int32_t device;   // -1: the host. >= 0: that CUDA device; pointers and stream are then its own
  int32_t variant;  // host only: HB_VARIANT_*
  int32_t threads;  // host only: at most so many, the caller included; 0: the process's count
  int32_t flags;    // HB_RUN_*
  void *stream;     // CUDA only: a CUstream, or NULL for the default one
} hb_run;

// The variant that HB_VARIANT_AUTO stands for: the best one this machine has, or the one that the
// environment variable HOTBUNK_KERNELS (scalar, avx2, avx512) names if it is usable here.
HB_API int32_t hb_kernels_variant(void);
// Whether this build and this machine can run a variant: 1 or 0.
HB_API int32_t hb_kernels_has(int32_t variant);

// Threads a call may use, the caller included: min(cores this process may run on, 4), or
// HOTBUNK_KERNEL_THREADS. Idle ones sleep. A child of fork() starts its own.
HB_API int32_t hb_kernels_threads(void);
// Set that count (1 to 64) for all later calls.
HB_API int32_t hb_kernels_set_threads(int32_t threads);

// Bytes of the largest cache that a core of this machine has, shared with others or not; 0: not known.
HB_API int64_t hb_kernels_cache(void);

// HB_K_OK when the CUDA kernels can run on a device here; else why not (hb_kernels_detail()).
HB_API int32_t hb_kernels_cuda(int32_t device);

// ---- copies --------------------------------------------------------------------------------

enum { HB_BYTES = 0, HB_F32 = 1, HB_BF16 = 2, HB_F16 = 3 };

typedef struct hb_copy {
  const void *src;
  void *dst;
  int64_t count;      // elements; bytes for HB_BYTES
  int32_t src_dtype;  // HB_BYTES on both sides, or two of the others
  int32_t dst_dtype;
} hb_copy;

// Do every copy of the table, in any order. Casts round to nearest, ties to even, and keep
// denormals; a NaN keeps its sign and the upper bits of its payload, and becomes quiet when it is
// narrowed, or widened from f16. The same type on both sides moves bits. Any alignment will do.
HB_API int32_t hb_copy_many(const hb_copy *table, int64_t n, const hb_run *run);

// ---- fingerprints --------------------------------------------------------------------------

typedef struct hb_piece {
  const void *data;
  int64_t nbytes;
  int64_t start;  // the byte of its tensor at which the piece lies
} hb_piece;

// out[i]: the fingerprint of piece i, as docs/fingerprint.md defines it. The sum (mod 2^64) over a
// tensor's pieces, cut anywhere, is that of the whole tensor. `out` is host memory.
HB_API int32_t hb_fingerprint(const hb_piece *pieces, int64_t n, uint64_t *out, const hb_run *run);

// ---- KV ------------------------------------------------------------------------------------

// A KV cache [layers, planes, slots, row]: any strides, in bytes, that give each place its own.
typedef struct hb_kv {
  void *base;
  int64_t layers, planes, slots, row;  // planes: 2, keys and values; row: bytes of heads * dim
  int64_t layer_stride, plane_stride, slot_stride;
} hb_kv;

// The slots of a sequence: `tokens` of them, block by block. `ids` is host memory.
typedef struct hb_blocks {
  const int64_t *ids;
  int64_t n;
  int64_t size;    // slots in a block; block b holds slots [b * size, (b + 1) * size)
  int64_t tokens;  // <= n * size
} hb_blocks;

// out [layers, planes, tokens, row], packed, gets what the slots hold.
HB_API int32_t hb_kv_gather(const hb_kv *kv, const hb_blocks *blocks, void *out, const hb_run *run);
// The slots get what `in` [layers, planes, tokens, row] holds. A block may not come twice.
HB_API int32_t hb_kv_scatter(const hb_kv *kv, const hb_blocks *blocks, const void *in,
                             const hb_run *run);
// The slots become zeros.
HB_API int32_t hb_kv_zero(const hb_kv *kv, const hb_blocks *blocks, const hb_run *run);

#ifdef __cplusplus
}
#endif

#endif  // HOTBUNK_KERNELS_H
