// Release and resume: all or nothing, in the order that lets every step but the last be undone.
#include <algorithm>
#include <chrono>
#include <thread>

#include "parallel.h"
#include "pool.h"

namespace hb {
namespace {

// Share of what was expected back that may still be counted after a release.
constexpr double kResidual = 0.05;

bool kept_always(const Region &region) { return region.policy == HB_BACKUP; }

}  // namespace

// -- backups ----------------------------------------------------------------------------------

void Pool::plan(const Arena &arena, bool whole, Backup *backup) const {
  backup->whole = whole;
  uint64_t at = 0;
  const Region *before = nullptr;
  for (const Region &region : arena.regions) {
    if (region.policy == HB_PERSIST) continue;
    if (region.nbytes && (kept_always(region) || (whole && region.policy == HB_DISCARD))) {
      // Neighbours are one range with the padding between them: fewer, larger copies.
      if (whole && before && !backup->ranges.empty()) {
        Kept &last = backup->ranges.back();
        uint64_t grown = region.offset + region.nbytes - last.offset;
        at += grown - last.nbytes;
        last.nbytes = grown;
      } else {
        backup->ranges.push_back({region.offset, region.nbytes, at});
        at += region.nbytes;
      }
      before = &region;
    } else if (region.nbytes) {
      before = nullptr;
    }
  }
  backup->nbytes = at;
}

// Kept once it is there: page-locking memory takes longer than many a copy through it. Verbs on
// devices hold the device lock, so one is enough.
Status Pool::need_staging() {
  if (!staging_) staging_ = driver_->staging(kChunk);
  if (staging_) return {};
  return Status::no_memory(HB_E_HOST_NOMEM, kChunk, 0, "no memory of the host to copy through");
}

Status Pool::save(Arena &arena, const Backup &backup) {
  if (driver_->direct) {
    for (const Kept &kept : backup.ranges) {
      const void *from = reinterpret_cast<const void *>(arena.address + kept.offset);
      Status status = store_->write(backup.handle, from, kept.nbytes, kept.at);
      if (status.failed()) return status;
    }
    return {};
  }
  if (Status status = need_staging(); status.failed()) return status;
  Status status;
  for (const Kept &kept : backup.ranges)
    for (uint64_t done = 0; done < kept.nbytes && !status.failed(); done += kChunk) {
      uint64_t n = std::min(kChunk, kept.nbytes - done);
      status = driver_->to_host(staging_, arena.address + kept.offset + done, n);
      if (!status.failed()) status = store_->write(backup.handle, staging_, n, kept.at + done);
    }
  return status;
}

Status Pool::restore(Arena &arena) {
  const Backup &backup = arena.backup;
  if (driver_->direct) {
    for (const Kept &kept : backup.ranges) {
      void *to = reinterpret_cast<void *>(arena.address + kept.offset);
      Status status = store_->read(backup.handle, to, kept.nbytes, kept.at);
      if (status.failed()) return status;
    }
    return {};
  }
  if (!backup.nbytes) return {};
  if (Status status = need_staging(); status.failed()) return status;
  Status status;
  for (const Kept &kept : backup.ranges)
    for (uint64_t done = 0; done < kept.nbytes && !status.failed(); done += kChunk) {
      uint64_t n = std::min(kChunk, kept.nbytes - done);
      status = store_->read(backup.handle, staging_, n, kept.at + done);
      if (!status.failed())
        status = driver_->from_host(arena.address + kept.offset + done, staging_, n);
    }
  return status;
}

Status Pool::zero(Arena &arena) {
  for (const Region &region : arena.regions)
    if (region.policy == HB_ZERO && region.nbytes) {
      Status status = driver_->zero(arena.address + region.offset, region.nbytes);
      if (status.failed()) return status;
    }
  return {};
}

void Pool::forget_content(Arena &arena) {
  // Content makes holes in the file; what stays is not moved, so nothing can fail half way.
  Backup slim;
  bool thinner = true;
  for (const Region &region : arena.regions) {
    if (region.policy == HB_PERSIST || !region.nbytes) continue;
    for (const Kept &kept : arena.backup.ranges) {
      if (region.offset < kept.offset ||
          region.offset + region.nbytes > kept.offset + kept.nbytes)
        continue;
      uint64_t at = kept.at + region.offset - kept.offset;
      if (kept_always(region)) {
        slim.ranges.push_back({region.offset, region.nbytes, at});
        slim.nbytes += region.nbytes;
      } else {
        thinner = store_->forget(arena.backup.handle, at, region.nbytes) && thinner;
      }
    }
  }
  if (slim.nbytes || !arena.backup.handle) {
    slim.handle = arena.backup.handle;
    if (!thinner) slim.nbytes = arena.backup.nbytes;  // this kind of file cannot have holes
  } else {
    store_->close(arena.backup.handle);
  }
  std::lock_guard<std::mutex> lock(table_);
  arena.backup = slim;
}

// -- release ----------------------------------------------------------------------------------

Status Pool::give_back(Arena &arena) {
  uint64_t handle = arena.handle;
  if (arena.mapped) {
    Status status = driver_->unmap(arena.address, arena.size, &handle);
    if (status.failed()) return status;
    std::lock_guard<std::mutex> lock(table_);
    arena.mapped = false;
    arena.handle = handle;
  }
  if (handle) {
    Status status = driver_->destroy(arena.size, handle);
    if (status.failed()) return status;
    std::lock_guard<std::mutex> lock(table_);
    arena.handle = 0;
  }
  return {};
}

Status Pool::take_all_backups(std::vector<Held> &going, std::vector<Backup> *made,
                              const std::vector<bool> &whole) {
  Status status;
  made->resize(going.size());
  // Room for all of them before the first byte is copied.
  for (size_t n = 0; n < going.size() && !status.failed(); ++n) {
    Backup &backup = (*made)[n];
    plan(*going[n], whole[n], &backup);
    if (backup.nbytes) status = store_->open(backup.nbytes, &backup.handle);
  }
  for (size_t n = 0; n < going.size() && !status.failed(); ++n)
    if ((*made)[n].handle) status = save(*going[n], (*made)[n]);
  if (status.failed())
    for (Backup &backup : *made)
      if (backup.handle) store_->close(backup.handle);
  return status;
}

Status Pool::unmap_all(std::vector<Held> &going, const std::vector<Backup> &made) {
  Status status;
  size_t done = 0;
  for (; done < going.size(); ++done) {
    Arena &arena = *going[done];
    uint64_t handle = arena.handle;
    status = driver_->unmap(arena.address, arena.size, &handle);
    if (status.failed()) break;
    std::lock_guard<std::mutex> lock(table_);
    arena.mapped = false;
    arena.handle = handle;
  }
  if (!status.failed()) return status;
  for (size_t n = 0; n < going.size(); ++n) {
    Arena &arena = *going[n];
    bool back = true;
    if (n < done) {
      uint64_t handle = arena.handle;
      Status undone = driver_->map(arena.address, arena.size, &handle);
      back = !undone.failed();
      if (!back) {
        status.code = HB_E_UNDO;
        status.text += "; " + arena.label() + " stays released: " + undone.text;
      }
      std::lock_guard<std::mutex> lock(table_);
      arena.mapped = back;
      arena.handle = handle;
      if (!back) {
        arena.released = arena.intact = true;
        arena.backup = made[n];
      }
    }
    if (back && made[n].handle) store_->close(made[n].handle);
  }
  return status;
}

Status Pool::count(const std::vector<Held> &arenas, uint64_t *bytes) {
  uint64_t total = 0;
  *bytes = 0;
  if (!driver_->per_process) return driver_->info(bytes, &total);
  for (const Held &arena : arenas)
    *bytes += driver_->resident(arena->address, arena->size, arena->handle);
  return {};
}

Status Pool::measured(uint64_t before, uint64_t expected, const std::vector<Held> &gone,
                      uint32_t wait_ms, hb_outcome *outcome) {
  auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_ms);
  auto pause = std::chrono::microseconds(200);
  for (;;) {
    uint64_t now = 0;
    Status status = count(gone, &now);
    bool process = driver_->per_process;
    uint64_t freed = process ? (before > now ? before - now : 0) : (now > before ? now - before : 0);
    outcome->expected = expected;
    outcome->freed = status.failed() ? 0 : freed;
    if (!process) outcome->free = now;
    double missing = static_cast<double>(expected) - static_cast<double>(outcome->freed);
    if (!status.failed() && missing <= kResidual * static_cast<double>(expected)) return {};
    // A device may count memory as free some time after it took it back.
    if (status.failed() || process || std::chrono::steady_clock::now() >= until)
      return Status::error(HB_E_INCOMPLETE,
                           status.failed()
                               ? "what came back could not be measured: " + status.text
                               : std::to_string(expected) + " bytes should be back and " +
                                     std::to_string(freed) + " are");
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(20000));
  }
}

