// What the pool does when all goes well, and what it makes of arguments that cannot be meant.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "rig.h"

namespace {

const char *const kEvery[] = {"host", "shared:memfd", "fake", "cuda:0"};

// Whether this process may write there: the kernel says so without a fault.
bool writable(uint64_t address) {
  int ends[2];
  CHECK(!pipe(ends));
  char byte = 0;
  bool may = write(ends[1], &byte, 1) == 1 && read(ends[0], reinterpret_cast<void *>(address), 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return may;
}

}  // namespace

TEST(every_driver_keeps_what_it_should_for_200_cycles) {
  for (const char *driver : kEvery) {
    Rig rig(driver, "/tmp");
    hb_arena arena = rig.filled("weights", "target", 3);
    Bytes before = rig.read(arena, 0, rig.size(arena));
    uint64_t address = rig.look(arena).address;
    int64_t memory = driver[0] == 'f' || driver[0] == 'c' ? rig.count("memory") : 0;
    for (int n = 0; n < 200; ++n) {
      int32_t how = n % 2 ? HB_RETAIN_BACKUP : HB_RETAIN_DISCARD;
      CHECK_EQ(rig.release(how), HB_OK);
      CHECK(rig.out.freed > 0);
      CHECK_EQ(rig.look(arena).resident, rig.look(arena).persistent);
      CHECK_EQ(rig.resume(), HB_OK);
      CHECK(rig.out.mapped > 0);
      Bytes now = rig.read(arena, 0, Rig::kContent);
      if (how == HB_RETAIN_BACKUP) CHECK(!memcmp(now.data(), before.data(), now.size()));
      rig.write(arena, before);
    }
    CHECK_EQ(rig.look(arena).address, address);
    if (memory) CHECK_EQ(rig.count("memory"), memory);
    rig.sound();
  }
}

TEST(released_memory_faults) {
  for (const char *driver : {"host", "shared:memfd", "fake", "cuda:0"}) {
    Rig rig(driver);
    hb_arena arena = rig.filled("weights", "", 4);
    CHECK_EQ(rig.release(HB_RETAIN_BACKUP), HB_OK);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
      signal(SIGSEGV, SIG_DFL);  // not the sanitizer's
      _exit(*reinterpret_cast<volatile char *>(rig.look(arena).address));
    }
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
  }
}

TEST(releasing_and_resuming_twice_asks_the_driver_nothing) {
  for (const char *driver : {"fake", "cuda:0"}) {
    Rig rig(driver);
    rig.filled("weights", "", 5);
    CHECK_EQ(rig.resume(), HB_OK);
    CHECK_EQ(rig.release(HB_RETAIN_BACKUP), HB_OK);
    int64_t calls = rig.count("*");
    CHECK_EQ(rig.release(HB_RETAIN_BACKUP), HB_OK);
    CHECK_EQ(rig.out.freed, 0);
    CHECK_EQ(rig.release(HB_RETAIN_RESIDENT), HB_OK);
    CHECK_EQ(rig.release(HB_RETAIN_DISCARD, "no such tag"), HB_OK);
    CHECK_EQ(rig.resume("no such tag"), HB_OK);
    CHECK_EQ(hb_pool_release(rig.pool, nullptr, 0, &rig.out), HB_OK);
    CHECK_EQ(hb_pool_resume(rig.pool, nullptr, 0, &rig.out), HB_OK);
    CHECK_EQ(rig.count("*"), calls);
  }
}

TEST(subsets_of_tags_and_groups) {
  Rig rig("fake");
  hb_arena target = rig.filled("weights", "target", 6), draft = rig.filled("weights", "draft", 7);
  hb_arena kv = rig.filled("kv_cache", "", 8);
  hb_choice choices[] = {{"weights", "draft", HB_RETAIN_RESIDENT},
                         {"weights", nullptr, HB_RETAIN_DISCARD}};
  CHECK_EQ(hb_pool_release(rig.pool, choices, 2, &rig.out), HB_OK);
  CHECK(rig.look(target).released && !rig.look(draft).released && !rig.look(kv).released);
  CHECK_EQ(rig.release(HB_RETAIN_DISCARD, "kv_cache"), HB_OK);
  CHECK_EQ(rig.resume("weights"), HB_OK);
  CHECK(!rig.look(target).released && rig.look(kv).released);
}

