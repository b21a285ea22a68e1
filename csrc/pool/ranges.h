// Reserved ranges of this process's addresses, fenced by a page on either side: without fences the
// kernel merges neighbouring mappings, and a range could no longer be told from its neighbour.
#ifndef HOTBUNK_POOL_RANGES_H
#define HOTBUNK_POOL_RANGES_H

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>

#include "driver.h"

namespace hb {

inline uint64_t page_size() {
  static const uint64_t size = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return size;
}

inline void *pointer(uint64_t address) { return reinterpret_cast<void *>(address); }

// What holds nothing: reading or writing there is a fault.
inline void *map_nothing(void *at, uint64_t size, int flags = 0) {
  return mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

// Smaller arenas would round up to huge pages what they really use.
constexpr uint64_t kHugeFrom = uint64_t{32} << 20;

// Whether the kernel gives huge pages to private memory that asks for them.
bool huge_pages();

// Have every page there. 0, or errno.
int populate(void *memory, uint64_t size);

// Bytes of a page-aligned range that the page tables hold. -1: not mapped.
int64_t resident_bytes(uint64_t address, uint64_t nbytes);

// The same of a mapped range, in no time where nothing or only huge pages are there (Linux 6.7).
int64_t scan_resident(uint64_t address, uint64_t nbytes);

class Ranges {
 public:
  // `extra` travels with the range (a file descriptor, say).
  Status reserve(uint64_t size, int extra, uint64_t *address) {
    // Huge pages need a start at a multiple of theirs.
    uint64_t align = size >= kHuge ? kHuge : page_size();
    if (size > (uint64_t{1} << 62)) return too_large(size, ENOMEM);
    uint64_t span = size + align + 2 * page_size();
    void *base = map_nothing(nullptr, span);
    if (base == MAP_FAILED) return too_large(size, errno);
    uint64_t start = reinterpret_cast<uint64_t>(base);
    *address = round_up(start + page_size(), align);
    std::lock_guard<std::mutex> lock(mutex_);
    held_[*address] = {start, span, size, extra};
    return {};
  }

  // Returns the range's extra, or -1 for no such range.
  int unreserve(uint64_t address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = held_.find(address);
    if (found == held_.end()) return -1;
    Held held = found->second;
    held_.erase(found);
    munmap(pointer(held.base), held.span);
    return held.extra;
  }

  // Of the range that `address` lies in: its start and extra. False: in none.
  bool find(uint64_t address, uint64_t *start, int *extra) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = held_.upper_bound(address);
    if (found == held_.begin()) return false;
    --found;
    if (address >= found->first + found->second.size) return false;
    *start = found->first;
    *extra = found->second.extra;
    return true;
  }

  size_t count() {
    std::lock_guard<std::mutex> lock(mutex_);
    return held_.size();
  }

 private:
  struct Held {
    uint64_t base, span, size;
    int extra;
  };

  static Status too_large(uint64_t size, int error) {
    Status made = Status::no_memory(HB_E_NOMEM, size, 0,
                                    "no " + std::to_string(size) + " bytes of addresses are free");
    made.driver_code = error;
    return made;
  }

  std::mutex mutex_;
  std::map<uint64_t, Held> held_;
};

}  // namespace hb

#endif  // HOTBUNK_POOL_RANGES_H
