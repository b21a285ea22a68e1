// A failure at every driver call of release and resume, on the fake driver and on the CUDA path:
// everything is undone, no handle leaks, the backup is intact, and a retry succeeds.
#include "rig.h"

namespace {

struct Matrix {
  explicit Matrix(const char *driver) : rig(driver) {
    first = rig.filled("weights", "a", 1);
    second = rig.filled("weights", "b", 2);
    before[0] = rig.read(first, 0, rig.size(first));
    before[1] = rig.read(second, 0, rig.size(second));
    // Once around: what a pool keeps for its life is there now.
    CHECK_EQ(rig.release(HB_RETAIN_BACKUP), HB_OK);
    CHECK_EQ(rig.resume(), HB_OK);
    rig.write(first, before[0]);
    rig.write(second, before[1]);
  }

  void intact() {
    CHECK(rig.read(first, 0, rig.size(first)) == before[0]);
    CHECK(rig.read(second, 0, rig.size(second)) == before[1]);
  }

  // What a resume after `retention` must bring: content or not, state, what never left, zeros.
  void came_back(int32_t retention) {
    hb_arena arenas[2] = {first, second};
    for (int n = 0; n < 2; ++n) {
      Bytes now = rig.read(arenas[n], 0, rig.size(arenas[n]));
      auto same = [&](uint64_t at, uint64_t size) {
        return !memcmp(now.data() + at, before[n].data() + at, size);
      };
      uint64_t state = (Rig::kContent + 255) / 256 * 256, persist = rig.look(arenas[n]).size;
      uint64_t zero = (state + Rig::kState + 255) / 256 * 256;
      if (retention == HB_RETAIN_BACKUP) CHECK(same(0, Rig::kContent));
      CHECK(same(state, Rig::kState));
      CHECK(same(persist, Rig::kPersist));
      CHECK(now[zero] == 0 && !memcmp(&now[zero], &now[zero + 1], Rig::kZero - 1));
    }
    // For the next round.
    rig.write(first, before[0]);
    rig.write(second, before[1]);
  }

  std::vector<int64_t> handles() {
    std::vector<int64_t> found;
    for (const char *what : {"ranges", "memory", "maps", "bytes"}) found.push_back(rig.count(what));
    found.push_back(rig.cuda ? rig.count("pinned") + rig.count("contexts") : rig.count("stores"));
    return found;
  }

  Rig rig;
  hb_arena first, second;
  Bytes before[2];
};

bool released_but_not_given_back(Rig &rig) { return rig.out.code == HB_E_INCOMPLETE; }

// Fails the nth driver call, for every n that a call has. Returns how many there were.
uint64_t every_release(const char *driver, int32_t retention) {
  Matrix it(driver);
  auto awake = it.handles();
  for (uint64_t n = 1;; ++n) {
    int64_t calls = it.rig.count("*");
    it.rig.fail("*", n);
    int32_t code = it.rig.release(retention);
    it.rig.disarm();
    if (code == HB_OK) {
      CHECK(it.rig.count("*") - calls < static_cast<int64_t>(n));  // no failure was passed over
      CHECK_EQ(it.rig.resume(), HB_OK);
      it.came_back(retention);
      return n - 1;
    }
    CHECK(it.rig.out.text[0]);
    if (released_but_not_given_back(it.rig)) {
      CHECK(it.rig.look(it.first).released && it.rig.look(it.second).released);
    } else {
      CHECK(!it.rig.look(it.first).released && !it.rig.look(it.second).released);
      CHECK_EQ(it.rig.look(it.first).backup, 0);
      CHECK(it.handles() == awake);
      it.intact();
    }
    it.rig.sound();
    CHECK_EQ(it.rig.release(retention), HB_OK);
    CHECK(!it.rig.look(it.first).residue && !it.rig.look(it.second).residue);
    CHECK_EQ(it.rig.resume(), HB_OK);
    it.came_back(retention);
    CHECK(it.handles() == awake);
  }
}

uint64_t every_resume(const char *driver, int32_t retention) {
  Matrix it(driver);
  auto awake = it.handles();
  for (uint64_t n = 1;; ++n) {
    CHECK_EQ(it.rig.release(retention), HB_OK);
    auto asleep = it.handles();
    uint64_t backup = it.rig.look(it.first).backup;
    CHECK(backup >= Rig::kState);
    int64_t calls = it.rig.count("*");
    it.rig.fail("*", n);
    int32_t code = it.rig.resume();
    it.rig.disarm();
    if (code == HB_OK) {
      CHECK(it.rig.count("*") - calls < static_cast<int64_t>(n));
    } else {
      CHECK(it.rig.out.text[0]);
      CHECK(it.rig.look(it.first).released && it.rig.look(it.second).released);
      CHECK_EQ(it.rig.look(it.first).backup, backup);
      CHECK(it.handles() == asleep);
      it.rig.sound();
      CHECK_EQ(it.rig.resume(), HB_OK);
    }
    it.came_back(retention);
    CHECK(it.handles() == awake);
    if (code == HB_OK) return n - 1;
  }
}

}  // namespace

TEST(release_fails_at_every_call_fake) {
  CHECK(every_release("fake", HB_RETAIN_BACKUP) >= 10);
  every_release("fake", HB_RETAIN_DISCARD);
}

TEST(release_fails_at_every_call_cuda) {
  CHECK(every_release("cuda:0", HB_RETAIN_BACKUP) >= 15);
  every_release("cuda:0", HB_RETAIN_DISCARD);
}