TEST(a_stricter_retention_forgets_content_and_keeps_state) {
  for (const char *driver : kEvery) {
    Rig rig(driver);
    hb_arena arena = rig.filled("weights", "", 9);
    Bytes before = rig.read(arena, 0, rig.size(arena));
    CHECK_EQ(rig.release(HB_RETAIN_BACKUP), HB_OK);
    CHECK(rig.look(arena).backup >= Rig::kContent + Rig::kState);
    CHECK_EQ(rig.release(HB_RETAIN_DISCARD), HB_OK);
    CHECK_EQ(rig.look(arena).backup, Rig::kState);
    CHECK_EQ(rig.release(HB_RETAIN_BACKUP), HB_OK);
    CHECK_EQ(rig.look(arena).backup, Rig::kState);
    CHECK_EQ(rig.resume(), HB_OK);
    uint64_t state = (Rig::kContent + 255) / 256 * 256;
    Bytes now = rig.read(arena, state, Rig::kState);
    CHECK(!memcmp(now.data(), before.data() + state, Rig::kState));
  }
}

TEST(an_exhausted_device_says_what_it_needs_and_has) {
  for (const char *driver : {"fake:1048576", "cuda:0"}) {
    Rig rig(driver);
    uint64_t whole = rig.cuda ? uint64_t{256} << 20 : 1 << 20, most = whole - (1 << 18);
    hb_arena arena = rig.open("weights", "", most);
    hb_arena no = 0;
    CHECK_EQ(hb_arena_open(rig.pool, "kv_cache", "", most, 0, &no, &rig.out), HB_E_NOMEM);
    CHECK_EQ(rig.out.needed, most);
    CHECK_EQ(rig.out.free, 1 << 18);
    CHECK_EQ(rig.release(HB_RETAIN_DISCARD), HB_OK);
    rig.open("kv_cache", "", most);
    CHECK_EQ(rig.resume(), HB_E_NOMEM);
    CHECK_EQ(rig.out.needed, most);
    CHECK_EQ(rig.out.free, 1 << 18);
    CHECK(rig.look(arena).released);
    hb_outcome last{};
    CHECK_EQ(hb_pool_last_error(rig.pool, &last), HB_OK);
    CHECK_EQ(last.code, HB_E_NOMEM);
    CHECK_EQ(last.needed, most);
    CHECK_EQ(hb_arena_drop(rig.pool, rig.arenas[1], &rig.out), HB_OK);
    CHECK_EQ(rig.resume(), HB_OK);
  }
}

TEST(sizes_that_overflow_and_sizes_of_nothing) {
  for (const char *driver : kEvery) {
    Rig rig(driver);
    hb_arena arena = 0;
    uint64_t offset = 0;
    for (uint64_t huge : {~uint64_t{0}, uint64_t{1} << 63, (uint64_t{1} << 62) + 1})
      CHECK_EQ(hb_arena_open(rig.pool, "t", "", huge, 0, &arena, &rig.out), HB_E_INVALID);
    CHECK_EQ(hb_arena_open(rig.pool, "t", "", 1, ~uint64_t{0}, &arena, &rig.out), HB_E_INVALID);
    CHECK_EQ(hb_arena_open(rig.pool, "t", "", uint64_t{1} << 60, 0, &arena, &rig.out), HB_E_NOMEM);
    hb_arena none = rig.open("t", "", 0);
    CHECK_EQ(rig.add(none, "nothing", 0, HB_BACKUP), 0);
    CHECK_EQ(hb_arena_add(rig.pool, none, "nothing", 0, HB_BACKUP, &offset, &rig.out), HB_E_EXISTS);
    CHECK_EQ(hb_arena_add(rig.pool, none, "all", ~uint64_t{0}, HB_BACKUP, &offset, &rig.out),
             HB_E_FULL);
    CHECK_EQ(hb_arena_add(rig.pool, none, "p", 1, HB_PERSIST, &offset, &rig.out), HB_E_FULL);
    CHECK_EQ(hb_arena_add(rig.pool, none, "x", 1, 9, &offset, &rig.out), HB_E_INVALID);
    CHECK_EQ(rig.release(HB_RETAIN_BACKUP, "t"), HB_OK);
    CHECK_EQ(rig.look(none).backup, 0);
    char byte = 0;
    CHECK_EQ(hb_arena_read(rig.pool, none, 0, &byte, 1, &rig.out), HB_E_STATE);
    CHECK_EQ(rig.resume("t"), HB_OK);
    CHECK_EQ(hb_arena_read(rig.pool, none, ~uint64_t{0}, &byte, 2, &rig.out), HB_E_INVALID);
    CHECK_EQ(hb_arena_read(rig.pool, none, 0, &byte, 0, &rig.out), HB_OK);
  }
}

