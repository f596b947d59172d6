// SPDX-License-Identifier: Apache-2.0
// Choose the data set of each sample of a blend in Megatron's order.
// training/data/megatron_order.py calls this through ctypes and holds the same algorithm in numpy.

#include <cstdint>

// For sample i = 0, 1, ..., count - 1 take the data set whose share of the first max(i, 1) samples
// is furthest ahead of what it has given, the first of equals, among those with room: room[d] is
// how many it may give, negative for any number. Write the data set and its own sample's number.
// Return how many samples were written: fewer than count where no data set has room.
extern "C" int64_t weft_blend_order(const double* weights, const int64_t* room, int64_t sets,
                                    int64_t count, int32_t* chosen, int32_t* inner,
                                    int64_t* given) {
  for (int64_t d = 0; d < sets; ++d) given[d] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double samples = i > 1 ? static_cast<double>(i) : 1.0;
    int64_t best = -1;
    double most = 0.0;
    for (int64_t d = 0; d < sets; ++d) {
      if (room[d] >= 0 && given[d] >= room[d]) continue;
      volatile double share = weights[d] * samples;  // rounded: no fused multiply and subtract
      const double behind = share - static_cast<double>(given[d]);
      if (best < 0 || behind > most) {
        best = d;
        most = behind;
      }
    }
    if (best < 0) return i;
    chosen[i] = static_cast<int32_t>(best);
    inner[i] = static_cast<int32_t>(given[best]++);
  }
  return count;
}
