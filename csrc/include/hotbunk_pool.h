// C ABI of the pool: memory that can be taken away, at addresses that stay.
//
// A pool belongs to one device. It holds arenas, one for each (tag, group); an arena is one range of
// addresses, filled with regions. A release takes what must survive into a backup and gives the
// physical memory of whole arenas back; a resume brings it back to the same addresses.
//
// Every function may be called from any thread at any time. Functions return HB_OK or a negative
// code and, where they take an hb_outcome, say there what happened. Nothing here exits, throws or
// prints. Handles are numbers: a stale one is HB_E_HANDLE, never a crash.
//
// Verbs are transactions. Release: fence the device, make room for every backup, take every backup,
// unmap every arena, give the memory back. Resume: create all memory, map all, restore all, fence,
// drop the backups. A failure on the way undoes what the call did, and the same call may be tried
// again. Two things cannot be undone and are said instead:
//   - memory that the driver will not take back once everything is unmapped: HB_E_INCOMPLETE; the
//     arenas are released, and the next release or resume tries again;
//   - an undo that fails itself: HB_E_UNDO; the arenas it names are released with their content
//     still in device memory, and a resume brings it back.
#ifndef HOTBUNK_POOL_H
#define HOTBUNK_POOL_H

#include <stdint.h>

#include "hotbunk.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef uint64_t hb_pool;   // 0 is never a pool
typedef uint64_t hb_arena;  // unique in its pool; 0 is never an arena

#define HB_OK 0
#define HB_E_INVALID (-1)      // an argument that cannot be meant, or a size that overflows
#define HB_E_HANDLE (-2)       // no such pool or arena (any more)
#define HB_E_EXISTS (-3)       // the name is taken
#define HB_E_FULL (-4)         // the arena has no room left for the region
#define HB_E_NOMEM (-5)        // the device cannot hold it; `needed` and `free` say why
#define HB_E_HOST_NOMEM (-6)   // no room on the host for a backup; nothing was released
#define HB_E_UNAVAILABLE (-7)  // the driver cannot be used on this machine
#define HB_E_DRIVER (-8)       // the driver or the system refused a call; undone
#define HB_E_BACKUP (-9)       // a backup cannot be read; what was mapped is released again
#define HB_E_INCOMPLETE (-10)  // released, and less came back than expected
#define HB_E_UNDO (-11)        // failed, and so did undoing it
#define HB_E_STATE (-12)       // not while the arena is released

// Text of a code: static, English, never NULL.
HB_API const char *hb_strerror(int32_t code);

// What a call did, or why it failed. Bytes.
typedef struct hb_outcome {
  int32_t code;         // as returned
  int32_t driver_code;  // errno, CUresult or aclError behind it; 0 if none
  uint64_t needed;      // HB_E_NOMEM, HB_E_HOST_NOMEM, HB_E_FULL
  uint64_t free;      // likewise; release, on devices: bytes that are free now
  uint64_t expected;  // release: what should come back
  uint64_t freed;     // release: what came back, as the OS or the driver says
  uint64_t mapped;    // resume: what was brought back
  char text[512];     // one sentence with the details; empty on success
} hb_outcome;

typedef struct hb_pool_options {
  const char *driver;      // "host", "shared[:tmpfs|hugetlb|memfd]", "cuda:N", "acl:N", "fake[:BYTES]"
  const char *backup_dir;  // backups lie in nameless files there; NULL or "": in memory of the host
  const char *library;     // cuda, acl: what dlopen is given; NULL: HOTBUNK_CUDA_LIBRARY,
                           // HOTBUNK_ACL_LIBRARY, else libcuda.so.1, libascendcl.so
  uint32_t wait_ms;        // how long a release waits for the device to count memory as free
} hb_pool_options;

typedef struct hb_pool_facts {
  uint64_t granularity;  // bytes; arenas are multiples of it
  uint64_t free, total;  // bytes of the device now
  int32_t addressable;   // the host may read and write arenas at their addresses
  int32_t per_process;   // resident bytes are this process's own, not the device's
  char kind[64];         // what the memory is, such as "anonymous" or "tmpfs huge=always"
} hb_pool_facts;

HB_API int32_t hb_pool_open(const hb_pool_options *options, hb_pool *pool, hb_outcome *outcome);

// Drops every arena. Addresses that are not yet unreserved stay valid until they are.
HB_API int32_t hb_pool_close(hb_pool pool);

HB_API int32_t hb_pool_facts_of(hb_pool pool, hb_pool_facts *facts, hb_outcome *outcome);

// The outcome of the pool's newest failed call, whichever thread made it.
HB_API int32_t hb_pool_last_error(hb_pool pool, hb_outcome *outcome);

// -- arenas -----------------------------------------------------------------------------------

// What becomes of a region when its arena is released.
#define HB_DISCARD 0  // kept only by HB_RETAIN_BACKUP
#define HB_BACKUP 1   // kept by every release
#define HB_PERSIST 2  // stays on the device through every release
#define HB_ZERO 3     // kept by none; zeros after every resume

// An arena of at least `nbytes` that are released, followed by at least `persistent` bytes that
// never are. Memory is there when it returns. `group` may be "".
HB_API int32_t hb_arena_open(hb_pool pool, const char *tag, const char *group, uint64_t nbytes,
                             uint64_t persistent, hb_arena *arena, hb_outcome *outcome);

// The next free range, 256-byte aligned; zero bytes are a region, too.
HB_API int32_t hb_arena_add(hb_pool pool, hb_arena arena, const char *name, uint64_t nbytes,
                            int32_t policy, uint64_t *offset, hb_outcome *outcome);

