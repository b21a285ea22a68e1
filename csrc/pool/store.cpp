// Backups in files without a name: a killed process leaves nothing behind.
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"
#include "parallel.h"

namespace hb {

Status Status::system(const std::string &call, int error) {
  return Status::error(HB_E_DRIVER, call + ": " + strerror(error), error);
}

void host_memory(uint64_t *free, uint64_t *total) {
  *free = *total = 0;
  if (FILE *file = fopen("/proc/meminfo", "re")) {
    char line[128];
    unsigned long long kib = 0;
    while (fgets(line, sizeof line, file)) {
      if (sscanf(line, "MemTotal: %llu", &kib) == 1) *total = kib << 10;
      if (sscanf(line, "MemAvailable: %llu", &kib) == 1) *free += kib << 10;
      if (sscanf(line, "SwapFree: %llu", &kib) == 1) *free += kib << 10;
    }
    fclose(file);
  }
}

void *Driver::staging(uint64_t size) { return malloc(size); }
void Driver::free_staging(void *memory) { free(memory); }

Status Driver::export_memory(uint64_t, uint64_t, hb_shared *) {
  return Status::error(HB_E_UNAVAILABLE, kind + " memory has no handles for other processes");
}

Status Driver::import_memory(const hb_shared &, uint64_t *) {
  return Status::error(HB_E_UNAVAILABLE, kind + " memory has no handles of other processes");
}

void Driver::abandon(uint64_t address, uint64_t size, uint64_t handle) {
  unmap(address, size, &handle);
  destroy(size, handle);
}

namespace {

class FileStore : public Store {
 public:
  explicit FileStore(std::string directory) : directory_(std::move(directory)) {}

  Status open(uint64_t size, uint64_t *handle) override {
    uint64_t free = free_bytes();
    if (size > INT64_MAX) return refuse(size, free, "no file is that large");
    int file = make();
    if (file < 0) return refuse(size, free, strerror(errno));
    int error = 0;
    if (size && fallocate(file, 0, 0, static_cast<off_t>(size))) {
      error = errno;
      if (error == EOPNOTSUPP) error = posix_fallocate(file, 0, static_cast<off_t>(size));
    }
    if (error) {
      ::close(file);
      return refuse(size, free, strerror(error));
    }
    *handle = static_cast<uint64_t>(file) + 1;
    return {};
  }

  Status write(uint64_t handle, const void *from, uint64_t size, uint64_t at) override {
    int file = fd(handle);
    int error = in_chunks(size, [=](uint64_t offset, uint64_t left) {
      while (left) {
        ssize_t done = pwrite(file, static_cast<const char *>(from) + offset, left,
                              static_cast<off_t>(at + offset));
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done ? errno : EIO;
        offset += static_cast<uint64_t>(done);
        left -= static_cast<uint64_t>(done);
      }
      return 0;
    });
    return error ? refuse(size, free_bytes(), strerror(error)) : Status{};
  }

  Status read(uint64_t handle, void *to, uint64_t size, uint64_t at) override {
    int file = fd(handle);
    int error = in_chunks(size, [=](uint64_t offset, uint64_t left) {
      while (left) {
        ssize_t done = pread(file, static_cast<char *>(to) + offset, left,
                             static_cast<off_t>(at + offset));
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done ? errno : ENODATA;
        offset += static_cast<uint64_t>(done);
        left -= static_cast<uint64_t>(done);
      }
      return 0;
    });
    if (!error) return {};
    return Status::error(HB_E_BACKUP,
                         error == ENODATA ? "the backup is cut short" : strerror(error), error);
  }

  bool forget(uint64_t handle, uint64_t at, uint64_t size) override {
    return !fallocate(fd(handle), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                      static_cast<off_t>(at), static_cast<off_t>(size));
  }

  void close(uint64_t handle) override { ::close(fd(handle)); }

 private:
  static int fd(uint64_t handle) { return static_cast<int>(handle - 1); }

  int make() const {
    int file = ::open(directory_.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
    std::string name = directory_ + "/hotbunk-XXXXXX";
    file = mkostemp(name.data(), O_CLOEXEC);
    if (file >= 0) unlink(name.c_str());
    return file;
  }

  uint64_t free_bytes() const {
    struct statvfs found;
    if (statvfs(directory_.c_str(), &found)) return 0;
    return static_cast<uint64_t>(found.f_bavail) * found.f_frsize;
  }

  Status refuse(uint64_t size, uint64_t free, const std::string &why) const {
    return Status::no_memory(HB_E_HOST_NOMEM, size, free,
                             "a backup of " + std::to_string(size) + " bytes in " + directory_ +
                                 " (free: " + std::to_string(free) + "): " + why);
  }

  std::string directory_;
};

}  // namespace

std::unique_ptr<Store> file_store(std::string directory) {
  return std::make_unique<FileStore>(std::move(directory));
}

}  // namespace hb
