#include "hotbunk.h"

#include <unistd.h>

extern "C" {

int32_t hb_abi_version(void) { return HB_ABI_VERSION; }

const char *hb_version(void) { return HB_VERSION; }

int64_t hb_page_size(void) { return sysconf(_SC_PAGESIZE); }

}  // extern "C"
