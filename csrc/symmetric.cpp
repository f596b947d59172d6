// SPDX-License-Identifier: Apache-2.0
// The C interface of shared_memory.h; mpu/comm/symmetric.py calls it through ctypes. Addresses point to flags in a
// mapping that all ranks share.

#include "shared_memory.h"

#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif

using weft::Flag;

static Flag& at(int64_t address, int64_t stride, int64_t i) {
  return *reinterpret_cast<Flag*>(address + i * stride);
}

#ifdef __x86_64__
// Copy with stores past the caches: another core reads the copy next, and fetching the lines that are about to be
// overwritten is a third of a copy's traffic. Ends with a fence, since a release does not order such stores.
__attribute__((target("avx2"))) static void stream(char* to, const char* from, int64_t bytes) {
  while (bytes > 0 && reinterpret_cast<uintptr_t>(to) % 32 != 0) *to++ = *from++, --bytes;
  for (; bytes >= 128; to += 128, from += 128, bytes -= 128)
    for (int i = 0; i < 128; i += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  std::memcpy(to, from, bytes);
  _mm_sfence();
}
#endif

// Copy more bytes than a cache should hold, past the caches where the CPU has AVX2.
extern "C" void weft_copy(int64_t to, int64_t from, int64_t bytes) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2"))
    return stream(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), bytes);
#endif
  std::memcpy(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), bytes);
}

// Set `count` flags, `stride` bytes apart.
extern "C" void weft_signal(int64_t flags, int64_t stride, int64_t count, uint32_t epoch) {
  for (int64_t i = 0; i < count; ++i) weft::signal(at(flags, stride, i), epoch);
}

// Wait for `count` flags in turn, each at most `nanoseconds`; return how many reached the epoch before one did not.
extern "C" int64_t weft_wait(int64_t flags, int64_t stride, int64_t count, uint32_t epoch, int64_t spins,
                             int64_t nanoseconds) {
  for (int64_t i = 0; i < count; ++i)
    if (!weft::wait(at(flags, stride, i), epoch, spins, nanoseconds)) return i;
  return count;
}

extern "C" uint32_t weft_arrive(int64_t barrier, uint32_t ranks) {
  return weft::arrive(*reinterpret_cast<weft::Barrier*>(barrier), ranks);
}
