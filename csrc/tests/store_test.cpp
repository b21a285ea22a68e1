// Backups: memory that is not there is refused before anything is touched, and is not tried out.
#include "../pool/driver.h"
#include "check.h"

TEST(a_host_whose_memory_is_short_refuses_a_backup) {
  auto store = hb::memory_store();
  uint64_t handle = 0;
  const hb::Status refused = store->open(uint64_t{1} << 60, &handle);  // no machine has so much
  CHECK_EQ(refused.code, HB_E_HOST_NOMEM);
  CHECK_EQ(refused.needed, uint64_t{1} << 60);
  CHECK(refused.free > 0 && refused.free < refused.needed);
  CHECK(refused.text.find("memory is short") != std::string::npos);  // before anything was mapped
  CHECK_EQ(handle, 0);

  char sent[3] = {1, 2, 3}, found[3] = {};
  CHECK_EQ(store->open(4096, &handle).code, HB_OK);
  CHECK_EQ(store->write(handle, sent, sizeof sent, 4093).code, HB_OK);
  CHECK_EQ(store->read(handle, found, sizeof found, 4093).code, HB_OK);
  CHECK(!memcmp(sent, found, sizeof sent));
  store->close(handle);
}
