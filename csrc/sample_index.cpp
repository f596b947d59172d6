// SPDX-License-Identifier: Apache-2.0
// Find in which document of a shuffled stream each training sample starts.
// training/data/sample_index.py calls this through ctypes and holds the same algorithm in numpy.

#include <cstdint>

// Token t of the stream is in document order[p], `offset` tokens into it. Write (p, offset) for
// t = first, first + step, ..., `count` times; return how many of these the stream holds.
extern "C" int64_t weft_sample_index(const int32_t* lengths, const int32_t* order,
                                     int64_t documents, int64_t first, int64_t step,
                                     int64_t count, int32_t* places) {
  constexpr int64_t kAhead = 32;  // the order is random: fetch lengths before they are needed
  int64_t begin = 0, wanted = first, found = 0;
  for (int64_t p = 0; p < documents && found < count; ++p) {
    if (p + kAhead < documents) __builtin_prefetch(lengths + order[p + kAhead]);
    const int64_t end = begin + lengths[order[p]];
    for (; wanted < end && found < count; wanted += step, ++found) {
      places[2 * found] = static_cast<int32_t>(p);
      places[2 * found + 1] = static_cast<int32_t>(wanted - begin);
    }
    begin = end;
  }
  return found;
}
