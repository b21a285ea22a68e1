// What the pool asks of a device, and of the place where backups lie.
#ifndef HOTBUNK_POOL_DRIVER_H
#define HOTBUNK_POOL_DRIVER_H

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "hotbunk_pool.h"

namespace hb {

// How a call ended. Errors carry their whole story, so that no caller has to guess.
struct Status {
  int32_t code = HB_OK;
  int32_t driver_code = 0;
  uint64_t needed = 0;
  uint64_t free = 0;
  std::string text;

  bool failed() const { return code != HB_OK; }

  static Status error(int32_t code, std::string text, int32_t driver_code = 0) {
    Status made;
    made.code = code;
    made.driver_code = driver_code;
    made.text = std::move(text);
    return made;
  }

  static Status no_memory(int32_t code, uint64_t needed, uint64_t free, std::string text) {
    Status made = error(code, std::move(text));
    made.needed = needed;
    made.free = free;
    return made;
  }

  // HB_E_DRIVER with the text of errno.
  static Status system(const std::string &call, int error);
};

// One kind of memory. Calls may come from any thread; each either does all or nothing.
//
// Physical memory is a handle that a range can hold (map) or not (unmap): content survives that.
// A driver may change the handle when memory moves.
class Driver {
 public:
  virtual ~Driver() = default;

  uint64_t granularity = 1;
  bool addressable = true;    // the host may read and write a mapped range
  bool direct = true;         // backups are written straight from it, and read straight into it
  bool fresh_is_zero = true;  // new memory holds zeros
  bool per_process = true;    // resident() tells the truth; else only info() does
  std::string kind;

  // Addresses, without memory: touching them is a fault.
  virtual Status reserve(uint64_t size, uint64_t *address) = 0;
  virtual void unreserve(uint64_t address) = 0;

  // Memory for a range (or a part of one), all of it there, not promised. HB_E_NOMEM: it is not.
  virtual Status create(uint64_t address, uint64_t size, uint64_t *handle) = 0;
  virtual Status destroy(uint64_t size, uint64_t handle) = 0;
  virtual Status map(uint64_t address, uint64_t size, uint64_t *handle) = 0;
  virtual Status unmap(uint64_t address, uint64_t size, uint64_t *handle) = 0;

  // Gives the memory of a mapped range back for good, before the range itself goes.
  virtual void abandon(uint64_t address, uint64_t size, uint64_t handle);

  virtual Status to_host(void *to, uint64_t from, uint64_t size) = 0;
  virtual Status from_host(uint64_t to, const void *from, uint64_t size) = 0;
  virtual Status zero(uint64_t to, uint64_t size) = 0;
  virtual Status sync() = 0;  // what was started on the device has ended
  virtual Status info(uint64_t *free, uint64_t *total) = 0;

  // Bytes that a range holds; `handle` 0: no memory of ours.
  virtual uint64_t resident(uint64_t address, uint64_t size, uint64_t handle) {
    (void)address;
    return handle ? size : 0;
  }

  // A handle of memory for another process, and such a handle as memory of this one (mapped and
  // destroyed like any other).
  virtual Status export_memory(uint64_t size, uint64_t handle, hb_shared *shared);
  virtual Status import_memory(const hb_shared &shared, uint64_t *handle);
  virtual Status map_read_only(uint64_t address, uint64_t size, uint64_t *handle) {
    return map(address, size, handle);
  }

  virtual int fd(uint64_t address) {
    (void)address;
    return -1;
  }

  // Memory of the host that the device copies from and to at full speed.
  virtual void *staging(uint64_t size);
  virtual void free_staging(void *memory);
};

// Where backups lie. Handles are not 0.
class Store {
 public:
  virtual ~Store() = default;
  // Room for `size` bytes, all of it there. HB_E_HOST_NOMEM: it is not.
  virtual Status open(uint64_t size, uint64_t *handle) = 0;
  virtual Status write(uint64_t handle, const void *from, uint64_t size, uint64_t at) = 0;
  virtual Status read(uint64_t handle, void *to, uint64_t size, uint64_t at) = 0;
  // Gives a range's room back, content and all. False: this kind of file cannot.
  virtual bool forget(uint64_t handle, uint64_t at, uint64_t size) = 0;
  virtual void close(uint64_t handle) = 0;
};

std::unique_ptr<Store> file_store(std::string directory);  // in nameless files there
std::unique_ptr<Store> memory_store();                      // in memory of the host

struct Opened {
  std::unique_ptr<Driver> driver;
  std::unique_ptr<Store> store;
  class FakeDevice *fake = nullptr;  // the fake driver's controls
};

std::unique_ptr<Driver> host_driver();
Status shared_driver(const std::string &kind, std::unique_ptr<Driver> *driver);
Status cuda_driver(int device, const char *library, std::unique_ptr<Driver> *driver);
Status acl_driver(int device, const char *library, std::unique_ptr<Driver> *driver);
Opened fake_driver(uint64_t capacity, std::unique_ptr<Store> store);

// Bytes that this process may still take from the host's memory, and all there are.
void host_memory(uint64_t *free, uint64_t *total);

constexpr uint64_t kHuge = uint64_t{2} << 20;

inline uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace hb

#endif  // HOTBUNK_POOL_DRIVER_H
