// The C ABI: numbers to objects, errors to codes, and no exception across.
#include <sys/mman.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "fake_device.h"
#include "pool.h"

namespace hb {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<hb_pool, std::shared_ptr<Pool>> pools;
  std::map<hb_pool, bool> closed;  // waits for its last addresses
  hb_pool last = 0;
};

// Never destroyed: views may outlive everything else at exit.
Registry &registry() {
  static Registry *made = new Registry;
  return *made;
}

std::shared_ptr<Pool> pool_of(hb_pool id, bool also_closed = false) {
  Registry &all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.pools.find(id);
  if (found == all.pools.end() || (all.closed[id] && !also_closed)) return nullptr;
  return found->second;
}

void forget_if_empty(hb_pool id) {
  Registry &all = registry();
  std::shared_ptr<Pool> last;  // destroyed after the lock
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.pools.find(id);
  if (found == all.pools.end() || !all.closed[id] || !found->second->empty()) return;
  last = found->second;
  all.pools.erase(found);
  all.closed.erase(id);
}

int32_t tell(const Status &status, hb_outcome *outcome, Pool *pool) {
  hb_outcome made{};
  hb_outcome *out = outcome ? outcome : &made;
  out->code = status.code;
  out->driver_code = status.driver_code;
  out->needed = status.needed;
  if (status.failed()) out->free = status.free;  // else a release has said it
  snprintf(out->text, sizeof out->text, "%s", status.text.c_str());
  if (status.failed() && pool) pool->remember(*out);
  return status.code;
}

// Runs `work(pool)`; what it throws becomes a code.
template <typename Work>
int32_t guarded(hb_pool id, hb_outcome *outcome, Work work) {
  if (outcome) *outcome = hb_outcome{};
  try {
    std::shared_ptr<Pool> pool = pool_of(id);
    if (!pool)
      return tell(Status::error(HB_E_HANDLE, "no pool " + std::to_string(id)), outcome, nullptr);
    return tell(work(*pool), outcome, pool.get());
  } catch (const std::exception &error) {
    if (outcome) {
      outcome->code = HB_E_HOST_NOMEM;
      snprintf(outcome->text, sizeof outcome->text, "%s", error.what());
    }
    return HB_E_HOST_NOMEM;
  }
}

Status open_driver(const hb_pool_options &options, Opened *opened) {
  std::string name = options.driver ? options.driver : "";
  std::string kind = name.substr(0, name.find(':'));
  std::string rest = kind.size() < name.size() ? name.substr(kind.size() + 1) : "";
  char *end = nullptr;
  errno = 0;
  unsigned long long number = strtoull(rest.c_str(), &end, 10);
  bool counted = !rest.empty() && *end == 0 && rest[0] >= '0' && rest[0] <= '9' && !errno;
  if (kind != "fake" && number > INT32_MAX) counted = false;  // of devices, and passed on as int
  bool files = options.backup_dir && *options.backup_dir;
  opened->store = files ? file_store(options.backup_dir) : memory_store();
  if (kind == "host" && rest.empty()) {
    opened->driver = host_driver();
    return {};
  }
  if (kind == "shared" &&
      (rest.empty() || rest == "tmpfs" || rest == "hugetlb" || rest == "memfd"))
    return shared_driver(rest, &opened->driver);
  if (kind == "cuda" && (rest.empty() || counted))
    return cuda_driver(static_cast<int>(number), options.library, &opened->driver);
  if (kind == "acl" && (rest.empty() || counted))
    return acl_driver(static_cast<int>(number), options.library, &opened->driver);
  if (kind == "fake" && (rest.empty() || counted)) {
    *opened = fake_driver(rest.empty() ? uint64_t{1} << 30 : number, std::move(opened->store));
    return {};
  }
  return Status::error(HB_E_INVALID,
                       "no driver '" + name + "'; there are host, shared, cuda:N, acl:N and fake");
}

}  // namespace
}  // namespace hb

using hb::Pool;
using hb::Status;

