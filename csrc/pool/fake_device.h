// A device made of host memory that fails when told to. The fake driver is built on it, and so is
// the fake CUDA library of the tests, which lets the real CUDA path run without a GPU.
#ifndef HOTBUNK_POOL_FAKE_DEVICE_H
#define HOTBUNK_POOL_FAKE_DEVICE_H

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "ranges.h"

namespace hb {

class FakeDevice {
 public:
  static constexpr uint64_t kGranularity = uint64_t{64} << 10;

  explicit FakeDevice(uint64_t capacity) : capacity_(capacity) {}

  ~FakeDevice() {
    for (auto &one : memory_) close(one.second.file);
  }

  // -- controls

  void fail(const std::string &function, uint64_t nth, int code) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (nth)
      armed_.push_back({function, nth, code});
    else
      armed_.clear();
  }

  void lie(uint64_t bytes, uint64_t after, uint64_t looks) {
    std::lock_guard<std::mutex> lock(mutex_);
    hidden_ = bytes;
    honest_ = after;
    looks_ = looks;
  }

  int64_t count(const std::string &what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (what == "ranges") return static_cast<int64_t>(ranges_.count());
    if (what == "memory") return static_cast<int64_t>(memory_.size());
    if (what == "maps") return static_cast<int64_t>(maps_.size());
    if (what == "stores") return stores_;
    if (what == "imported") {
      int64_t found = 0;
      for (auto &one : memory_) found += one.second.imported;
      return found;
    }
    if (what == "bytes") return static_cast<int64_t>(used_);
    auto found = calls_.find(what);
    return found == calls_.end() ? 0 : static_cast<int64_t>(found->second);
  }

  // -- what drivers call; 0, or the code that was armed

  // Every call begins here.
  int enter(const char *function) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++calls_[function];
    ++calls_["*"];
    int failed = 0;
    for (Armed &one : armed_)
      if (one.left && (one.function == "*" || one.function == function) && --one.left == 0)
        failed = one.code;
    return failed;
  }

  void store_opened(int by) {
    std::lock_guard<std::mutex> lock(mutex_);
    stores_ += by;
  }

  bool reserve(uint64_t size, uint64_t *address) {
    return !ranges_.reserve(size, 0, address).failed();
  }

  void unreserve(uint64_t address) { ranges_.unreserve(address); }

  // False: it does not fit.
  bool create(uint64_t size, uint64_t *handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (size > capacity_ - used_) return false;
    int file = memfd_create("hotbunk-fake", MFD_CLOEXEC);
    if (file < 0) return false;
    if (ftruncate(file, static_cast<off_t>(size)) || !scribble(file, size)) {
      close(file);
      return false;
    }
    *handle = ++last_;
    memory_[*handle] = {file, size, false};
    used_ += size;
    return true;
  }

  bool destroy(uint64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = memory_.find(handle);
    if (found == memory_.end()) return false;
    if (!found->second.imported) used_ -= found->second.size;
    close(found->second.file);
    memory_.erase(found);
    return true;
  }

  // -1: no such memory.
  int export_file(uint64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = memory_.find(handle);
    return found == memory_.end() ? -1 : fcntl(found->second.file, F_DUPFD_CLOEXEC, 3);
  }

  // Another process's memory, which is none of this device's. False: it holds fewer bytes.
  bool import_file(int file, uint64_t size, uint64_t *handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    struct stat found;
    if (fstat(file, &found) || !S_ISREG(found.st_mode) ||
        found.st_size < static_cast<off_t>(size))
      return false;
    int mine = fcntl(file, F_DUPFD_CLOEXEC, 3);
    if (mine < 0) return false;
    *handle = ++last_;
    memory_[*handle] = {mine, size, true};
    return true;
  }

  // False: no such memory, or the range is taken.
  bool map(uint64_t address, uint64_t size, uint64_t handle, int protection) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = memory_.find(handle);
    if (found == memory_.end() || maps_.count(address)) return false;
    if (mmap(pointer(address), size, protection, MAP_SHARED | MAP_FIXED, found->second.file, 0) ==
        MAP_FAILED)
      return false;
    maps_[address] = size;
    return true;
  }

  bool access(uint64_t address, uint64_t size, bool writable) {
    return !mprotect(pointer(address), size, writable ? PROT_READ | PROT_WRITE : PROT_READ);
  }

  bool unmap(uint64_t address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = maps_.find(address);
    if (found == maps_.end()) return false;
    map_nothing(pointer(address), found->second, MAP_FIXED);
    maps_.erase(found);
    return true;
  }

  void info(uint64_t *free, uint64_t *total) {
    std::lock_guard<std::mutex> lock(mutex_);
    *total = capacity_;
    *free = capacity_ - used_;
    if (honest_) {
      --honest_;
    } else if (looks_) {
      --looks_;
      *free -= hidden_ < *free ? hidden_ : *free;
    }
  }

 private:
  struct Memory {
    int file;
    uint64_t size;
    bool imported;
  };

  struct Armed {
    std::string function;
    uint64_t left;
    int code;
  };

  // New memory of a device holds anything but zeros.
  static bool scribble(int file, uint64_t size) {
    char rubbish[4096];
    memset(rubbish, 0x5a, sizeof rubbish);
    for (uint64_t at = 0; at < size; at += sizeof rubbish)
      if (pwrite(file, rubbish, sizeof rubbish, static_cast<off_t>(at)) !=
          static_cast<ssize_t>(sizeof rubbish))
        return false;
    return true;
  }

  std::mutex mutex_;
  Ranges ranges_;
  uint64_t capacity_, used_ = 0, last_ = 0;
  uint64_t hidden_ = 0, honest_ = 0, looks_ = 0;
  int stores_ = 0;
  std::vector<Armed> armed_;
  std::map<std::string, uint64_t> calls_;
  std::map<uint64_t, Memory> memory_;
  std::map<uint64_t, uint64_t> maps_;
};

}  // namespace hb

#endif  // HOTBUNK_POOL_FAKE_DEVICE_H
