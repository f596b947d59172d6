// SPDX-License-Identifier: Apache-2.0
// Flags in memory that several processes share: one writer counts up, readers wait for a count.
//
//     writer                                   reader
//     write data                               wait(flag, n)      acquire: sees what came before the signal
//     signal(flag, n)       release            read data
//
// A flag holds the number of the last epoch that is ready and only grows, so nothing has to be reset, and a late
// reader sees a larger number. Numbers have 32 bits and wrap: `reached` compares their difference.
// A wait spins a little, then sleeps in the kernel until the writer wakes it or its time is up (Linux futexes; the
// flag is in shared memory, so the futex must not be a private one).

#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

#ifdef __linux__
#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace weft {

struct alignas(64) Flag {  // one cache line: no two flags disturb each other
  std::atomic<uint32_t> epoch;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "flags are shared between processes");
static_assert(sizeof(Flag) == 64 && sizeof(std::atomic<uint32_t>) == 4, "the layout that Python knows");

struct Barrier {
  Flag arrived, generation;
};

inline bool reached(uint32_t seen, uint32_t wanted) { return static_cast<int32_t>(seen - wanted) >= 0; }

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// Sleep until the flag is not `seen` any more, or for `limit` nanoseconds; may return early.
inline void sleep_on(Flag& flag, uint32_t seen, int64_t limit) {
  timespec time{static_cast<time_t>(limit / 1000000000), static_cast<long>(limit % 1000000000)};
#ifdef __linux__
  syscall(SYS_futex, &flag.epoch, FUTEX_WAIT, seen, &time, nullptr, 0);
#else
  (void)flag, (void)seen;
  time = timespec{0, limit < 50000 ? static_cast<long>(limit) : 50000};
  nanosleep(&time, nullptr);
#endif
}

inline void signal(Flag& flag, uint32_t epoch) {
  // This store and load, and those in wait, are in one total order (seq_cst): either the writer sees the sleeper,
  // or the sleeper sees the new epoch before it sleeps.
  flag.epoch.store(epoch, std::memory_order_seq_cst);
#ifdef __linux__
  if (flag.sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &flag.epoch, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Return whether the flag reached `wanted` within `limit` nanoseconds.
inline bool wait(Flag& flag, uint32_t wanted, int64_t spins, int64_t limit) {
  for (int64_t i = 0; i <= spins; ++i) {
    if (reached(flag.epoch.load(std::memory_order_acquire), wanted)) return true;
    pause();
  }
  const int64_t end = nanoseconds() + limit;
  flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool there;
  for (;;) {
    const uint32_t seen = flag.epoch.load(std::memory_order_seq_cst);
    const int64_t left = end - nanoseconds();
    there = reached(seen, wanted);
    if (there || left <= 0) break;
    sleep_on(flag, seen, left);
  }
  flag.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return there;
}

// Count one of `ranks` as arrived; all have arrived when `generation` reaches the number returned.
inline uint32_t arrive(Barrier& barrier, uint32_t ranks) {
  const uint32_t next = barrier.generation.epoch.load(std::memory_order_acquire) + 1;
  if (barrier.arrived.epoch.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks) {
    barrier.arrived.epoch.store(0, std::memory_order_relaxed);
    signal(barrier.generation, next);
  }
  return next;
}

}  // namespace weft