Status Pool::release(const std::vector<Choice> &choices, hb_outcome *outcome) {
  std::vector<Held> going, residue, forgetting;
  std::vector<bool> whole;
  auto device = device_lock();
  std::vector<Held> everyone = all();  // outlives the locks, also of those dropped meanwhile
  std::vector<std::unique_lock<std::mutex>> locks;
  for (Held &arena : everyone) {
    auto choice = std::find_if(choices.begin(), choices.end(), [&](const Choice &one) {
      return one.tag == arena->tag && (one.any_group || one.group == arena->group);
    });
    if (choice == choices.end() || choice->retention == HB_RETAIN_RESIDENT) continue;
    if (arena->imported) continue;
    locks.emplace_back(arena->busy);
    if (arena->dropped) continue;
    if (arena->intact) {  // finish the undo that failed, then it is like any other
      uint64_t handle = arena->handle;
      Status status = driver_->map(arena->address, arena->size, &handle);
      if (status.failed()) return status;
      if (arena->backup.handle) store_->close(arena->backup.handle);
      std::lock_guard<std::mutex> lock(table_);
      arena->backup = {};
      arena->handle = handle;
      arena->mapped = true;
      arena->released = arena->intact = false;
    }
    bool keep = choice->retention == HB_RETAIN_BACKUP;
    if (!arena->released) {
      going.push_back(arena);
      whole.push_back(keep);
    } else {
      if (arena->handle) residue.push_back(arena);
      if (!keep && arena->backup.whole) forgetting.push_back(arena);
    }
  }
  Status status;
  uint64_t before = 0, expected = 0;
  std::vector<Held> gone = going;
  gone.insert(gone.end(), residue.begin(), residue.end());
  if (!gone.empty()) {
    std::vector<Backup> made;
    status = driver_->sync();
    if (!status.failed()) status = count(gone, &before);
    if (!status.failed()) status = take_all_backups(going, &made, whole);
    if (!status.failed()) status = unmap_all(going, made);
    if (status.failed()) return status;
    // From here on nothing is undone: the content is in the backups.
    std::lock_guard<std::mutex> lock(table_);
    for (size_t n = 0; n < going.size(); ++n) {
      going[n]->released = true;
      going[n]->backup = made[n];
    }
  }
  for (Held &arena : forgetting) forget_content(*arena);
  if (gone.empty()) return {};
  for (Held &arena : gone) {
    expected += arena->size;
    Status one = give_back(*arena);
    if (one.failed() && !status.failed())
      status = Status::error(HB_E_INCOMPLETE,
                             arena->label() + " is released, but its memory is not: " + one.text,
                             one.driver_code);
  }
  if (driver_->per_process) expected = before;
  Status counted = measured(before, expected, gone, status.failed() ? 0 : wait_ms_, outcome);
  return status.failed() ? status : counted;
}

