// What the kernel is asked about pages of this process.
#include <fcntl.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "parallel.h"
#include "ranges.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace hb {
namespace {

// From linux/fs.h, which older systems lack.
struct PageRegion {
  uint64_t start, end, categories;
};
struct ScanArguments {
  uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
constexpr unsigned long kPagemapScan = _IOWR('f', 16, ScanArguments);
constexpr uint64_t kPresent = 1 << 3;

}  // namespace

bool huge_pages() {
  bool found = false;
  if (FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re")) {
    char line[256];
    if (fgets(line, sizeof line, file)) found = !strstr(line, "[never]");
    fclose(file);
  }
  return found;
}

int populate(void *memory, uint64_t size) {
  return in_chunks(size, [=](uint64_t at, uint64_t n) {
    char *start = static_cast<char *>(memory) + at;
    if (!madvise(start, n, MADV_POPULATE_WRITE)) return 0;
    if (errno != EINVAL) return errno;
    memset(start, 0, n);  // Linux before 5.14
    return 0;
  });
}

int64_t resident_bytes(uint64_t address, uint64_t nbytes) {
  unsigned char flags[16384];  // of as many pages: it stays in the nearest cache
  const uint64_t page = page_size();
  uint64_t left = nbytes / page, count = 0;
  if (address % page) return -1;
  for (uint64_t at = address; left;) {
    uint64_t pages = std::min<uint64_t>(left, sizeof flags);
    if (mincore(pointer(at), pages * page, flags)) return -1;
    for (uint64_t n = 0; n < pages; ++n) count += flags[n] & 1;
    at += pages * page;
    left -= pages;
  }
  return static_cast<int64_t>(count * page);
}

int64_t scan_resident(uint64_t address, uint64_t nbytes) {
  static std::atomic<bool> absent{false};
  if (absent) return resident_bytes(address, nbytes);
  // Opened each time: after a fork, an older descriptor would tell of the parent.
  int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  PageRegion regions[128];
  ScanArguments scan{};
  scan.size = sizeof scan;
  scan.start = address;
  scan.end = address + nbytes;
  scan.vec = reinterpret_cast<uint64_t>(regions);
  scan.vec_len = sizeof regions / sizeof *regions;
  scan.category_mask = scan.return_mask = kPresent;
  uint64_t bytes = 0;
  bool fine = file >= 0;
  while (fine && scan.start < scan.end) {
    int found = ioctl(file, kPagemapScan, &scan);
    if (found < 0 && errno == ENOTTY) absent = true;
    fine = found >= 0 && scan.walk_end > scan.start;
    for (int n = 0; n < found; ++n) bytes += regions[n].end - regions[n].start;
    scan.start = scan.walk_end;
  }
  if (file >= 0) close(file);
  if (fine) return static_cast<int64_t>(bytes);
  return resident_bytes(address, nbytes);
}

}  // namespace hb
