// What drivers have in common whose memory is the host's own: it is read and written where it lies.
#ifndef HOTBUNK_POOL_ON_HOST_H
#define HOTBUNK_POOL_ON_HOST_H

#include <cstring>

#include "driver.h"
#include "ranges.h"

namespace hb {

class OnHost : public Driver {
 public:
  Status to_host(void *to, uint64_t from, uint64_t size) override {
    memcpy(to, pointer(from), size);
    return {};
  }

  Status from_host(uint64_t to, const void *from, uint64_t size) override {
    memcpy(pointer(to), from, size);
    return {};
  }

  Status zero(uint64_t to, uint64_t size) override {
    memset(pointer(to), 0, size);
    return {};
  }

  Status sync() override { return {}; }

  Status info(uint64_t *free, uint64_t *total) override {
    host_memory(free, total);
    return {};
  }
};

}  // namespace hb

#endif
