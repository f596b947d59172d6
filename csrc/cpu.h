// SPDX-License-Identifier: Apache-2.0
// What csrc's arithmetic shares: kinds of numbers, exp, threads, and clones for several instruction sets.
//
// kind: 0 float, 1 double, 2 bfloat16. Arithmetic is in float (double for 1); bfloat16 is only read and
// written. OpenMP comes from the process that loads this library (torch's), so there is one pool of threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// compile for several instruction sets, choose when loaded
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))

struct bf16 {
  uint16_t bits;
};

template <typename T>
struct Wide {
  using type = T;
};
template <>
struct Wide<bf16> {
  using type = float;
};
template <typename T>
using wide = typename Wide<T>::type;

INLINE float load(float x) { return x; }
INLINE double load(double x) { return x; }
INLINE float load(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
INLINE void store(float* p, float x) { *p = x; }
INLINE void store(double* p, double x) { *p = x; }
INLINE void store(bf16* p, float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  p->bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}

// exp in float: 2^n times a polynomial on [-ln2/2, ln2/2]; error below 2 units in the last place
INLINE float exponential(float x) {
  const float bounded = x > 88.0f ? 88.0f : (x < -87.0f ? -87.0f : x);
  const float n = std::nearbyint(bounded * 1.44269504f);
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = (static_cast<uint32_t>(static_cast<int32_t>(n)) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}
INLINE double exponential(double x) { return std::exp(x); }

// Cut `rows` over the threads; few rows are not worth waking them.
template <typename Work>
void over_rows(int64_t rows, int64_t width, int threads, Work work) {
  const int64_t worth = rows * width / 8192 + 1;
  if (threads > worth) threads = static_cast<int>(worth);
  if (threads <= 1) return work(0, int64_t(0), rows);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  {
    const int64_t n = omp_get_num_threads(), t = omp_get_thread_num();
    work(static_cast<int>(t), rows * t / n, rows * (t + 1) / n);
  }
#else
  work(0, int64_t(0), rows);
#endif
}

}  // namespace

// For each function: one clone for each kind (clones cannot be templates), then an entry that picks the kind.
#define KINDS(MAKE) MAKE(float, f32) MAKE(double, f64) MAKE(bf16, b16)
#define PICK(name, ...)                                                            \
  if (kind == 0) name##_f32(__VA_ARGS__);                                          \
  else if (kind == 1) name##_f64(__VA_ARGS__);                                     \
  else name##_b16(__VA_ARGS__)

#define WORK [=](int t, int64_t a, int64_t b)
