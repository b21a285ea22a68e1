// The transaction over arenas. See hotbunk_pool.h for what it promises.
#ifndef HOTBUNK_POOL_POOL_H
#define HOTBUNK_POOL_POOL_H

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"

namespace hb {

struct Region {
  std::string name;
  uint64_t offset, nbytes;
  int32_t policy;
};

// What a backup holds of an arena: a range of it, and where in the store.
struct Kept {
  uint64_t offset, nbytes, at;
};

struct Backup {
  uint64_t handle = 0;  // in the store; 0: nothing had to be kept
  uint64_t nbytes = 0;
  bool whole = false;  // content, too, not only what every release keeps
  std::vector<Kept> ranges;
};

struct Arena {
  hb_arena id = 0;
  std::string tag, group;
  uint64_t address = 0, size = 0, persistent = 0;

  std::mutex busy;  // held by the one verb that works on it; taken in order of id
  // Below: written with `busy` and the pool's table locked, read with either.
  std::vector<Region> regions;
  uint64_t used = 0, persistent_used = 0;
  uint64_t handle = 0, persistent_handle = 0;  // physical memory; 0: none
  bool mapped = false;
  bool released = false;
  bool intact = false;   // released, but its memory still holds the content: an undo failed
  bool imported = false;  // another process's memory: never released here
  bool dropped = false;  // out of the pool; only addresses are left
  Backup backup;

  std::string label() const { return tag + "/" + group; }
};

struct Choice {
  std::string tag, group;
  bool any_group;
  int32_t retention;
};

class Pool {
 public:
  Pool(Opened opened, uint32_t wait_ms)
      : fake(opened.fake),
        driver_(std::move(opened.driver)),
        store_(std::move(opened.store)),
        wait_ms_(wait_ms) {}

  ~Pool() {
    if (staging_) driver_->free_staging(staging_);
  }

  Status open(const std::string &tag, const std::string &group, uint64_t nbytes,
              uint64_t persistent, hb_arena *arena);
  Status add(hb_arena id, const std::string &name, uint64_t nbytes, int32_t policy,
             uint64_t *offset);
  Status drop(hb_arena id);
  bool unreserve(hb_arena id);  // false: no such arena, or it is still in use
  Status copy(hb_arena id, uint64_t offset, void *to, const void *from, uint64_t nbytes);
  int fd(hb_arena id);
  Status export_arena(hb_arena id, hb_shared *shared);
  Status import_arena(const std::string &tag, const std::string &group, const hb_shared &shared,
                      hb_arena *arena);

  void close();
  bool empty();  // no arena and no address is left

  std::vector<hb_arena_info> look();
  bool look(hb_arena id, hb_arena_info *info);
  Status facts(hb_pool_facts *facts);
  Status check();

  Status release(const std::vector<Choice> &choices, hb_outcome *outcome);
  Status resume(const std::vector<std::string> &tags, hb_outcome *outcome);

  void remember(const hb_outcome &outcome);
  hb_outcome last_error();

  FakeDevice *const fake;

 private:
  using Held = std::shared_ptr<Arena>;

  Held find(hb_arena id);
  std::vector<Held> all();
  bool taken(const Arena &made) const;  // its name; with the table locked
  hb_arena_info info_of(Arena &arena);
  uint64_t resident(Arena &arena);
  // Devices count memory as a whole: two verbs at once would measure each other.
  std::unique_lock<std::mutex> device_lock();

  // verbs.cpp
  void plan(const Arena &arena, bool whole, Backup *backup) const;
  Status need_staging();
  Status save(Arena &arena, const Backup &backup);
  Status restore(Arena &arena);
  Status zero(Arena &arena);
  void forget_content(Arena &arena);
  Status give_back(Arena &arena);
  Status take_all_backups(std::vector<Held> &going, std::vector<Backup> *made,
                          const std::vector<bool> &whole);
  Status unmap_all(std::vector<Held> &going, const std::vector<Backup> &made);
  Status measured(uint64_t before, uint64_t expected, const std::vector<Held> &gone,
                  uint32_t wait_ms, hb_outcome *outcome);
  Status count(const std::vector<Held> &arenas, uint64_t *bytes);

  std::unique_ptr<Driver> driver_;
  std::unique_ptr<Store> store_;
  const uint32_t wait_ms_;
  std::mutex table_;  // of the arenas: held briefly
  std::mutex device_;
  std::mutex error_;
  std::map<hb_arena, Held> arenas_;
  hb_arena last_ = 0;
  void *staging_ = nullptr;
  hb_outcome last_error_{};
};

}  // namespace hb

#endif  // HOTBUNK_POOL_POOL_H