extern "C" {

const char *hb_strerror(int32_t code) {
  switch (code) {
    case HB_OK: return "no error";
    case HB_E_INVALID: return "an argument that cannot be meant";
    case HB_E_HANDLE: return "no such pool or arena";
    case HB_E_EXISTS: return "the name is taken";
    case HB_E_FULL: return "the arena is full";
    case HB_E_NOMEM: return "the device cannot hold it";
    case HB_E_HOST_NOMEM: return "the host has no room for a backup";
    case HB_E_UNAVAILABLE: return "the driver cannot be used on this machine";
    case HB_E_DRIVER: return "the driver refused a call";
    case HB_E_BACKUP: return "a backup cannot be read";
    case HB_E_INCOMPLETE: return "less memory came back than expected";
    case HB_E_UNDO: return "a call failed, and so did undoing it";
    case HB_E_STATE: return "not in this state";
    default: return "an unknown code";
  }
}

int32_t hb_pool_open(const hb_pool_options *options, hb_pool *pool, hb_outcome *outcome) {
  if (outcome) *outcome = hb_outcome{};
  if (!options || !pool) return HB_E_INVALID;
  try {
    hb::Opened opened;
    Status status = hb::open_driver(*options, &opened);
    if (status.failed()) return hb::tell(status, outcome, nullptr);
    auto made = std::make_shared<Pool>(std::move(opened), options->wait_ms);
    hb::Registry &all = hb::registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    *pool = ++all.last;
    all.pools[*pool] = made;
    all.closed[*pool] = false;
    return HB_OK;
  } catch (const std::exception &error) {
    return hb::tell(Status::error(HB_E_HOST_NOMEM, error.what()), outcome, nullptr);
  }
}

int32_t hb_pool_close(hb_pool pool) {
  {
    auto held = hb::pool_of(pool);
    if (!held) return HB_E_HANDLE;
    {
      hb::Registry &all = hb::registry();
      std::lock_guard<std::mutex> lock(all.mutex);
      all.closed[pool] = true;
    }
    held->close();
  }
  hb::forget_if_empty(pool);
  return HB_OK;
}

int32_t hb_pool_facts_of(hb_pool pool, hb_pool_facts *facts, hb_outcome *outcome) {
  if (!facts) return HB_E_INVALID;
  return hb::guarded(pool, outcome, [&](Pool &it) { return it.facts(facts); });
}

int32_t hb_pool_last_error(hb_pool pool, hb_outcome *outcome) {
  auto held = hb::pool_of(pool);
  if (!held || !outcome) return HB_E_HANDLE;
  *outcome = held->last_error();
  return HB_OK;
}

int32_t hb_arena_open(hb_pool pool, const char *tag, const char *group, uint64_t nbytes,
                      uint64_t persistent, hb_arena *arena, hb_outcome *outcome) {
  if (!tag || !group || !arena) return HB_E_INVALID;
  return hb::guarded(pool, outcome,
                     [&](Pool &it) { return it.open(tag, group, nbytes, persistent, arena); });
}

int32_t hb_arena_add(hb_pool pool, hb_arena arena, const char *name, uint64_t nbytes,
                     int32_t policy, uint64_t *offset, hb_outcome *outcome) {
  if (!name || !offset) return HB_E_INVALID;
  return hb::guarded(pool, outcome,
                     [&](Pool &it) { return it.add(arena, name, nbytes, policy, offset); });
}

int32_t hb_arena_drop(hb_pool pool, hb_arena arena, hb_outcome *outcome) {
  return hb::guarded(pool, outcome, [&](Pool &it) { return it.drop(arena); });
}

int32_t hb_arena_unreserve(hb_pool pool, hb_arena arena) {
  auto held = hb::pool_of(pool, true);
  if (!held || !held->unreserve(arena)) return HB_E_HANDLE;
  held.reset();
  hb::forget_if_empty(pool);
  return HB_OK;
}

int32_t hb_arena_read(hb_pool pool, hb_arena arena, uint64_t offset, void *to, uint64_t nbytes,
                      hb_outcome *outcome) {
  if (!to) return HB_E_INVALID;
  return hb::guarded(pool, outcome,
                     [&](Pool &it) { return it.copy(arena, offset, to, nullptr, nbytes); });
}

int32_t hb_arena_write(hb_pool pool, hb_arena arena, uint64_t offset, const void *from,
                       uint64_t nbytes, hb_outcome *outcome) {
  if (!from) return HB_E_INVALID;
  return hb::guarded(pool, outcome,
                     [&](Pool &it) { return it.copy(arena, offset, nullptr, from, nbytes); });
}

int32_t hb_arena_fd(hb_pool pool, hb_arena arena) {
  auto held = hb::pool_of(pool);
  return held ? held->fd(arena) : -1;
}

int32_t hb_arena_export(hb_pool pool, hb_arena arena, hb_shared *shared, hb_outcome *outcome) {
  if (!shared) return HB_E_INVALID;
  shared->fd = -1;
  shared->number = shared->nbytes = 0;
  return hb::guarded(pool, outcome, [&](Pool &it) { return it.export_arena(arena, shared); });
}

int32_t hb_arena_import(hb_pool pool, const char *tag, const char *group, const hb_shared *shared,
                        hb_arena *arena, hb_outcome *outcome) {
  if (!tag || !group || !shared || !arena) return HB_E_INVALID;
  return hb::guarded(pool, outcome,
                     [&](Pool &it) { return it.import_arena(tag, group, *shared, arena); });
}

int32_t hb_arena_look(hb_pool pool, hb_arena arena, hb_arena_info *info) {
  if (!info) return HB_E_INVALID;
  return hb::guarded(pool, nullptr, [&](Pool &it) {
    return it.look(arena, info) ? Status{} : Status::error(HB_E_HANDLE, "no such arena");
  });
}

int32_t hb_pool_look(hb_pool pool, hb_arena_info *infos, uint64_t room, uint64_t *count) {
  if (!count || (room && !infos)) return HB_E_INVALID;
  return hb::guarded(pool, nullptr, [&](Pool &it) {
    auto found = it.look();
    *count = found.size();
    for (uint64_t n = 0; n < room && n < found.size(); ++n) infos[n] = found[n];
    return Status{};
  });
}

int32_t hb_pool_release(hb_pool pool, const hb_choice *choices, uint64_t count,
                        hb_outcome *outcome) {
  if (count && !choices) return HB_E_INVALID;
  return hb::guarded(pool, outcome, [&](Pool &it) {
    std::vector<hb::Choice> made;
    for (uint64_t n = 0; n < count; ++n) {
      const hb_choice &one = choices[n];
      if (!one.tag || one.retention < HB_RETAIN_DISCARD || one.retention > HB_RETAIN_RESIDENT)
        return Status::error(HB_E_INVALID, "choice " + std::to_string(n) + " cannot be meant");
      made.push_back({one.tag, one.group ? one.group : "", !one.group, one.retention});
    }
    hb_outcome unread{};
    return it.release(made, outcome ? outcome : &unread);
  });
}

int32_t hb_pool_resume(hb_pool pool, const char *const *tags, uint64_t count,
                       hb_outcome *outcome) {
  if (count && !tags) return HB_E_INVALID;
  return hb::guarded(pool, outcome, [&](Pool &it) {
    std::vector<std::string> made;
    for (uint64_t n = 0; n < count; ++n) {
      if (!tags[n]) return Status::error(HB_E_INVALID, "a tag is NULL");
      made.emplace_back(tags[n]);
    }
    hb_outcome unread{};
    return it.resume(made, outcome ? outcome : &unread);
  });
}

int64_t hb_resident(uint64_t address, uint64_t nbytes) {
  return hb::resident_bytes(address, nbytes);
}

int32_t hb_pool_check(hb_pool pool, hb_outcome *outcome) {
  return hb::guarded(pool, outcome, [](Pool &it) { return it.check(); });
}

int32_t hb_fake_fail(hb_pool pool, const char *function, uint64_t nth, int32_t code) {
  auto held = hb::pool_of(pool);
  if (!held || !held->fake || !function || code >= 0) return HB_E_INVALID;
  held->fake->fail(function, nth, code);
  return HB_OK;
}

int32_t hb_fake_lie(hb_pool pool, uint64_t bytes, uint64_t after, uint64_t looks) {
  auto held = hb::pool_of(pool);
  if (!held || !held->fake) return HB_E_INVALID;
  held->fake->lie(bytes, after, looks);
  return HB_OK;
}

int64_t hb_fake_count(hb_pool pool, const char *what) {
  auto held = hb::pool_of(pool, true);
  if (!held || !held->fake || !what) return HB_E_INVALID;
  return held->fake->count(what);
}

}  // extern "C"
