#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace hb::kernels {
namespace {

constexpr int kMost = 64;
constexpr int kDefault = 4;

struct Job {
  void (*work)(void *, int64_t);
  void *context;
  int64_t n;
  std::atomic<int64_t> next{0};  // a lock for every item would cost more than many an item
  int helpers;           // workers that may still join; guarded by Pool::mutex
  int inside = 0;        // workers that have joined and not left; guarded by Pool::mutex
  Job *after = nullptr;  // the list of open jobs; guarded by Pool::mutex
  std::condition_variable done;

  Job(void (*w)(void *, int64_t), void *c, int64_t count, int most)
      : work(w), context(c), n(count), helpers(most) {}
};

// Never destroyed: workers may wait on it while the process exits.
struct Pool {
  std::mutex mutex;
  std::condition_variable wake;
  Job *open = nullptr;  // jobs that still want helpers
  int workers = 0;
  int count = 0;  // threads a call may use, the caller included; 0: not asked yet
};

Pool *pool = new Pool;

int initial_count() {
  if (const char *text = getenv("HOTBUNK_KERNEL_THREADS")) {
    const long wanted = strtol(text, nullptr, 10);
    if (wanted >= 1 && wanted <= kMost) return static_cast<int>(wanted);
  }
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::clamp(CPU_COUNT(&set), 1, kDefault);
#endif
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kDefault);
}

void close(Pool &p, Job *job) {
  for (Job **at = &p.open; *at != nullptr; at = &(*at)->after) {
    if (*at == job) {
      *at = job->after;
      return;
    }
  }
}

// Work on a job until no item is left to begin. Without the lock.
void take_part(Job *job) {
  for (;;) {
    const int64_t i = job->next.fetch_add(1, std::memory_order_relaxed);
    if (i >= job->n) return;
    job->work(job->context, i);
  }
}

void worker(Pool *p) {
  std::unique_lock<std::mutex> lock(p->mutex);
  for (;;) {
    p->wake.wait(lock, [p] { return p->open != nullptr; });
    Job *job = p->open;
    if (--job->helpers == 0) close(*p, job);
    ++job->inside;
    lock.unlock();
    take_part(job);
    lock.lock();
    close(*p, job);  // nothing is left to begin
    // Once nobody is inside the caller may return, and the job is gone.
    if (--job->inside == 0) job->done.notify_one();
  }
}

// One more worker, which sees no signals. Fails quietly: the caller does the work then.
bool start_worker(Pool *p) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    std::thread(worker, p).detach();
  } catch (const std::system_error &) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

// A child has none of the parent's threads, so it gets a new pool, as large.
void before_fork() { pool->mutex.lock(); }
void after_fork_in_parent() { pool->mutex.unlock(); }
void after_fork_in_child() {
  const int count = pool->count;
  pool = new Pool;
  pool->count = count;
}
const int fork_handlers = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

}  // namespace

int threads() {
  (void)fork_handlers;
  const std::lock_guard<std::mutex> lock(pool->mutex);
  if (pool->count == 0) pool->count = initial_count();
  return pool->count;
}

bool set_threads(int count) {
  if (count < 1 || count > kMost) return false;
  const std::lock_guard<std::mutex> lock(pool->mutex);
  pool->count = count;
  return true;
}

void parallel(int64_t n, int most, void (*work)(void *, int64_t), void *context) {
  int use = threads();
  if (most > 0) use = std::min(use, most);
  use = static_cast<int>(std::min<int64_t>(use, n));
  if (use <= 1) {
    for (int64_t i = 0; i < n; ++i) work(context, i);
    return;
  }
  Pool &p = *pool;
  Job job(work, context, n, use - 1);
  std::unique_lock<std::mutex> lock(p.mutex);
  while (p.workers < use - 1 && start_worker(&p)) ++p.workers;
  if (p.workers > 0) {
    Job **at = &p.open;
    while (*at != nullptr) at = &(*at)->after;
    *at = &job;
    for (int i = 0; i < use - 1; ++i) p.wake.notify_one();
  }
  lock.unlock();
  take_part(&job);
  lock.lock();
  close(p, &job);  // who has not joined finds nothing to do
  job.done.wait(lock, [&job] { return job.inside == 0; });
}

}  // namespace hb::kernels