TEST(resume_fails_at_every_call_fake) {
  CHECK(every_resume("fake", HB_RETAIN_BACKUP) >= 10);
  every_resume("fake", HB_RETAIN_DISCARD);
}

TEST(resume_fails_at_every_call_cuda) {
  CHECK(every_resume("cuda:0", HB_RETAIN_BACKUP) >= 15);
  every_resume("cuda:0", HB_RETAIN_DISCARD);
}

TEST(opening_an_arena_fails_at_every_call) {
  for (const char *driver : {"fake", "cuda:0"}) {
    Rig rig(driver);
    std::vector<int64_t> empty = {rig.count("ranges"), rig.count("memory"), rig.count("maps")};
    for (uint64_t n = 1;; ++n) {
      hb_arena arena = 0;
      rig.fail("*", n);
      int32_t code = hb_arena_open(rig.pool, "weights", "", 100000, 5000, &arena, &rig.out);
      rig.disarm();
      if (code == HB_OK) {
        CHECK(n > 5);
        rig.arenas.push_back(arena);
        break;
      }
      CHECK_EQ(arena, 0);
      std::vector<int64_t> now = {rig.count("ranges"), rig.count("memory"), rig.count("maps")};
      CHECK(now == empty);
    }
  }
}

TEST(opening_a_pool_fails_at_every_call_cuda) {
  for (uint64_t n = 1;; ++n) {
    FakeCuda::get().fail("*", n, 700);
    hb_pool_options options{"cuda:0", nullptr, HB_FAKE_CUDA, 0};
    hb_pool pool = 0;
    hb_outcome out{};
    int32_t code = hb_pool_open(&options, &pool, &out);
    FakeCuda::get().fail("", 0, 0);
    if (code == HB_OK) {
      hb_pool_close(pool);
      // One call, the question for RDMA, may fail without harm.
      if (n > 6) break;
      continue;
    }
    CHECK_EQ(code, HB_E_UNAVAILABLE);
    CHECK_EQ(FakeCuda::get().count("contexts"), 0);
  }
}

TEST(an_undo_that_fails_loses_nothing) {
  for (const char *driver : {"fake", "cuda:0"}) {
    Matrix it(driver);
    auto awake = it.handles();
    it.rig.fail(it.rig.cuda ? "cuMemUnmap" : "unmap", 2);
    it.rig.fail(it.rig.cuda ? "cuMemMap" : "map", 1);
    CHECK_EQ(it.rig.release(HB_RETAIN_DISCARD), HB_E_UNDO);
    CHECK(it.rig.look(it.first).released && it.rig.look(it.first).residue);
    CHECK(!it.rig.look(it.second).released);
    it.rig.sound();
    CHECK_EQ(it.rig.resume(), HB_OK);
    it.intact();
    CHECK(it.handles() == awake);
    // The same once more, and then a release instead of a resume.
    it.rig.fail(it.rig.cuda ? "cuMemUnmap" : "unmap", 2);
    it.rig.fail(it.rig.cuda ? "cuMemMap" : "map", 1);
    CHECK_EQ(it.rig.release(HB_RETAIN_DISCARD), HB_E_UNDO);
    CHECK_EQ(it.rig.release(HB_RETAIN_BACKUP), HB_OK);
    CHECK_EQ(it.rig.resume(), HB_OK);
    it.came_back(HB_RETAIN_BACKUP);
    CHECK(it.handles() == awake);
  }
}

TEST(a_resume_whose_undo_fails_may_be_tried_again) {
  for (const char *driver : {"fake", "cuda:0"}) {
    Matrix it(driver);
    auto awake = it.handles();
    CHECK_EQ(it.rig.release(HB_RETAIN_BACKUP), HB_OK);
    it.rig.fail(it.rig.cuda ? "cuMemMap" : "map", 2);
    it.rig.fail(it.rig.cuda ? "cuMemUnmap" : "unmap", 1);
    CHECK_EQ(it.rig.resume(), HB_E_DRIVER);
    CHECK(it.rig.look(it.first).residue);
    CHECK_EQ(it.rig.resume(), HB_OK);
    it.came_back(HB_RETAIN_BACKUP);
    CHECK(it.handles() == awake);
  }
}

TEST(memory_that_is_not_given_back_is_asked_for_again) {
  for (const char *driver : {"fake", "cuda:0"}) {
    Matrix it(driver);
    auto awake = it.handles();
    const char *destroy = it.rig.cuda ? "cuMemRelease" : "destroy";
    it.rig.fail(destroy, 1);
    CHECK_EQ(it.rig.release(HB_RETAIN_BACKUP), HB_E_INCOMPLETE);
    CHECK(it.rig.out.freed > 0 && it.rig.out.freed < it.rig.out.expected);
    CHECK_EQ(it.rig.resume(), HB_OK);  // what stayed is used
    it.came_back(HB_RETAIN_BACKUP);
    it.rig.fail(destroy, 1);
    CHECK_EQ(it.rig.release(HB_RETAIN_BACKUP), HB_E_INCOMPLETE);
    CHECK_EQ(it.rig.release(HB_RETAIN_BACKUP), HB_OK);
    CHECK(!it.rig.look(it.first).residue);
    CHECK_EQ(it.rig.resume(), HB_OK);
    CHECK(it.handles() == awake);
  }
}
