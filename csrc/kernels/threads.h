// A few threads of our own: capped, asleep while idle, and gone from a forked child, which starts
// its own when it needs them. Signals are left to the threads of the program.
#ifndef HB_THREADS_H
#define HB_THREADS_H

#include <cstdint>

namespace hb::kernels {

int threads();
bool set_threads(int count);

// Call work(context, i) once for every i in [0, n), on at most `most` threads (0: threads()) of
// which the caller is one. Returns when all are done. `work` must not throw.
void parallel(int64_t n, int most, void (*work)(void *, int64_t), void *context);

template <class F>
void parallel_for(int64_t n, int most, const F &f) {
  parallel(
      n, most, [](void *context, int64_t i) { (*static_cast<const F *>(context))(i); },
      const_cast<void *>(static_cast<const void *>(&f)));
}

}  // namespace hb::kernels

#endif  // HB_THREADS_H
