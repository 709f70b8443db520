// A gather between the processes of one machine, in memory that they map. See shared_gather.py.
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { kCountStride = 8, kSpins = 2000 };  // a cache line per count; about 20 us

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int has_come(const int64_t* count, int64_t turn, int64_t timeout_ns) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (__atomic_load_n(count, __ATOMIC_ACQUIRE) >= turn) return 1;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  const int64_t began_ns = now_ns();
  int64_t waited_ns = 0;
  while (__atomic_load_n(count, __ATOMIC_ACQUIRE) < turn) {
    if (waited_ns > timeout_ns) return 0;
    if (waited_ns < 2000000) {
      sched_yield();
    } else {  // a rank that others keep from its core
      const struct timespec pause = {0, 50000};
      nanosleep(&pause, NULL);
    }
    waited_ns = now_ns() - began_ns;
  }
  return 1;
}

// Returns 0, or 1 if a rank has not come in time; the call is then repeated as it was.
int betoken_shared_gather(char* slots, int64_t slot_bytes, int64_t* counts, int rank, int size, int64_t turn,
                          const char* source, int64_t num_bytes, char* out, int64_t timeout_ns) {
  const int64_t parity = turn & 1;
  int64_t* own = counts + rank * kCountStride;
  if (*own < turn) {
    memcpy(slots + (2 * rank + parity) * slot_bytes, source, num_bytes);
    __atomic_store_n(own, turn, __ATOMIC_RELEASE);
  }
  for (int other = 0; other < size; ++other) {
    const int from = (rank + other) % size;
    if (!has_come(counts + from * kCountStride, turn, timeout_ns)) return 1;
    memcpy(out + from * num_bytes, slots + (2 * from + parity) * slot_bytes, num_bytes);
  }
  return 0;
}
