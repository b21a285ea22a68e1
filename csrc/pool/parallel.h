// Work over a range of bytes on a few threads: page faults and page-cache copies scale with cores.
#ifndef HOTBUNK_POOL_PARALLEL_H
#define HOTBUNK_POOL_PARALLEL_H

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace hb {

constexpr uint64_t kChunk = uint64_t{16} << 20;
constexpr unsigned kMostThreads = 8;

// Cores this process may run on, at most kMostThreads.
inline unsigned threads_for(uint64_t size) {
  cpu_set_t set;
  CPU_ZERO(&set);
  unsigned cores = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
  uint64_t chunks = (size + kChunk - 1) / kChunk;
  if (cores > kMostThreads) cores = kMostThreads;
  return chunks < cores ? static_cast<unsigned>(chunks) : cores;
}

// Calls work(offset, size) for chunks of [0, size) until one returns something other than 0;
// returns that. Chunks are multiples of kChunk but for the last.
template <typename Work>
int in_chunks(uint64_t size, Work work) {
  std::atomic<uint64_t> next{0};
  std::atomic<int> result{0};
  auto run = [&] {
    while (result.load(std::memory_order_relaxed) == 0) {
      uint64_t at = next.fetch_add(kChunk, std::memory_order_relaxed);
      if (at >= size) return;
      int got = work(at, size - at < kChunk ? size - at : kChunk);
      if (got) result.store(got, std::memory_order_relaxed);
    }
  };
  unsigned count = threads_for(size);
  std::vector<std::thread> helpers;
  helpers.reserve(kMostThreads);
  for (unsigned n = 1; n < count; ++n) {
    try {
      helpers.emplace_back(run);
    } catch (const std::system_error &) {
      break;  // no more threads here: fewer do it
    }
  }
  run();
  for (auto &helper : helpers) helper.join();
  return result.load();
}

}  // namespace hb

#endif  // HOTBUNK_POOL_PARALLEL_H
