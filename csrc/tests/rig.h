// What the pool's tests share: a pool with two arenas of known content, on any driver.
#ifndef HOTBUNK_TESTS_RIG_H
#define HOTBUNK_TESTS_RIG_H

#include <dlfcn.h>

#include <cstdlib>
#include <vector>

#include "check.h"
#include "hotbunk_pool.h"

using Bytes = std::vector<unsigned char>;

// The fake CUDA library's controls.
struct FakeCuda {
  void (*fail)(const char *, uint64_t, int);
  void (*lie)(uint64_t, uint64_t, uint64_t);
  int64_t (*count)(const char *);

  static const FakeCuda &get() {
    static FakeCuda made = [] {
      void *library = dlopen(HB_FAKE_CUDA, RTLD_NOW);
      if (!library) std::abort();
      return FakeCuda{
          reinterpret_cast<void (*)(const char *, uint64_t, int)>(dlsym(library, "fake_cuda_fail")),
          reinterpret_cast<void (*)(uint64_t, uint64_t, uint64_t)>(
              dlsym(library, "fake_cuda_lie")),
          reinterpret_cast<int64_t (*)(const char *)>(dlsym(library, "fake_cuda_count"))};
    }();
    return made;
  }
};

struct Rig {
  static constexpr uint64_t kContent = 300000, kState = 5000, kPersist = 777, kZero = 4097;

  explicit Rig(const char *driver, const char *backup_dir = nullptr, uint32_t wait_ms = 50)
      : cuda(!std::strncmp(driver, "cuda", 4)) {
    hb_pool_options options{driver, backup_dir, cuda ? HB_FAKE_CUDA : nullptr, wait_ms};
    CHECK_EQ(hb_pool_open(&options, &pool, &out), HB_OK);
  }

  ~Rig() {
    disarm();
    hb_pool_close(pool);
    for (hb_arena arena : arenas) hb_arena_unreserve(pool, arena);
  }

  Rig(const Rig &) = delete;
  Rig &operator=(const Rig &) = delete;

  hb_arena open(const char *tag, const char *group, uint64_t nbytes, uint64_t persistent = 0) {
    hb_arena arena = 0;
    CHECK_EQ(hb_arena_open(pool, tag, group, nbytes, persistent, &arena, &out), HB_OK);
    arenas.push_back(arena);
    return arena;
  }

  uint64_t add(hb_arena arena, const char *name, uint64_t nbytes, int32_t policy) {
    uint64_t offset = 0;
    CHECK_EQ(hb_arena_add(pool, arena, name, nbytes, policy, &offset, &out), HB_OK);
    return offset;
  }

  // An arena of every policy, full of bytes made from `seed`.
  hb_arena filled(const char *tag, const char *group, unsigned seed) {
    hb_arena arena = open(tag, group, kContent + kState + kZero + 4096, kPersist);
    add(arena, "content", kContent, HB_DISCARD);
    add(arena, "state", kState, HB_BACKUP);
    add(arena, "persist", kPersist, HB_PERSIST);
    add(arena, "zero", kZero, HB_ZERO);
    add(arena, "more", 100, HB_DISCARD);
    write(arena, pattern(size(arena), seed));
    return arena;
  }

  uint64_t size(hb_arena arena) {
    hb_arena_info info = look(arena);
    return info.size + info.persistent;
  }

  static Bytes pattern(uint64_t n, unsigned seed) {
    Bytes made(n);
    for (auto &byte : made) byte = static_cast<unsigned char>((seed = seed * 1103515245 + 12345) >> 16);
    return made;
  }

  void write(hb_arena arena, const Bytes &data) {
    CHECK_EQ(hb_arena_write(pool, arena, 0, data.data(), data.size(), &out), HB_OK);
  }

  Bytes read(hb_arena arena, uint64_t offset, uint64_t n) {
    Bytes data(n);
    CHECK_EQ(hb_arena_read(pool, arena, offset, data.data(), n, &out), HB_OK);
    return data;
  }

  hb_arena_info look(hb_arena arena) {
    hb_arena_info info{};
    CHECK_EQ(hb_arena_look(pool, arena, &info), HB_OK);
    return info;
  }

  int32_t release(int32_t retention, const char *tag = "weights", const char *group = nullptr) {
    hb_choice choice{tag, group, retention};
    return hb_pool_release(pool, &choice, 1, &out);
  }

  int32_t resume(const char *tag = "weights") { return hb_pool_resume(pool, &tag, 1, &out); }

  void sound() {
    hb_outcome found{};
    int32_t code = hb_pool_check(pool, &found);
    if (code) std::fprintf(stderr, "%s\n", found.text);
    CHECK_EQ(code, HB_OK);
  }

  // -- the device below, fake driver or fake CUDA

  void fail(const char *function, uint64_t nth) {
    if (cuda)
      FakeCuda::get().fail(function, nth, 700);
    else
      CHECK_EQ(hb_fake_fail(pool, function, nth, HB_E_DRIVER), HB_OK);
  }

  void lie(uint64_t bytes, uint64_t after, uint64_t looks) {
    if (cuda)
      FakeCuda::get().lie(bytes, after, looks);
    else
      CHECK_EQ(hb_fake_lie(pool, bytes, after, looks), HB_OK);
  }

  void disarm() {
    if (cuda)
      FakeCuda::get().fail("", 0, 0);
    else
      hb_fake_fail(pool, "", 0, HB_E_DRIVER);
  }

  int64_t count(const char *what) {
    return cuda ? FakeCuda::get().count(what) : hb_fake_count(pool, what);
  }

  bool cuda;
  hb_pool pool = 0;
  hb_outcome out{};
  std::vector<hb_arena> arenas;
};

#endif  // HOTBUNK_TESTS_RIG_H