// Takes the arena out of the pool, released or not; its memory and backup are given back. The
// addresses stay reserved until hb_arena_unreserve: somebody may still hold a view. Host memory
// that was mapped stays writable until then, so that a late writer does not fault.
HB_API int32_t hb_arena_drop(hb_pool pool, hb_arena arena, hb_outcome *outcome);
HB_API int32_t hb_arena_unreserve(hb_pool pool, hb_arena arena);

// Copies through the driver, so also where `addressable` is 0. HB_E_STATE while released.
HB_API int32_t hb_arena_read(hb_pool pool, hb_arena arena, uint64_t offset, void *to,
                             uint64_t nbytes, hb_outcome *outcome);
HB_API int32_t hb_arena_write(hb_pool pool, hb_arena arena, uint64_t offset, const void *from,
                              uint64_t nbytes, hb_outcome *outcome);

// The file behind a shared arena, to be passed on; it belongs to the pool. -1: not shared.
HB_API int32_t hb_arena_fd(hb_pool pool, hb_arena arena);

// The memory of an arena on its way to another process of this machine and user.
typedef struct hb_shared {
  int32_t fd;       // travels over a socket; the caller's to close. -1: `number` says it all
  int32_t peer;     // export: the process that will import it; drivers with a list need it
  uint64_t number;  // the driver's own name of it
  uint64_t nbytes;  // as mapped; persistent bytes of an arena are not among them
  int32_t read_only;  // import: a write here is a fault (not on ACL, which has no such mapping)
} hb_shared;

// A handle of the arena's memory, for as long as it is not released: memory that somebody else has
// imported does not come back by a release here. HB_E_STATE: it is released. HB_E_UNAVAILABLE: the
// driver has no way to share it.
HB_API int32_t hb_arena_export(hb_pool pool, hb_arena arena, hb_shared *shared,
                               hb_outcome *outcome);

// Somebody's exported memory as an arena of this pool: same bytes, addresses of this process. No verb
// releases it, and it counts as no resident bytes here; hb_arena_drop closes it. `shared` may be
// closed as soon as this returns.
HB_API int32_t hb_arena_import(hb_pool pool, const char *tag, const char *group,
                               const hb_shared *shared, hb_arena *arena, hb_outcome *outcome);

typedef struct hb_arena_info {
  hb_arena arena;
  uint64_t address;
  uint64_t size;        // releasable bytes; the persistent ones follow
  uint64_t persistent;  // bytes
  uint64_t used;        // bytes of the releasable part given to regions
  uint64_t resident;    // what the OS or the driver holds for it now, persistent bytes included
  uint64_t backup;      // bytes held in a backup
  int32_t released;
  int32_t residue;  // released, and the driver still holds its memory
} hb_arena_info;

HB_API int32_t hb_arena_look(hb_pool pool, hb_arena arena, hb_arena_info *info);

// All arenas in order of creation: fills at most `room` and sets `count` to how many there are.
HB_API int32_t hb_pool_look(hb_pool pool, hb_arena_info *infos, uint64_t room, uint64_t *count);

// -- verbs ------------------------------------------------------------------------------------

#define HB_RETAIN_DISCARD 0   // only HB_BACKUP regions are kept
#define HB_RETAIN_BACKUP 1    // HB_DISCARD regions are kept, too
#define HB_RETAIN_RESIDENT 2  // the arena is left alone

// How arenas are released; the first choice that names an arena counts. An arena that none names
// is left alone, and so is a tag without arenas. A released arena follows a stricter choice:
// HB_RETAIN_DISCARD forgets what a backup holds beyond HB_BACKUP regions.
typedef struct hb_choice {
  const char *tag;
  const char *group;  // NULL: every group of the tag
  int32_t retention;
} hb_choice;

HB_API int32_t hb_pool_release(hb_pool pool, const hb_choice *choices, uint64_t count,
                               hb_outcome *outcome);

HB_API int32_t hb_pool_resume(hb_pool pool, const char *const *tags, uint64_t count,
                              hb_outcome *outcome);

// Resident bytes of a page-aligned range of this process, from the page tables. -1: not mapped.
HB_API int64_t hb_resident(uint64_t address, uint64_t nbytes);

// HB_OK, or HB_E_STATE and which arena contradicts itself. Only while no other call runs.
HB_API int32_t hb_pool_check(hb_pool pool, hb_outcome *outcome);

// -- the fake driver's controls; HB_E_INVALID for a pool of another driver --------------------

// From now on the `nth` (from 1) call of `function` fails with `code`: "reserve", "create", "map",
// "unmap", "destroy", "to_host", "from_host", "zero", "sync", "info", "store_open", "store_write",
// "store_read", "export", "import", or "*" for any of them. Several may be armed; `nth` 0 disarms all.
HB_API int32_t hb_fake_fail(hb_pool pool, const char *function, uint64_t nth, int32_t code);

// After `after` more honest answers, free memory is told `bytes` too low `looks` times.
HB_API int32_t hb_fake_lie(hb_pool pool, uint64_t bytes, uint64_t after, uint64_t looks);

// How often `function` ("*": any) was called, and what is alive: "ranges", "memory", "maps",
// "stores", "imported", "bytes" (imported ones are others'). Negative: no such counter.
HB_API int64_t hb_fake_count(hb_pool pool, const char *what);

#ifdef __cplusplus
}
#endif

#endif  // HOTBUNK_POOL_H
