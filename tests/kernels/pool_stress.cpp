// Jobs of changing size on the pool, one right after another; prints how many tasks did not run exactly once.
#include <cstdio>
#include <cstdlib>

#include "pool.h"

int main(int, char** arguments) {
  const int num_jobs = std::atoi(arguments[1]);
  betoken::Pool::get().set_num_threads(std::atoi(arguments[2]));
  constexpr int kMaxTasks = 64;
  std::atomic<int> runs[kMaxTasks];
  long wrong = 0;
  for (int job = 0; job < num_jobs; ++job) {
    const int num_tasks = 2 + job * 7919LL % (kMaxTasks - 2);
    for (auto& count : runs) count.store(0, std::memory_order_relaxed);
    auto body = [&](int task) { runs[task].fetch_add(1); };
    betoken::parallel(num_tasks, body);
    for (int task = 0; task < kMaxTasks; ++task) wrong += runs[task].load() != (task < num_tasks);
  }
  std::printf("%ld\n", wrong);
}
