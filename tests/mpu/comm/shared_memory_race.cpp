// SPDX-License-Identifier: Apache-2.0
// The protocol of mpu/comm/workspace.py over csrc/shared_memory.h, with threads as ranks, for ThreadSanitizer, which
// sees one process only. test_shared_memory.py builds and runs it:
//
//     shared_memory_race RANKS EPOCHS [skip-closed | close-all | one-phase]
//
// A word of data belongs to one writer at a time and is no atomic: whatever orders the accesses is the protocol. A turn
// is read at once or left open until its slot is needed; some turns have a second phase (all-reduce). Every word read
// is compared. The epochs pass the place where 32 bits wrap.
//
// Broken on purpose, by a word above, it must fail: a slot is written although it is read; a turn's end closes older
// turns that are still read; nobody waits for the second phase.

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "../../../csrc/shared_memory.h"

using weft::Flag;

constexpr uint32_t SLOTS = 2, WORDS = 64, BEFORE_WRAP = 300;
constexpr uint32_t FIRST = UINT32_C(0x80000000) - BEFORE_WRAP;  // twice an epoch is a flag's number

[[noreturn]] void fail(const char* what, uint32_t epoch) {
  std::fprintf(stderr, "%s, epoch %u\n", what, epoch - FIRST);
  std::_Exit(3);
}

struct Shared {
  explicit Shared(uint32_t ranks)
      : ranks(ranks), flags(ranks * ranks), closed(ranks), data(SLOTS * ranks * WORDS), seen(ranks) {
    for (Flag& flag : flags) flag.epoch = 2 * FIRST;
    for (Flag& flag : closed) flag.epoch = FIRST;
  }
  uint32_t ranks;
  std::vector<Flag> flags, closed;  // flags: [source][destination]
  weft::Barrier barrier{};
  std::vector<uint32_t> data, seen;
};

struct Random {
  uint32_t state;
  uint32_t operator()() {
    state = state * 1664525 + 1013904223;
    return state >> 8;
  }
};

class Rank {
 public:
  Rank(Shared& shared, uint32_t rank, const char* broken)
      : shared_(shared),
        rank_(rank),
        ranks_(shared.ranks),
        skip_closed_(!std::strcmp(broken, "skip-closed")),
        close_all_(!std::strcmp(broken, "close-all")),
        one_phase_(!std::strcmp(broken, "one-phase")),
        random_{rank} {}

  void run(uint32_t epochs) {
    for (uint32_t epoch = FIRST + 1; epoch != FIRST + 1 + epochs; ++epoch) {
      const bool two_phases = program_() % 3 == 0, at_once = random_() % 2;
      const uint32_t words = 1 + program_() % WORDS;  // the ranks agree on these two
      begin(epoch, words);
      if (two_phases)
        all_reduce(epoch, words);
      else if (at_once)
        gather(epoch, words);
      if (epoch % 16 == 0) meet(epoch);
    }
  }

 private:
  void begin(uint32_t epoch, uint32_t words) {
    if (uint32_t late = open_[epoch % SLOTS]) gather(epoch - SLOTS, late);
    for (Flag& flag : shared_.closed)
      if (!skip_closed_) wait(flag, epoch - SLOTS);
    now_ = epoch;
    open_[epoch % SLOTS] = words;
    delay();
    for (uint32_t i = 0; i < words; ++i) part(epoch, rank_)[i] = value(rank_, epoch, i);
    delay();
    signal_all(2 * epoch);
  }

  void gather(uint32_t epoch, uint32_t words) {
    wait_all(2 * epoch);
    delay();
    for (uint32_t r = 0; r < ranks_; ++r)
      for (uint32_t i = 0; i < words; ++i)
        if (part(epoch, r)[i] != value(r, epoch, i)) fail("a gather read another turn's data", epoch);
    close(epoch);
  }