TEST(dropping_while_released_and_stale_handles) {
  for (const char *driver : kEvery) {
    Rig rig(driver);
    hb_arena arena = rig.filled("weights", "", 10);
    CHECK_EQ(hb_arena_unreserve(rig.pool, arena), HB_E_HANDLE);  // still in use
    CHECK_EQ(rig.release(HB_RETAIN_BACKUP), HB_OK);
    CHECK_EQ(hb_arena_drop(rig.pool, arena, &rig.out), HB_OK);
    CHECK_EQ(hb_arena_drop(rig.pool, arena, &rig.out), HB_E_HANDLE);
    hb_arena_info info{};
    CHECK_EQ(hb_arena_look(rig.pool, arena, &info), HB_E_HANDLE);
    CHECK_EQ(rig.resume(), HB_OK);
    rig.filled("weights", "", 11);  // the name is free again
    CHECK_EQ(hb_arena_unreserve(rig.pool, arena), HB_OK);
    CHECK_EQ(hb_arena_unreserve(rig.pool, arena), HB_E_HANDLE);
    CHECK_EQ(hb_pool_close(rig.pool), HB_OK);
    CHECK_EQ(hb_pool_close(rig.pool), HB_E_HANDLE);
    CHECK_EQ(rig.release(HB_RETAIN_BACKUP), HB_E_HANDLE);
    CHECK(rig.out.text[0]);
  }
  CHECK_EQ(hb_pool_close(12345), HB_E_HANDLE);
}

TEST(a_late_writer_to_dropped_host_memory_does_not_fault) {
  Rig rig("host");
  hb_arena arena = rig.filled("bucket", "", 12);
  volatile char *at = reinterpret_cast<volatile char *>(rig.look(arena).address);
  CHECK_EQ(hb_arena_drop(rig.pool, arena, &rig.out), HB_OK);
  *at = 1;
  CHECK_EQ(*at, 1);
}

TEST(drivers_that_are_not_here_say_so) {
  hb_pool pool = 0;
  hb_outcome out{};
  for (const char *driver : {"cuda:0", "acl:0"}) {
    hb_pool_options options{driver, nullptr, "/no/such/library.so", 0};
    CHECK_EQ(hb_pool_open(&options, &pool, &out), HB_E_UNAVAILABLE);
    CHECK(std::strstr(out.text, "/no/such/library.so"));
  }
  hb_pool_options wrong{"cuda:0", nullptr, "libm.so.6", 0};
  CHECK_EQ(hb_pool_open(&wrong, &pool, &out), HB_E_UNAVAILABLE);
  CHECK(std::strstr(out.text, "cuInit"));
  hb_pool_options second{"cuda:1", nullptr, HB_FAKE_CUDA, 0};
  CHECK_EQ(hb_pool_open(&second, &pool, &out), HB_E_UNAVAILABLE);
  for (const char *driver : {"", "cpu", "cuda:x", "host:1", "shared:disk", "cuda:-1"}) {
    hb_pool_options options{driver, nullptr, nullptr, 0};
    CHECK_EQ(hb_pool_open(&options, &pool, &out), HB_E_INVALID);
  }
  CHECK_EQ(hb_pool_open(nullptr, &pool, &out), HB_E_INVALID);
}

TEST(memory_that_comes_back_late_is_waited_for) {
  for (const char *driver : {"fake", "cuda:0"}) {
    Rig rig(driver, nullptr, 5000);
    rig.filled("weights", "", 13);
    rig.lie(uint64_t{1} << 30, 1, 3);  // the look before is honest, three after it are not
    CHECK_EQ(rig.release(HB_RETAIN_DISCARD), HB_OK);
    CHECK_EQ(rig.out.freed, rig.out.expected);
  }
}

TEST(memory_that_never_comes_back_is_said) {
  for (const char *driver : {"fake", "cuda:0"}) {
    Rig rig(driver, nullptr, 20);
    hb_arena arena = rig.filled("weights", "", 14);
    rig.lie(uint64_t{1} << 30, 1, 1 << 20);
    CHECK_EQ(rig.release(HB_RETAIN_DISCARD), HB_E_INCOMPLETE);
    rig.lie(0, 0, 0);
    CHECK_EQ(rig.out.freed, 0);
    CHECK(rig.out.expected >= Rig::kContent);
    CHECK(rig.look(arena).released);
    CHECK_EQ(rig.resume(), HB_OK);
  }
}

