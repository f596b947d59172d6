// SPDX-License-Identifier: Apache-2.0
// The C interface of shared_memory.h; mpu/comm/symmetric.py calls it through ctypes. Addresses are those of flags
// in a mapping that all ranks share.

#include "shared_memory.h"

using weft::Flag;

static Flag& at(int64_t address, int64_t stride, int64_t i) {
  return *reinterpret_cast<Flag*>(address + i * stride);
}

// Set `count` flags, `stride` bytes apart.
extern "C" void weft_signal(int64_t flags, int64_t stride, int64_t count, uint32_t epoch) {
  for (int64_t i = 0; i < count; ++i) weft::signal(at(flags, stride, i), epoch);
}

// Wait for `count` flags, one after the other; return how many reached the epoch before the time was up.
extern "C" int64_t weft_wait(int64_t flags, int64_t stride, int64_t count, uint32_t epoch, int64_t spins,
                             int64_t nanoseconds) {
  for (int64_t i = 0; i < count; ++i)
    if (!weft::wait(at(flags, stride, i), epoch, spins, nanoseconds)) return i;
  return count;
}

extern "C" uint32_t weft_arrive(int64_t barrier, uint32_t ranks) {
  return weft::arrive(*reinterpret_cast<weft::Barrier*>(barrier), ranks);
}
