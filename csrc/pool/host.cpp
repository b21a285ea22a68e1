// Private anonymous memory of this process, in huge pages from a threshold on.
//
// Memory is made populated at an address of its own and moved into its range by mremap. So "create
// everything, then map everything" means here what it means on a GPU. Unmapping fences the pages
// where they are, and only destroying drops them: a release that fails half way lifts the fences
// again instead of having lost the content.
#include <sys/mman.h>

#include <atomic>
#include <cstring>

#include "on_host.h"
#include "parallel.h"
#include "ranges.h"

namespace hb {
namespace {

class HostDriver : public OnHost {
 public:
  HostDriver() {
    granularity = page_size();
    kind = "anonymous";
    huge_ = huge_pages();
  }

  Status reserve(uint64_t size, uint64_t *address) override {
    return ranges_.reserve(size, 0, address);
  }

  void unreserve(uint64_t address) override { ranges_.unreserve(address); }

  Status create(uint64_t, uint64_t size, uint64_t *handle) override {
    // The kernel would rather kill somebody than refuse, so it is asked before.
    uint64_t free = 0, total = 0;
    host_memory(&free, &total);
    if (total && size > free) return short_of(size, free, ENOMEM);
    void *memory = spare(size);
    if (memory == MAP_FAILED) return short_of(size, free, errno);
    int error = mprotect(memory, size, PROT_READ | PROT_WRITE) ? errno : 0;
    if (!error && huge(size)) madvise(memory, size, MADV_HUGEPAGE);  // a hint: may be absent
    if (!error) error = populate(memory, size);
    if (error) {
      munmap(memory, size);
      return short_of(size, free, error);
    }
    *handle = reinterpret_cast<uint64_t>(memory);
    return {};
  }

  Status destroy(uint64_t size, uint64_t handle) override {
    // Freeing pages is the work, and madvise lets several threads do it; munmap does not. For huge
    // pages there is too little of it.
    if (!huge(size)) in_chunks(size, [=](uint64_t at, uint64_t n) {
      madvise(pointer(handle + at), n, MADV_DONTNEED);
      return 0;
    });
    // What was fenced lies in its range still, which keeps its addresses.
    uint64_t start = 0;
    int extra = 0;
    if (ranges_.find(handle, &start, &extra)) {
      if (map_nothing(pointer(handle), size, MAP_FIXED) == MAP_FAILED)
        return Status::system("mmap", errno);
    } else if (munmap(pointer(handle), size)) {
      return Status::system("munmap", errno);
    }
    return {};
  }

  Status map(uint64_t address, uint64_t size, uint64_t *handle) override {
    if (mprotect(pointer(*handle), size, PROT_READ | PROT_WRITE))
      return Status::system("mprotect", errno);
    if (*handle == address) return {};  // it was fenced here
    if (mremap(pointer(*handle), size, size, MREMAP_MAYMOVE | MREMAP_FIXED, pointer(address)) ==
        MAP_FAILED)
      return Status::system("mremap", errno);
    *handle = address;
    return {};
  }

  Status unmap(uint64_t address, uint64_t size, uint64_t *) override {
    if (mprotect(pointer(address), size, PROT_NONE)) return Status::system("mprotect", errno);
    return {};
  }

  void abandon(uint64_t address, uint64_t size, uint64_t) override {
    // It stays writable until the addresses go: somebody may still hold a view.
    madvise(pointer(address), size, MADV_DONTNEED);
  }

  // From the page tables: cheap enough for every verb, where smaps walks the whole process.
  uint64_t resident(uint64_t address, uint64_t size, uint64_t handle) override {
    int64_t found = scan_resident(handle ? handle : address, size);
    return found < 0 ? 0 : static_cast<uint64_t>(found);
  }

 private:
  // Addresses for memory that no range holds, aligned so that huge pages survive the moves.
  static void *spare(uint64_t size) {
    if (size < kHuge) return map_nothing(nullptr, size);
    uint64_t span = size + kHuge;
    void *base = map_nothing(nullptr, span);
    if (base == MAP_FAILED) return base;
    uint64_t start = reinterpret_cast<uint64_t>(base), at = round_up(start, kHuge);
    if (at > start) munmap(base, at - start);
    if (start + span > at + size) munmap(pointer(at + size), start + span - at - size);
    return pointer(at);
  }

  static Status short_of(uint64_t size, uint64_t free, int error) {
    Status made = Status::no_memory(HB_E_NOMEM, size, free,
                                    std::to_string(size) + " bytes of host memory: " +
                                        strerror(error));
    made.driver_code = error;
    return made;
  }

  bool huge(uint64_t size) const { return huge_ && size >= kHugeFrom; }

  Ranges ranges_;
  bool huge_ = false;
};

}  // namespace

std::unique_ptr<Driver> host_driver() { return std::make_unique<HostDriver>(); }

}  // namespace hb
