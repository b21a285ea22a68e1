// Arenas: making, filling, looking at and dropping them.
#include "pool.h"

#include <cstring>

namespace hb {
namespace {

constexpr uint64_t kAlign = 256;
constexpr uint64_t kMost = uint64_t{1} << 62;  // beyond it sizes would overflow on the way

Status no_arena(hb_arena id) {
  return Status::error(HB_E_HANDLE, "the pool has no arena " + std::to_string(id));
}

Status name_taken(const Arena &made) {
  return Status::error(HB_E_EXISTS, "the pool already has an arena " + made.label());
}

}  // namespace

std::unique_lock<std::mutex> Pool::device_lock() {
  std::unique_lock<std::mutex> lock(device_, std::defer_lock);
  if (!driver_->per_process) lock.lock();
  return lock;
}

Status Pool::open(const std::string &tag, const std::string &group, uint64_t nbytes,
                  uint64_t persistent, hb_arena *arena) {
  if (nbytes > kMost || persistent > kMost)
    return Status::error(HB_E_INVALID, "an arena of " + std::to_string(nbytes) + " + " +
                                           std::to_string(persistent) + " bytes is too large");
  auto made = std::make_shared<Arena>();
  made->tag = tag;
  made->group = group;
  made->size = round_up(nbytes ? nbytes : 1, driver_->granularity);
  made->persistent = round_up(persistent, driver_->granularity);
  {
    std::lock_guard<std::mutex> lock(table_);
    if (taken(*made)) return name_taken(*made);
  }
  auto device = device_lock();
  Status status = driver_->reserve(made->size + made->persistent, &made->address);
  if (status.failed()) return status;
  uint64_t parts[2][2] = {{made->address, made->size},
                          {made->address + made->size, made->persistent}};
  uint64_t *handles[2] = {&made->handle, &made->persistent_handle};
  bool mapped[2] = {false, false};
  for (int n = 0; n < 2 && !status.failed(); ++n)
    if (parts[n][1]) status = driver_->create(parts[n][0], parts[n][1], handles[n]);
  for (int n = 0; n < 2 && !status.failed(); ++n) {
    if (!parts[n][1]) continue;
    status = driver_->map(parts[n][0], parts[n][1], handles[n]);
    mapped[n] = !status.failed();
    // New memory of a device holds what others left there.
    if (mapped[n] && !driver_->fresh_is_zero) status = driver_->zero(parts[n][0], parts[n][1]);
  }
  if (!status.failed()) status = driver_->sync();
  std::lock_guard<std::mutex> lock(table_);
  if (!status.failed() && taken(*made)) status = name_taken(*made);
  if (status.failed()) {
    for (int n = 0; n < 2; ++n)
      if (mapped[n])
        driver_->abandon(parts[n][0], parts[n][1], *handles[n]);
      else if (*handles[n])
        driver_->destroy(parts[n][1], *handles[n]);
    driver_->unreserve(made->address);
    if (status.code == HB_E_NOMEM) status.needed = made->size + made->persistent;
    return status;
  }
  made->mapped = true;
  made->id = *arena = ++last_;
  arenas_[made->id] = made;
  return {};
}

Status Pool::export_arena(hb_arena id, hb_shared *shared) {
  Held arena = find(id);
  if (!arena) return no_arena(id);
  std::lock_guard<std::mutex> busy(arena->busy);
  if (arena->dropped) return no_arena(id);
  if (!arena->mapped || arena->imported)
    return Status::error(HB_E_STATE, "arena " + arena->label() +
                                         (arena->imported ? " is another process's" : " is released"));
  shared->nbytes = arena->size;
  return driver_->export_memory(arena->size, arena->handle, shared);
}

Status Pool::import_arena(const std::string &tag, const std::string &group, const hb_shared &shared,
                          hb_arena *arena) {
  auto made = std::make_shared<Arena>();
  made->tag = tag;
  made->group = group;
  made->size = shared.nbytes;
  made->imported = true;
  if (!made->size || made->size > kMost || made->size % driver_->granularity)
    return Status::error(HB_E_INVALID, std::to_string(made->size) + " bytes are no whole pages of " +
                                           std::to_string(driver_->granularity));
  auto device = device_lock();
  Status status = driver_->import_memory(shared, &made->handle);
  if (status.failed()) return status;
  status = driver_->reserve(made->size, &made->address);
  if (!status.failed()) {
    status = shared.read_only
                 ? driver_->map_read_only(made->address, made->size, &made->handle)
                 : driver_->map(made->address, made->size, &made->handle);
    made->mapped = !status.failed();
  }
  std::lock_guard<std::mutex> lock(table_);
  if (!status.failed() && taken(*made)) status = name_taken(*made);
  if (status.failed()) {
    if (made->mapped)
      driver_->abandon(made->address, made->size, made->handle);
    else
      driver_->destroy(made->size, made->handle);
    if (made->address) driver_->unreserve(made->address);
    return status;
  }
  made->id = *arena = ++last_;
  arenas_[made->id] = made;
  return {};
}

bool Pool::taken(const Arena &made) const {
  for (auto &one : arenas_)
    if (!one.second->dropped && one.second->tag == made.tag && one.second->group == made.group)
      return true;
  return false;
}

Pool::Held Pool::find(hb_arena id) {
  std::lock_guard<std::mutex> lock(table_);
  auto found = arenas_.find(id);
  return found == arenas_.end() || found->second->dropped ? nullptr : found->second;
}

std::vector<Pool::Held> Pool::all() {
  std::lock_guard<std::mutex> lock(table_);
  std::vector<Held> found;
  for (auto &one : arenas_)
    if (!one.second->dropped) found.push_back(one.second);
  return found;
}

Status Pool::add(hb_arena id, const std::string &name, uint64_t nbytes, int32_t policy,
                 uint64_t *offset) {
  Held arena = find(id);
  if (!arena) return no_arena(id);
  if (policy < HB_DISCARD || policy > HB_ZERO)
    return Status::error(HB_E_INVALID, "no policy " + std::to_string(policy));
  std::lock_guard<std::mutex> busy(arena->busy);
  std::lock_guard<std::mutex> lock(table_);
  for (const Region &region : arena->regions)
    if (region.name == name)
      return Status::error(HB_E_EXISTS,
                           "arena " + arena->label() + " already has a region '" + name + "'");
  bool stays = policy == HB_PERSIST;
  uint64_t &used = stays ? arena->persistent_used : arena->used;
  uint64_t room = stays ? arena->persistent : arena->size;
  uint64_t at = round_up(used, kAlign), left = at < room ? room - at : 0;
  if (nbytes > left || at > room)
    return Status::no_memory(HB_E_FULL, nbytes, left,
                             "arena " + arena->label() + " has " + std::to_string(left) +
                                 " bytes left and '" + name + "' needs " + std::to_string(nbytes));
  used = at + nbytes;
  *offset = stays ? arena->size + at : at;
  arena->regions.push_back({name, *offset, nbytes, policy});
  return {};
}

Status Pool::drop(hb_arena id) {
  Held arena = find(id);
  if (!arena) return no_arena(id);
  auto device = device_lock();
  std::lock_guard<std::mutex> busy(arena->busy);
  if (!driver_->direct) driver_->sync();  // the device may still work on it
  std::lock_guard<std::mutex> lock(table_);
  if (arena->dropped) return no_arena(id);
  if (arena->mapped)
    driver_->abandon(arena->address, arena->size, arena->handle);
  else if (arena->handle)
    driver_->destroy(arena->size, arena->handle);
  if (arena->persistent_handle)
    driver_->abandon(arena->address + arena->size, arena->persistent, arena->persistent_handle);
  if (arena->backup.handle) store_->close(arena->backup.handle);
  arena->backup = {};
  arena->handle = arena->persistent_handle = 0;
  arena->mapped = false;
  arena->dropped = true;
  return {};
}

bool Pool::unreserve(hb_arena id) {
  Held arena;
  {
    std::lock_guard<std::mutex> lock(table_);
    auto found = arenas_.find(id);
    if (found == arenas_.end() || !found->second->dropped) return false;
    arena = found->second;
    arenas_.erase(found);
  }
  driver_->unreserve(arena->address);
  return true;
}

Status Pool::copy(hb_arena id, uint64_t offset, void *to, const void *from, uint64_t nbytes) {
  Held arena = find(id);
  if (!arena) return no_arena(id);
  std::lock_guard<std::mutex> busy(arena->busy);
  if (arena->dropped) return no_arena(id);
  uint64_t whole = arena->size + arena->persistent;
  if (offset > whole || nbytes > whole - offset)
    return Status::error(HB_E_INVALID, "bytes beyond the end of arena " + arena->label());
  if (arena->released && offset < arena->size)
    return Status::error(HB_E_STATE, "arena " + arena->label() + " is released");
  if (!nbytes) return {};
  uint64_t address = arena->address + offset;
  // The two parts of an arena are two mappings, and no copy may span them.
  uint64_t first = nbytes;
  if (offset < arena->size && nbytes > arena->size - offset) first = arena->size - offset;
  auto part = [&](uint64_t at, uint64_t n) {
    return to ? driver_->to_host(static_cast<char *>(to) + at, address + at, n)
              : driver_->from_host(address + at, static_cast<const char *>(from) + at, n);
  };
  Status status = part(0, first);
  if (!status.failed() && first < nbytes) status = part(first, nbytes - first);
  return status;
}

int Pool::fd(hb_arena id) {
  Held arena = find(id);
  return arena ? driver_->fd(arena->address) : -1;
}

void Pool::close() {
  for (Held &arena : all()) drop(arena->id);
}

bool Pool::empty() {
  std::lock_guard<std::mutex> lock(table_);
  return arenas_.empty();
}

uint64_t Pool::resident(Arena &arena) {
  if (arena.imported) return 0;
  uint64_t bytes = driver_->resident(arena.address, arena.size, arena.handle);
  if (arena.persistent)
    bytes += driver_->resident(arena.address + arena.size, arena.persistent,
                               arena.persistent_handle);
  return bytes;
}

hb_arena_info Pool::info_of(Arena &arena) {
  hb_arena_info info{};
  info.arena = arena.id;
  info.address = arena.address;
  info.size = arena.size;
  info.persistent = arena.persistent;
  info.used = arena.used;
  info.resident = resident(arena);
  info.backup = arena.backup.nbytes;
  info.released = arena.released;
  info.residue = arena.released && arena.handle;
  return info;
}

std::vector<hb_arena_info> Pool::look() {
  std::lock_guard<std::mutex> lock(table_);
  std::vector<hb_arena_info> infos;
  for (auto &one : arenas_)
    if (!one.second->dropped) infos.push_back(info_of(*one.second));
  return infos;
}

bool Pool::look(hb_arena id, hb_arena_info *info) {
  std::lock_guard<std::mutex> lock(table_);
  auto found = arenas_.find(id);
  if (found == arenas_.end() || found->second->dropped) return false;
  *info = info_of(*found->second);
  return true;
}

Status Pool::facts(hb_pool_facts *facts) {
  facts->granularity = driver_->granularity;
  facts->addressable = driver_->addressable;
  facts->per_process = driver_->per_process;
  snprintf(facts->kind, sizeof facts->kind, "%s", driver_->kind.c_str());
  return driver_->info(&facts->free, &facts->total);
}

Status Pool::check() {
  std::lock_guard<std::mutex> lock(table_);
  for (auto &one : arenas_) {
    Arena &arena = *one.second;
    if (arena.dropped) continue;
    std::string wrong;
    uint64_t held = driver_->resident(arena.address, arena.size, arena.handle);
    if (!arena.released && (!arena.mapped || !arena.handle)) wrong = "is in use and has no memory";
    if (!arena.released && arena.backup.nbytes) wrong = "is mapped and still has a backup";
    if (arena.released && held && !arena.handle) wrong = "is released and resident";
    if (held > arena.size) wrong = "counts pages that are not its own";
    if (!wrong.empty()) return Status::error(HB_E_STATE, "arena " + arena.label() + " " + wrong);
  }
  return {};
}

void Pool::remember(const hb_outcome &outcome) {
  std::lock_guard<std::mutex> lock(error_);
  last_error_ = outcome;
}

hb_outcome Pool::last_error() {
  std::lock_guard<std::mutex> lock(error_);
  return last_error_;
}

}  // namespace hb