// -- resume -----------------------------------------------------------------------------------

Status Pool::resume(const std::vector<std::string> &tags, hb_outcome *outcome) {
  std::vector<Held> wanted;
  auto device = device_lock();
  std::vector<Held> everyone = all();  // outlives the locks, also of those dropped meanwhile
  std::vector<std::unique_lock<std::mutex>> locks;
  for (Held &arena : everyone) {
    if (std::find(tags.begin(), tags.end(), arena->tag) == tags.end()) continue;
    locks.emplace_back(arena->busy);
    if (!arena->dropped && arena->released) wanted.push_back(arena);
  }
  if (wanted.empty()) return {};
  Status status;
  std::vector<bool> created(wanted.size()), mapped(wanted.size());
  uint64_t needed = 0;
  for (size_t n = 0; n < wanted.size(); ++n) {
    Arena &arena = *wanted[n];
    if (arena.handle) continue;  // a release could not give it back
    needed += arena.size;
    if (status.failed()) continue;
    uint64_t handle = 0;
    status = driver_->create(arena.address, arena.size, &handle);
    created[n] = !status.failed();
    std::lock_guard<std::mutex> lock(table_);
    arena.handle = created[n] ? handle : 0;
  }
  for (size_t n = 0; n < wanted.size() && !status.failed(); ++n) {
    Arena &arena = *wanted[n];
    if (arena.mapped) continue;
    uint64_t handle = arena.handle;
    status = driver_->map(arena.address, arena.size, &handle);
    mapped[n] = !status.failed();
    std::lock_guard<std::mutex> lock(table_);
    arena.handle = handle;
    arena.mapped = mapped[n];
  }
  for (size_t n = 0; n < wanted.size() && !status.failed(); ++n) {
    Arena &arena = *wanted[n];
    if (arena.intact) continue;
    if (!created[n] || !driver_->fresh_is_zero) status = zero(arena);
    if (!status.failed() && arena.backup.handle) status = restore(arena);
  }
  if (!status.failed()) status = driver_->sync();
  if (status.failed()) {
    for (size_t n = 0; n < wanted.size(); ++n) {
      Arena &arena = *wanted[n];
      uint64_t handle = arena.handle;
      Status undone;
      if (mapped[n]) undone = driver_->unmap(arena.address, arena.size, &handle);
      bool off = mapped[n] && !undone.failed();
      if (created[n] && !undone.failed()) undone = driver_->destroy(arena.size, handle);
      if (created[n] && !undone.failed()) handle = 0;
      if (undone.failed()) status.text += "; " + arena.label() + " stays: " + undone.text;
      std::lock_guard<std::mutex> lock(table_);
      if (off) arena.mapped = false;
      arena.handle = handle;
    }
    if (status.code == HB_E_NOMEM) {
      uint64_t total = 0;
      status.needed = needed;
      driver_->info(&status.free, &total);
    }
    return status;
  }
  // Nothing can fail any more; backups go last.
  std::vector<uint64_t> stores;
  {
    std::lock_guard<std::mutex> lock(table_);
    for (Held &arena : wanted) {
      if (arena->backup.handle) stores.push_back(arena->backup.handle);
      arena->backup = {};
      arena->released = arena->intact = false;
    }
  }
  for (uint64_t store : stores) store_->close(store);
  for (Held &arena : wanted)
    outcome->mapped += driver_->resident(arena->address, arena->size, arena->handle);
  return {};
}

}  // namespace hb
