// SPDX-License-Identifier: Apache-2.0
// Digest rows of a tensor in one pass over memory: mpu/zero/digest.py says what a digest is and has the same in
// torch's operations.

#include "cpu.h"

namespace {

template <typename T, typename U>
INLINE void digest_rows(const T* x, const U* bits, const int64_t* row_keys, const int64_t* column_keys,
                        const wide<T>* first, const wide<T>* second, int64_t rows, int64_t width,
                        int64_t stride, int64_t* exact, double* sums) {
  using A = wide<T>;
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = x + i * stride;
    const U* raw = bits + i * stride;
    uint64_t total = 0;
    A squares = 0, one = 0, two = 0;
#pragma omp simd reduction(+ : total, squares, one, two)
    for (int64_t j = 0; j < width; ++j) {
      const A value = load(row[j]);
      total += static_cast<uint64_t>(static_cast<int64_t>(raw[j])) * static_cast<uint64_t>(column_keys[j]);
      squares += value * value;
      one += value * first[j];
      two += value * second[j];
    }
    const uint64_t key = static_cast<uint64_t>(row_keys[i]);
    *exact = static_cast<int64_t>(static_cast<uint64_t>(*exact) + total * key);
    sums[0] += static_cast<double>(squares);
    sums[1] += (key >> 40) & 1 ? static_cast<double>(one) : -static_cast<double>(one);
    sums[2] += (key >> 41) & 1 ? static_cast<double>(two) : -static_cast<double>(two);
  }
}

CLONES void digest_float(const float* x, const int64_t* rk, const int64_t* ck, const float* a, const float* b,
                         int64_t rows, int64_t width, int64_t stride, int64_t* exact, double* sums) {
  digest_rows(x, reinterpret_cast<const int32_t*>(x), rk, ck, a, b, rows, width, stride, exact, sums);
}

CLONES void digest_double(const double* x, const int64_t* rk, const int64_t* ck, const double* a, const double* b,
                          int64_t rows, int64_t width, int64_t stride, int64_t* exact, double* sums) {
  digest_rows(x, reinterpret_cast<const int64_t*>(x), rk, ck, a, b, rows, width, stride, exact, sums);
}

}  // namespace

// exact [1] and sums [3] are added to; first, second [width]: signs of the columns
extern "C" void weft_digest(int64_t kind, int64_t, const void* x, const int64_t* row_keys, const int64_t* column_keys,
                            const void* first, const void* second, int64_t* exact, double* sums, int64_t rows,
                            int64_t width, int64_t stride) {
  if (kind == 0)
    digest_float(static_cast<const float*>(x), row_keys, column_keys, static_cast<const float*>(first),
                 static_cast<const float*>(second), rows, width, stride, exact, sums);
  else
    digest_double(static_cast<const double*>(x), row_keys, column_keys, static_cast<const double*>(first),
                  static_cast<const double*>(second), rows, width, stride, exact, sums);
}
