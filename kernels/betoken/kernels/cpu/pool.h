// A small thread pool for steps of a few microseconds. Its workers spin briefly between jobs, then sleep.
// It knows tasks [0, num_tasks), not what they do.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace betoken {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  using Task = void (*)(void* job, int task);

  static Pool& get() {
    static Pool* made = shared() ? shared() : new Pool();  // never destroyed: its threads may outlive static destruction
    return *made;
  }

  // Another library's pool, to be used by this one too. Only before the first `get`.
  static void share(void* pool) { shared() = static_cast<Pool*>(pool); }

  // Threads of a job, the caller included. Only before or between jobs.
  void set_num_threads(int num_threads) {
    std::lock_guard<std::mutex> lock(owner_);
    forget_after_fork();
    num_threads_ = num_threads < 1 ? 1 : num_threads > kMaxThreads ? kMaxThreads : num_threads;
    while (static_cast<int>(workers_) < num_threads_ - 1) {
      const int index = ++workers_;
      std::thread([this, index] { work(index); }).detach();
    }
  }

  int num_threads() const { return num_threads_; }

  // Wake sleeping workers ahead of a job, so that they spin when it comes.
  void wake() {
    if (num_threads_ > 1 && sleepers_.load() > 0) {
      bump_.fetch_add(1);
      futex(FUTEX_WAKE_PRIVATE, kMaxThreads);
    }
  }

  // Run task(job, t) for every t in [0, num_tasks); returns when all are done. A second caller runs alone.
  void run(int num_tasks, void* job, Task task) {
    std::unique_lock<std::mutex> lock(owner_, std::try_to_lock);
    if (num_threads_ == 1 || num_tasks == 1 || !lock.owns_lock() || pid_ != getpid()) {
      for (int t = 0; t < num_tasks; ++t) task(job, t);
      return;
    }
    const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    // A worker that is late may still compare a cursor of the last job with its end: no end may grow under that cursor.
    for (int i = 0; i < num_threads_; ++i)
      cursors_[i].value.store(uint64_t(epoch) << 32 | kExhausted, std::memory_order_release);
    job_ = job;
    task_ = task;
    remaining_.store(num_tasks, std::memory_order_relaxed);
    for (int i = 0; i < num_threads_; ++i) {
      ends_[i].store(static_cast<int>(int64_t(num_tasks) * (i + 1) / num_threads_), std::memory_order_release);
      const uint64_t begin = int64_t(num_tasks) * i / num_threads_;
      cursors_[i].value.store(uint64_t(epoch) << 32 | begin, std::memory_order_release);
    }
    epoch_.store(epoch);
    bump_.fetch_add(1);
    if (sleepers_.load() > 0) futex(FUTEX_WAKE_PRIVATE, kMaxThreads);
    take(epoch, 0);
    for (int spins = 0; remaining_.load(std::memory_order_acquire) > 0; ++spins) {
      if (spins < 4096) relax();
      else sched_yield();
    }
  }

 private:
  static Pool*& shared() {
    static Pool* pool = nullptr;
    return pool;
  }

  static constexpr int kMaxThreads = 256;
  static constexpr uint64_t kExhausted = 0x7fffffff;  // not below any end
  static constexpr auto kSpin = std::chrono::microseconds(60);

  struct alignas(64) Cursor {
    std::atomic<uint64_t> value{0};  // epoch << 32 | next task
  };

  // Run own tasks, then what the other threads have not begun. A task claimed under `epoch` keeps its job alive.
  void take(uint32_t epoch, int self) {
    const int num_threads = num_threads_;
    for (int i = 0; i < num_threads; ++i) {
      const int from = (self + i) % num_threads;
      std::atomic<uint64_t>& cursor = cursors_[from].value;
      uint64_t seen = cursor.load(std::memory_order_acquire);
      while (uint32_t(seen >> 32) == epoch && int(uint32_t(seen)) < ends_[from].load(std::memory_order_acquire)) {
        if (!cursor.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
        task_(job_, int(uint32_t(seen)));
        remaining_.fetch_sub(1, std::memory_order_release);
        seen = cursor.load(std::memory_order_acquire);
      }
    }
  }

  void work(int self) {
    uint32_t done = 0;
    for (;;) {
      const uint32_t ticket = bump_.load();
      const uint32_t epoch = epoch_.load(std::memory_order_acquire);
      if (epoch != done) {
        done = epoch;
        if (self < num_threads_) take(epoch, self);
        continue;
      }
      const auto until = std::chrono::steady_clock::now() + kSpin;
      bool called = false;
      while (!called && std::chrono::steady_clock::now() < until) {
        for (int i = 0; i < 16 && !called; ++i) {
          called = bump_.load(std::memory_order_acquire) != ticket;
          if (!called) relax();
        }
      }
      if (!called) {
        sleepers_.fetch_add(1);
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bump_), FUTEX_WAIT_PRIVATE, ticket, nullptr, nullptr, 0);
        sleepers_.fetch_sub(1);
      }
    }
  }

  void futex(int operation, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bump_), operation, count, nullptr, nullptr, 0);
  }

  void forget_after_fork() {
    if (pid_ == getpid()) return;
    pid_ = getpid();
    workers_ = 0;
    sleepers_.store(0);
  }

  std::mutex owner_;
  int num_threads_ = 1;
  int workers_ = 0;
  pid_t pid_ = getpid();
  void* job_ = nullptr;
  Task task_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> bump_{0};  // changes with every job and every wake: what sleepers wait on
  alignas(64) std::atomic<int> remaining_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  Cursor cursors_[kMaxThreads];
  std::atomic<int> ends_[kMaxThreads];
};

// Run body(t) for t in [0, num_tasks) on the pool.
template <class Body>
void parallel(int num_tasks, Body& body) {
  Pool::get().run(num_tasks, &body, [](void* job, int task) { (*static_cast<Body*>(job))(task); });
}

}  // namespace betoken
