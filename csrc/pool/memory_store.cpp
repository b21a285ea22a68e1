// Backups in memory of the host: private anonymous mappings, in huge pages where they are large.
//
// A file in memory would do the same at half the speed: it has ordinary pages.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "driver.h"
#include "parallel.h"
#include "ranges.h"

namespace hb {
namespace {

class MemoryStore : public Store {
 public:
  Status open(uint64_t size, uint64_t *handle) override {
    // Not tried out: the kernel would rather kill somebody than refuse.
    uint64_t free = 0, total = 0;
    host_memory(&free, &total);
    if (size > free) return refuse(size, free, "the host's memory is short");
    auto made = std::make_unique<Block>();
    made->span = size + kHuge;
    made->base = mmap(nullptr, made->span, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made->base == MAP_FAILED) return refuse(size, free, strerror(errno));
    made->data = static_cast<char *>(
        pointer(round_up(reinterpret_cast<uint64_t>(made->base), kHuge)));
    if (size >= kHugeFrom) madvise(made->data, size, MADV_HUGEPAGE);  // a hint: may be absent
    madvise(made->base, made->span, MADV_DONTDUMP);
    if (int error = populate(made->data, size)) {
      munmap(made->base, made->span);
      return refuse(size, free, strerror(error));
    }
    *handle = reinterpret_cast<uint64_t>(made.release());
    return {};
  }

  Status write(uint64_t handle, const void *from, uint64_t size, uint64_t at) override {
    return copy(block(handle)->data + at, static_cast<const char *>(from), size);
  }

  Status read(uint64_t handle, void *to, uint64_t size, uint64_t at) override {
    return copy(static_cast<char *>(to), block(handle)->data + at, size);
  }

  bool forget(uint64_t handle, uint64_t at, uint64_t size) override {
    // Whole pages of it; those at its ends hold others' bytes, too.
    char *start = block(handle)->data + at, *end = start + size;
    uint64_t low = round_up(reinterpret_cast<uint64_t>(start), page_size());
    uint64_t high = reinterpret_cast<uint64_t>(end) / page_size() * page_size();
    return low >= high || !madvise(pointer(low), high - low, MADV_DONTNEED);
  }

  void close(uint64_t handle) override {
    Block *one = block(handle);
    munmap(one->base, one->span);
    delete one;
  }

 private:
  struct Block {
    void *base = nullptr;
    uint64_t span = 0;
    char *data = nullptr;
  };

  static Block *block(uint64_t handle) { return static_cast<Block *>(pointer(handle)); }

  static Status copy(char *to, const char *from, uint64_t size) {
    in_chunks(size, [=](uint64_t at, uint64_t n) {
      memcpy(to + at, from + at, n);
      return 0;
    });
    return {};
  }

  static Status refuse(uint64_t size, uint64_t free, const char *why) {
    return Status::no_memory(HB_E_HOST_NOMEM, size, free,
                             "a backup of " + std::to_string(size) +
                                 " bytes in memory of the host (free: " + std::to_string(free) +
                                 "): " + why);
  }
};

}  // namespace

std::unique_ptr<Store> memory_store() { return std::make_unique<MemoryStore>(); }

}  // namespace hb