TEST(eight_threads_at_once) {
  for (const char *driver : kEvery) {
    Rig rig(driver, nullptr, 2000);
    std::atomic<int> wrong{0};
    auto work = [&](int number) {
      std::string group = "g" + std::to_string(number), tag = number % 2 ? "weights" : "kv_cache";
      const char *one_tag = tag.c_str();
      hb_outcome out{};
      for (int n = 0; n < 25; ++n) {
        hb_arena arena = 0;
        uint64_t offset = 0;
        if (hb_arena_open(rig.pool, one_tag, group.c_str(), 70000, 0, &arena, &out)) ++wrong;
        if (hb_arena_add(rig.pool, arena, "r", 60000, HB_BACKUP, &offset, &out)) ++wrong;
        hb_choice choice{one_tag, nullptr, n % 2 ? HB_RETAIN_BACKUP : HB_RETAIN_DISCARD};
        if (hb_pool_release(rig.pool, &choice, 1, &out)) ++wrong;
        uint64_t count = 0;
        if (hb_pool_look(rig.pool, nullptr, 0, &count)) ++wrong;
        if (hb_pool_resume(rig.pool, &one_tag, 1, &out)) ++wrong;
        if (hb_arena_drop(rig.pool, arena, &out)) ++wrong;
        if (hb_arena_unreserve(rig.pool, arena)) ++wrong;
      }
    };
    std::vector<std::thread> threads;
    for (int n = 0; n < 8; ++n) threads.emplace_back(work, n);
    for (auto &thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);
    uint64_t count = 9;
    CHECK_EQ(hb_pool_look(rig.pool, nullptr, 0, &count), HB_OK);
    CHECK_EQ(count, 0);
    rig.sound();
  }
}

TEST(shared_memory_is_the_same_pages_for_whoever_has_the_file) {
  for (const char *driver : {"shared", "shared:memfd"}) {
    Rig rig(driver);
    hb_arena arena = rig.open("weights", "", 100000);
    rig.add(arena, "w", 100000, HB_DISCARD);
    rig.write(arena, Rig::pattern(rig.size(arena), 16));
    int file = hb_arena_fd(rig.pool, arena);
    CHECK(file >= 0);
    void *peer = mmap(nullptr, rig.size(arena), PROT_READ, MAP_SHARED, file, 0);
    CHECK(peer != MAP_FAILED);
    Bytes before = rig.read(arena, 0, 100000);
    CHECK(!memcmp(peer, before.data(), before.size()));
    CHECK_EQ(rig.release(HB_RETAIN_BACKUP), HB_OK);
    CHECK_EQ(rig.look(arena).resident, 0);
    CHECK_EQ(rig.resume(), HB_OK);
    CHECK(!memcmp(peer, before.data(), before.size()));
    munmap(peer, rig.size(arena));
  }
  Rig rig("host");
  CHECK_EQ(hb_arena_fd(rig.pool, rig.open("weights", "", 1)), -1);
}

TEST(a_backup_that_does_not_fit_releases_nothing) {
  for (const char *driver : kEvery) {
    Rig rig(driver, "/no/such/folder");
    hb_arena arena = rig.filled("weights", "", 17);
    Bytes before = rig.read(arena, 0, rig.size(arena));
    CHECK_EQ(rig.release(HB_RETAIN_BACKUP), HB_E_HOST_NOMEM);
    CHECK(rig.out.needed >= Rig::kContent);
    CHECK(!rig.look(arena).released);
    CHECK(rig.read(arena, 0, rig.size(arena)) == before);
  }
}

TEST(every_code_has_a_text) {
  for (int32_t code = 0; code >= -12; --code) CHECK(std::strcmp(hb_strerror(code), "an unknown code"));
  CHECK(!std::strcmp(hb_strerror(-99), "an unknown code"));
}

int main(int argc, char **argv) { return run_tests(argc, argv); }

