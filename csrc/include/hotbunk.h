// C ABI of hotbunk's native library. No torch, no Python, no link-time driver.
//
// Every function is safe to call from any thread. Functions that can fail return a negative
// value; strings that are returned are static and must not be freed.
#ifndef HOTBUNK_H
#define HOTBUNK_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define HB_API __declspec(dllexport)
#else
#define HB_API __attribute__((visibility("default")))
#endif

// Raised by one whenever a signature or a struct below changes; rollout/native.py checks it.
#define HB_ABI_VERSION 4

#ifdef __cplusplus
extern "C" {
#endif

// HB_ABI_VERSION of the library that was loaded.
HB_API int32_t hb_abi_version(void);

// The package version that the library was built as, such as "0.1.0".
HB_API const char *hb_version(void);

// Bytes in a page of this machine's memory, or -1 when the system will not say.
HB_API int64_t hb_page_size(void);

#ifdef __cplusplus
}
#endif

#endif  // HOTBUNK_H
