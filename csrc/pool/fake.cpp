// The fake driver: a small device with granules of its own that fails, lies and counts.
#include <cstring>

#include "driver.h"
#include "fake_device.h"

namespace hb {
namespace {

class FakeDriver : public Driver {
 public:
  explicit FakeDriver(uint64_t capacity) : device(capacity) {
    granularity = FakeDevice::kGranularity;
    direct = fresh_is_zero = false;
    per_process = false;
    kind = "fake";
  }

  Status reserve(uint64_t size, uint64_t *address) override {
    if (int code = device.enter("reserve")) return fault("reserve", code, size);
    if (!device.reserve(size, address))
      return Status::no_memory(HB_E_NOMEM, size, 0, "no addresses are free");
    return {};
  }

  void unreserve(uint64_t address) override { device.unreserve(address); }

  Status create(uint64_t, uint64_t size, uint64_t *handle) override {
    if (int code = device.enter("create")) return fault("create", code, size);
    if (!device.create(size, handle)) return fault("create", HB_E_NOMEM, size);
    return {};
  }

  Status destroy(uint64_t, uint64_t handle) override {
    return done("destroy", [=] { return device.destroy(handle); });
  }

  Status map(uint64_t address, uint64_t size, uint64_t *handle) override {
    return done("map", [=] {
      return device.map(address, size, *handle, PROT_READ | PROT_WRITE);
    });
  }

  Status map_read_only(uint64_t address, uint64_t size, uint64_t *handle) override {
    return done("map", [=] { return device.map(address, size, *handle, PROT_READ); });
  }

  Status unmap(uint64_t address, uint64_t, uint64_t *) override {
    return done("unmap", [=] { return device.unmap(address); });
  }

  void abandon(uint64_t address, uint64_t, uint64_t handle) override {
    device.unmap(address);
    device.destroy(handle);
  }

  Status to_host(void *to, uint64_t from, uint64_t size) override {
    return done("to_host", [=] { return memcpy(to, pointer(from), size) != nullptr; });
  }

  Status from_host(uint64_t to, const void *from, uint64_t size) override {
    return done("from_host", [=] { return memcpy(pointer(to), from, size) != nullptr; });
  }

  Status zero(uint64_t to, uint64_t size) override {
    return done("zero", [=] { return memset(pointer(to), 0, size) != nullptr; });
  }

  Status sync() override {
    return done("sync", [] { return true; });
  }

  Status export_memory(uint64_t, uint64_t handle, hb_shared *shared) override {
    return done("export", [=] { return (shared->fd = device.export_file(handle)) >= 0; });
  }

  Status import_memory(const hb_shared &shared, uint64_t *handle) override {
    return done("import", [&] { return device.import_file(shared.fd, shared.nbytes, handle); });
  }

  Status info(uint64_t *free, uint64_t *total) override {
    if (int code = device.enter("info")) return fault("info", code, 0);
    device.info(free, total);
    return {};
  }

  FakeDevice device;

 private:
  Status fault(const char *function, int code, uint64_t size) {
    uint64_t free = 0, total = 0;
    device.info(&free, &total);
    Status made = Status::no_memory(code, size, free, std::string("the fake device's ") +
                                                          function + " failed");
    return made;
  }

  template <typename Work>
  Status done(const char *function, Work work) {
    if (int code = device.enter(function)) return fault(function, code, 0);
    return work() ? Status{} : fault(function, HB_E_DRIVER, 0);
  }
};

// A real store whose calls count and fail as the device's do.
class FakeStore : public Store {
 public:
  FakeStore(FakeDevice *device, std::unique_ptr<Store> inner)
      : device_(device), inner_(std::move(inner)) {}

  Status open(uint64_t size, uint64_t *handle) override {
    if (int code = device_->enter("store_open")) return fault("store_open", code, size);
    Status status = inner_->open(size, handle);
    if (!status.failed()) device_->store_opened(1);
    return status;
  }

  Status write(uint64_t handle, const void *from, uint64_t size, uint64_t at) override {
    if (int code = device_->enter("store_write")) return fault("store_write", code, size);
    return inner_->write(handle, from, size, at);
  }

  Status read(uint64_t handle, void *to, uint64_t size, uint64_t at) override {
    if (int code = device_->enter("store_read")) return fault("store_read", code, size);
    return inner_->read(handle, to, size, at);
  }

  bool forget(uint64_t handle, uint64_t at, uint64_t size) override {
    return inner_->forget(handle, at, size);
  }

  void close(uint64_t handle) override {
    inner_->close(handle);
    device_->store_opened(-1);
  }

 private:
  static Status fault(const char *function, int code, uint64_t size) {
    return Status::no_memory(code, size, 0, std::string("the fake ") + function + " failed");
  }

  FakeDevice *device_;
  std::unique_ptr<Store> inner_;
};

}  // namespace

Opened fake_driver(uint64_t capacity, std::unique_ptr<Store> store) {
  auto driver = std::make_unique<FakeDriver>(capacity);
  Opened opened;
  opened.fake = &driver->device;
  opened.store = std::make_unique<FakeStore>(opened.fake, std::move(store));
  opened.driver = std::move(driver);
  return opened;
}

}  // namespace hb