TEST(memory_of_one_pool_is_seen_by_another_and_outlives_it) {
  for (const char *driver : {"fake", "cuda:0"}) {
    hb_arena there = 0, no = 0;
    Rig importer(driver);
    {
      Rig owner(driver);
      hb_arena arena = owner.filled("bucket", "", 5);
      Bytes before = owner.read(arena, 0, owner.look(arena).size);
      hb_shared shared{};
      CHECK_EQ(hb_arena_export(owner.pool, arena, &shared, &owner.out), HB_OK);
      CHECK(shared.fd >= 0);
      CHECK_EQ(shared.nbytes, owner.look(arena).size);
      CHECK_EQ(hb_arena_import(importer.pool, "theirs", "", &shared, &there, &importer.out), HB_OK);
      CHECK_EQ(hb_arena_import(importer.pool, "theirs", "", &shared, &no, &importer.out),
               HB_E_EXISTS);
      close(shared.fd);
      CHECK(importer.read(there, 0, before.size()) == before);
      unsigned char byte = 77, seen = 0;
      CHECK_EQ(hb_arena_write(importer.pool, there, 9, &byte, 1, &importer.out), HB_OK);
      CHECK_EQ(hb_arena_read(owner.pool, arena, 9, &seen, 1, &owner.out), HB_OK);
      CHECK_EQ(seen, 77);
      CHECK_EQ(importer.look(there).resident, 0);
      shared.read_only = 1;
      CHECK_EQ(hb_arena_export(owner.pool, arena, &shared, &owner.out), HB_OK);
      hb_arena looked = 0;
      CHECK_EQ(hb_arena_import(importer.pool, "looked at", "", &shared, &looked, &importer.out), HB_OK);
      close(shared.fd);
      CHECK_EQ(importer.read(looked, 9, 1)[0], 77);
      CHECK(!writable(importer.look(looked).address));
      CHECK(writable(importer.look(there).address));
      CHECK_EQ(hb_arena_drop(importer.pool, looked, &importer.out), HB_OK);
      CHECK_EQ(hb_arena_unreserve(importer.pool, looked), HB_OK);
      CHECK_EQ(importer.release(HB_RETAIN_DISCARD, "theirs"), HB_OK);
      CHECK(!importer.look(there).released);
      CHECK_EQ(hb_arena_export(importer.pool, there, &shared, &importer.out), HB_E_STATE);
      CHECK_EQ(hb_pool_check(importer.pool, &importer.out), HB_OK);
      CHECK_EQ(owner.release(HB_RETAIN_DISCARD, "bucket"), HB_OK);
      CHECK_EQ(hb_arena_export(owner.pool, arena, &shared, &owner.out), HB_E_STATE);
    }
    unsigned char seen = 0;
    CHECK_EQ(hb_arena_read(importer.pool, there, 9, &seen, 1, &importer.out), HB_OK);
    CHECK_EQ(seen, 77);
    CHECK_EQ(hb_arena_drop(importer.pool, there, &importer.out), HB_OK);
    CHECK_EQ(hb_arena_unreserve(importer.pool, there), HB_OK);
  }
}

TEST(an_import_that_fails_leaves_nothing) {
  Rig owner("fake");
  hb_arena arena = owner.open("bucket", "", 100000);
  for (const char *function : {"export", "import", "map"}) {
    Rig importer("fake");
    hb_shared shared{};
    hb_arena there = 0;
    bool exporting = !strcmp(function, "export");
    CHECK_EQ(hb_fake_fail(exporting ? owner.pool : importer.pool, function, 1, HB_E_DRIVER), HB_OK);
    int32_t code = hb_arena_export(owner.pool, arena, &shared, &owner.out);
    CHECK_EQ(code, exporting ? HB_E_DRIVER : HB_OK);
    if (exporting) continue;
    CHECK_EQ(hb_arena_import(importer.pool, "t", "", &shared, &there, &importer.out), HB_E_DRIVER);
    CHECK_EQ(hb_fake_count(importer.pool, "imported"), 0);
    CHECK_EQ(hb_fake_count(importer.pool, "ranges"), 0);
    shared.nbytes *= 2;
    CHECK_EQ(hb_arena_import(importer.pool, "t", "", &shared, &there, &importer.out), HB_E_DRIVER);
    shared.nbytes -= 1;
    CHECK_EQ(hb_arena_import(importer.pool, "t", "", &shared, &there, &importer.out), HB_E_INVALID);
    close(shared.fd);
    shared = {-1, 0, 0, owner.look(arena).size, 0};
    CHECK_EQ(hb_arena_import(importer.pool, "t", "", &shared, &there, &importer.out), HB_E_DRIVER);
    CHECK_EQ(hb_fake_count(importer.pool, "imported"), 0);
  }
  for (const char *driver : {"host", "shared:memfd"}) {
    Rig rig(driver);
    hb_shared shared{};
    hb_arena own = rig.open("t", "", 1);
    CHECK_EQ(hb_arena_export(rig.pool, own, &shared, &rig.out), HB_E_UNAVAILABLE);
  }
}