  // Each rank sums a piece, puts the sum in the place of its own part of that piece, and reads the others' sums.
  void all_reduce(uint32_t epoch, uint32_t words) {
    wait_all(2 * epoch);
    for (uint32_t i = words * rank_ / ranks_; i < words * (rank_ + 1) / ranks_; ++i) {
      uint32_t sum = 0;
      for (uint32_t r = 0; r < ranks_; ++r) sum += part(epoch, r)[i];
      part(epoch, rank_)[i] = sum;
    }
    delay();
    signal_all(2 * epoch + 1);
    if (!one_phase_) wait_all(2 * epoch + 1);
    for (uint32_t r = 0; r < ranks_; ++r)
      for (uint32_t i = words * r / ranks_; i < words * (r + 1) / ranks_; ++i) {
        uint32_t sum = 0;
        for (uint32_t s = 0; s < ranks_; ++s) sum += value(s, epoch, i);
        if (part(epoch, r)[i] != sum) fail("an all-reduce read what was no sum", epoch);
      }
    close(epoch);
  }

  // What is older than all open turns is closed.
  void close(uint32_t epoch) {
    open_[epoch % SLOTS] = 0;
    uint32_t until = now_;
    if (open_[now_ % SLOTS]) until = now_ - 1;
    if (open_[(now_ - 1) % SLOTS] && !close_all_) until = now_ - SLOTS;
    weft::signal(shared_.closed[rank_], until);
  }

  void meet(uint32_t epoch) {
    shared_.seen[rank_] = epoch;
    for (int again = 0; again < 2; ++again) {  // the second one: nobody writes what another still reads
      delay();
      wait(shared_.barrier.generation, weft::arrive(shared_.barrier, ranks_));
      for (uint32_t seen : shared_.seen)
        if (!again && seen != epoch) fail("a barrier let a rank through", epoch);
    }
  }

  uint32_t* part(uint32_t epoch, uint32_t rank) {
    return shared_.data.data() + ((epoch % SLOTS) * ranks_ + rank) * WORDS;
  }
  static uint32_t value(uint32_t rank, uint32_t epoch, uint32_t i) { return (epoch * 131 + rank) * 977 + i; }

  void signal_all(uint32_t number) {
    for (uint32_t r = 0; r < ranks_; ++r) weft::signal(shared_.flags[rank_ * ranks_ + r], number);
  }
  void wait_all(uint32_t number) {
    for (uint32_t r = 0; r < ranks_; ++r) wait(shared_.flags[r * ranks_ + rank_], number);
  }

  // Short sleeps, often none, and few spins: both ways out of a wait are taken, and many of the sleeps must be woken.
  void wait(Flag& flag, uint32_t number) {
    const int64_t end = weft::nanoseconds() + INT64_C(60000000000);
    while (!weft::wait(flag, number, random_() % 50, 1 << (random_() % 28)))
      if (weft::nanoseconds() > end) fail("a wait did not end", number / 2);
  }
  void delay() {
    const uint32_t n = random_() % 64;
    if (n == 0) {
      timespec time{0, 50000};
      nanosleep(&time, nullptr);
    } else if (n < 8) {
      sched_yield();
    }
    for (uint32_t i = 0; i < n; ++i) weft::pause();
  }

  Shared& shared_;
  uint32_t rank_, ranks_, now_ = FIRST;
  bool skip_closed_, close_all_, one_phase_;
  Random random_, program_{1000};  // its own, and that of all ranks
  uint32_t open_[SLOTS] = {};      // words of the turn that is still to be read, or 0
};

int main(int count, char** words) {
  if (count < 3) return 2;
  const uint32_t ranks = std::atoi(words[1]), epochs = std::atoi(words[2]);
  const char* broken = count > 3 ? words[3] : "";
  Shared shared(ranks);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < ranks; ++r) threads.emplace_back([&, r] { Rank(shared, r, broken).run(epochs); });
  for (std::thread& thread : threads) thread.join();
  std::printf("%u ranks, %u epochs: clean\n", ranks, epochs);
}
