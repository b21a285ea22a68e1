// Host memory behind a file descriptor, so that another process can map the same pages.
//
// A range's file lives as long as the range: releasing punches the whole file out, resuming
// allocates it again, and whoever was given the descriptor sees the new pages. Room is allocated
// before it is mapped, which turns what would be a SIGBUS into a code.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "on_host.h"
#include "ranges.h"

#ifndef MFD_HUGETLB
#define MFD_HUGETLB 0x0004U
#endif

namespace hb {
namespace {

// A tmpfs of huge pages that is mounted nowhere, so that nothing stays behind. Needs the right to
// mount; -1 without it. From linux/mount.h, which older systems lack.
int detached_tmpfs() {
#if defined(SYS_fsopen) && defined(SYS_fsconfig) && defined(SYS_fsmount)
  constexpr unsigned kCloexec = 1, kSetString = 1, kCreate = 6;
  int context = static_cast<int>(syscall(SYS_fsopen, "tmpfs", kCloexec));
  if (context < 0) return -1;
  int mount = -1;
  if (!syscall(SYS_fsconfig, context, kSetString, "huge", "always", 0) &&
      !syscall(SYS_fsconfig, context, kSetString, "size", "100%", 0) &&
      !syscall(SYS_fsconfig, context, kCreate, nullptr, nullptr, 0))
    mount = static_cast<int>(syscall(SYS_fsmount, context, kCloexec, 0));
  close(context);
  return mount;
#else
  return -1;
#endif
}

// A writable mounted tmpfs that uses huge pages; -1: there is none.
int mounted_tmpfs() {
  int found = -1;
  if (FILE *file = fopen("/proc/self/mounts", "re")) {
    char line[1024], where[512], type[64], options[256];
    while (found < 0 && fgets(line, sizeof line, file)) {
      if (sscanf(line, "%*s %511s %63s %255s", where, type, options) != 3) continue;
      if (strcmp(type, "tmpfs") || !strstr(options, "huge=") || strstr(options, "huge=never"))
        continue;
      if (!access(where, W_OK)) found = open(where, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    fclose(file);
  }
  return found;
}

// Whether the kernel gives huge pages to files in memory: always, or where they are advised.
bool memfd_is_huge() {
  bool huge = false;
  if (FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "re")) {
    char line[256];
    if (fgets(line, sizeof line, file))
      huge = !strstr(line, "[never]") && !strstr(line, "[deny]") && strchr(line, '[');
    fclose(file);
  }
  return huge;
}

class SharedDriver : public OnHost {
 public:
  ~SharedDriver() override {
    if (mount_ >= 0) close(mount_);
  }

  // Tries what `wanted` names, or each in order of speed; false: none works here.
  bool probe(const std::string &wanted) {
    bool any = wanted.empty();
    if (any || wanted == "tmpfs") {
      if (memfd_is_huge() && works("memfd huge", 0)) return true;
      for (auto open_mount : {mounted_tmpfs, detached_tmpfs}) {
        mount_ = open_mount();
        if (mount_ >= 0 && works("tmpfs huge", 0)) return true;
        if (mount_ >= 0) close(mount_);
        mount_ = -1;
      }
    }
    if ((any || wanted == "hugetlb") && works("hugetlb", MFD_HUGETLB)) return true;
    return (any || wanted == "memfd") && works("memfd", 0);
  }

  Status reserve(uint64_t size, uint64_t *address) override {
    int file = make();
    if (file < 0) return Status::system("memfd_create", errno);
    // Sealed, where the file system can: no peer may shrink it under our feet.
    if (ftruncate(file, static_cast<off_t>(size))) {
      Status failed = Status::system("ftruncate", errno);
      close(file);
      return failed;
    }
    fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    Status status = ranges_.reserve(size, file, address);
    if (status.failed()) close(file);
    return status;
  }

  void unreserve(uint64_t address) override {
    int file = ranges_.unreserve(address);
    if (file >= 0) close(file);
  }

  Status create(uint64_t address, uint64_t size, uint64_t *handle) override {
    uint64_t at = 0, free = 0, total = 0;
    int file = file_of(address, &at);
    host_memory(&free, &total);
    if (!huge_tlb_ && total && size > free) return short_of(size, free, ENOMEM);
    if (fallocate(file, 0, static_cast<off_t>(at), static_cast<off_t>(size))) {
      int error = errno;
      punch(file, at, size);
      return short_of(size, free, error);
    }
    *handle = address;
    return {};
  }

  Status destroy(uint64_t size, uint64_t handle) override {
    uint64_t at = 0;
    int file = file_of(handle, &at);
    return punch(file, at, size) ? Status{} : Status::system("fallocate", errno);
  }

  Status map(uint64_t address, uint64_t size, uint64_t *) override {
    uint64_t at = 0;
    int file = file_of(address, &at);
    if (mmap(pointer(address), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
             file, static_cast<off_t>(at)) == MAP_FAILED)
      return Status::system("mmap", errno);
    return {};
  }

  Status unmap(uint64_t address, uint64_t size, uint64_t *) override {
    if (map_nothing(pointer(address), size, MAP_FIXED) == MAP_FAILED)
      return Status::system("mmap", errno);
    return {};
  }

  void abandon(uint64_t address, uint64_t size, uint64_t) override {
    uint64_t at = 0;
    int file = file_of(address, &at);
    punch(file, at, size);  // a late writer gets new pages, which go with the range
  }

  // What the file holds, whoever made its pages: a peer that writes to a released one is seen.
  uint64_t resident(uint64_t address, uint64_t size, uint64_t) override {
    uint64_t at = 0;
    struct stat found;
    int file = file_of(address, &at);
    if (file < 0 || fstat(file, &found)) return 0;
    if (static_cast<uint64_t>(found.st_size) == size)
      return static_cast<uint64_t>(found.st_blocks) * 512;
    uint64_t held = 0;  // a part of the file
    off_t end = static_cast<off_t>(at + size), data = static_cast<off_t>(at);
    while ((data = lseek(file, data, SEEK_DATA)) >= 0 && data < end) {
      off_t hole = lseek(file, data, SEEK_HOLE);
      if (hole < 0 || hole > end) hole = end;
      held += static_cast<uint64_t>(hole - data);
      data = hole;
    }
    return held;
  }

  int fd(uint64_t address) override {
    uint64_t at = 0;
    return file_of(address, &at);
  }

 private:
  int make() const {
    if (mount_ >= 0) return openat(mount_, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    return memfd_create("hotbunk", MFD_CLOEXEC | (huge_tlb_ ? MFD_HUGETLB : 0) | MFD_ALLOW_SEALING);
  }

  bool works(const char *what, unsigned flags) {
    huge_tlb_ = flags == MFD_HUGETLB;
    granularity = strcmp(what, "memfd") ? kHuge : page_size();
    kind = what;
    uint64_t address = 0, handle = 0;
    if (reserve(kHuge, &address).failed()) return false;
    bool fine = !create(address, kHuge, &handle).failed();
    if (fine) {
      fine = !map(address, kHuge, &handle).failed();
      destroy(kHuge, address);
    }
    unreserve(address);
    return fine;
  }

  int file_of(uint64_t address, uint64_t *at) {
    uint64_t start = 0;
    int file = -1;
    if (!ranges_.find(address, &start, &file)) return -1;
    *at = address - start;
    return file;
  }

  static bool punch(int file, uint64_t at, uint64_t size) {
    return !fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
                      static_cast<off_t>(size));
  }

  Status short_of(uint64_t size, uint64_t free, int error) const {
    Status made = Status::no_memory(
        HB_E_NOMEM, size, free, std::to_string(size) + " bytes of " + kind + ": " + strerror(error));
    made.driver_code = error;
    return made;
  }

  Ranges ranges_;
  int mount_ = -1;
  bool huge_tlb_ = false;
};

}  // namespace

Status shared_driver(const std::string &wanted, std::unique_ptr<Driver> *driver) {
  auto made = std::make_unique<SharedDriver>();
  if (!made->probe(wanted))
    return Status::error(HB_E_UNAVAILABLE, "no shared memory of kind '" + wanted + "' works here");
  *driver = std::move(made);
  return {};
}

}  // namespace hb
