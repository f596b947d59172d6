// SPDX-License-Identifier: Apache-2.0
// Grouped-query attention for the CPU, forward and backward, without a matrix of scores (Dao et al. 2022):
// some queries at a time meet 64 keys at a time, and what they share stays in the first caches. Causal: query
// i looks at keys 0 to i, else at all. mpu/layers/attention/core.py calls it for whole rows, block_attention.py
// block by block; its twin is torch's scaled_dot_product_attention. Here is what attention_forward.cpp and
// attention_backward.cpp share: vectors, packed rows and panels, products, scores, strides.
//
// q and y [b, a, s, d], k and v [b, g, keys, d], lse [b, a, s], each with its own strides, k and v with the same.
// A thread takes (sequence, group) pairs, so results do not depend on their number. In backward y and lse are
// those of all keys of a query, which may be more than these.
#pragma once

#include "cpu.h"

#include <algorithm>
#include <cstdlib>

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors stay inside a file

namespace {

constexpr int64_t KEYS = 64, QUERIES = 32, ROWS = 4;  // at a time; rows of a product in registers

template <typename A>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float type __attribute__((vector_size(64)));
  typedef int32_t index __attribute__((vector_size(64)));
};
template <>
struct Lanes<double> {
  typedef double type __attribute__((vector_size(64)));
  typedef int64_t index __attribute__((vector_size(64)));
};
template <typename A>
using vec = typename Lanes<A>::type;
template <typename A>
constexpr int64_t LANES = 64 / sizeof(A);

template <typename A>
INLINE vec<A> get(const A* p) {
  return *(const vec<A>*)p;
}
template <typename A>
INLINE void put(A* p, vec<A> x) {
  *(vec<A>*)p = x;
}
template <typename V>
INLINE V larger(V x, V y) {
  return x > y ? x : y;
}

// exp for x <= 0, as `exponential` of cpu.h; NaN stays NaN
INLINE vec<float> power(vec<float> x) {
  x = x < -87.0f ? vec<float>{} - 87.0f : x;
  const vec<float> shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low bits are round(x / ln 2)
  const vec<float> n = shifted - 12582912.0f;
  const vec<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vec<float>)((((Lanes<float>::index)shifted) << 23) + (127 << 23));
}
INLINE vec<double> power(vec<double> x) {
  for (int64_t i = 0; i < LANES<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

INLINE float sum(vec<float> x) {
  typedef Lanes<float>::index I;
  x += __builtin_shuffle(x, I{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  x += __builtin_shuffle(x, I{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  x += __builtin_shuffle(x, I{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  return x[0] + x[1];
}
INLINE double sum(vec<double> x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }
INLINE float largest(vec<float> x) {
  typedef Lanes<float>::index I;
  x = larger(x, __builtin_shuffle(x, I{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
  x = larger(x, __builtin_shuffle(x, I{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
  x = larger(x, __builtin_shuffle(x, I{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
  return x[0] > x[1] ? x[0] : x[1];
}
INLINE double largest(vec<double> x) {
  double m = x[0];
  for (int64_t i = 1; i < LANES<double>; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// c [ROWS, W vectors] += a b:  a's element (i, k) is a[i * row + k * step], b [n, W vectors] has rows `wide` apart
template <int W, typename A>
INLINE void multiply(vec<A> (&c)[ROWS][W], const A* a, int64_t row, int64_t step, const A* b, int64_t wide,
                     int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    vec<A> right[W];
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) right[j] = get(b + k * wide + j * LANES<A>);
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i) {
      const A left = a[i * row + k * step];
#pragma GCC unroll 4
      for (int j = 0; j < W; ++j) c[i][j] += left * right[j];
    }
  }
}

// the same, adding to c in memory, rows `wide` apart like b's
template <int W, typename A>
INLINE void accumulate(A* c, const A* a, int64_t row, int64_t step, const A* b, int64_t wide, int64_t n) {
  vec<A> t[ROWS][W];
#pragma GCC unroll 4
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) t[i][j] = get(c + i * wide + j * LANES<A>);
  multiply<W>(t, a, row, step, b, wide, n);
#pragma GCC unroll 4
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) put(c + i * wide + j * LANES<A>, t[i][j]);
}

template <typename A>
INLINE void accumulate_rows(A* c, const A* a, int64_t row, int64_t step, const A* b, int64_t wide, int64_t n) {
  constexpr int64_t L = LANES<A>;
  int64_t j = 0;
  for (; j + 4 * L <= wide; j += 4 * L) accumulate<4>(c + j, a, row, step, b + j, wide, n);
  for (; j + 2 * L <= wide; j += 2 * L) accumulate<2>(c + j, a, row, step, b + j, wide, n);
  for (; j < wide; j += L) accumulate<1>(c + j, a, row, step, b + j, wide, n);
}

struct At {  // strides: of sequences, heads and tokens
  int64_t b, h, s;
};

struct Sizes {
  int64_t b, s, all, a, g, d, causal;  // all: keys
  double scale;
  At q, k, y, lse, dy, dq, dk;
  template <typename A>
  int64_t wide() const {  // d, rounded up to whole vectors
    return (d + LANES<A> - 1) / LANES<A> * LANES<A>;
  }
  int64_t keys() const { return (all + KEYS - 1) / KEYS * KEYS; }
};

// memory of one thread, of whole cache lines
template <typename A>
struct Room {
  A* at;
  char* memory;
  explicit Room(int64_t count) {
    memory = (char*)std::malloc(count * sizeof(A) + 4096);
    at = (A*)(((uintptr_t)memory + 63) / 64 * 64);
  }
  ~Room() { std::free(memory); }
  A* take(int64_t count) {
    A* found = at;
    at += (count + LANES<A> - 1) / LANES<A> * LANES<A>;
    return found;
  }
};

// rows of x, `apart` elements from each other, to rows of `wide`, multiplied; the rest is 0
template <typename T, typename A>
INLINE void pack(const T* x, int64_t apart, int64_t rows, int64_t d, A* y, int64_t all, int64_t wide, A by) {
  for (int64_t i = 0; i < all; ++i) {
    const int64_t real = i < rows ? d : 0;
#pragma omp simd
    for (int64_t j = 0; j < real; ++j) y[i * wide + j] = load(x[i * apart + j]) * by;
    for (int64_t j = real; j < wide; ++j) y[i * wide + j] = 0;
  }
}

// the next rows of x, which are far apart, come to the cache while this thread multiplies
template <typename T>
INLINE void expect(const T* x, int64_t apart, int64_t from, int64_t to, int64_t d) {
  for (int64_t i = from; i < to; ++i)
    for (int64_t j = 0; j < d; j += 64 / sizeof(T)) __builtin_prefetch(x + i * apart + j);
}

// t's lane j of vector i becomes lane i of vector j, by exchanging blocks of H lanes
template <int H, typename A>
INLINE void exchange(vec<A> (&t)[LANES<A>]) {
  typename Lanes<A>::index low, high;
  for (int j = 0; j < LANES<A>; ++j) {
    low[j] = j & H ? j + LANES<A> - H : j;
    high[j] = j & H ? j + LANES<A> : j + H;
  }
  for (int i = 0; i < LANES<A>; ++i) {
    if (i & H) continue;
    const vec<A> x = t[i], y = t[i + H];
    t[i] = __builtin_shuffle(x, y, low);
    t[i + H] = __builtin_shuffle(x, y, high);
  }
  if constexpr (H > 1) exchange<H / 2, A>(t);
}

// x [rows, wide] to panels of KEYS columns: y [rows / KEYS, wide, KEYS]
template <typename A>
INLINE void transpose(const A* x, int64_t rows, int64_t wide, A* y) {
  constexpr int64_t L = LANES<A>;
  for (int64_t i = 0; i < rows; i += L) {
    A* panel = y + i / KEYS * KEYS * wide + i % KEYS;
    for (int64_t j = 0; j < wide; j += L) {
      vec<A> t[L];
      for (int64_t m = 0; m < L; ++m) t[m] = get(x + (i + m) * wide + j);
      exchange<L / 2, A>(t);
      for (int64_t m = 0; m < L; ++m) put(panel + (j + m) * KEYS, t[m]);
    }
  }
}

// how many vectors of a panel that begins at key `first` the queries up to `last` look at
template <typename A>
INLINE int64_t seen(int64_t first, int64_t last) {
  const int64_t all = KEYS / LANES<A>, some = (last - first) / LANES<A> + 1;
  return some < all ? some : all;
}

template <typename A>
INLINE typename Lanes<A>::index numbers() {
  typename Lanes<A>::index i{};
  for (int64_t j = 0; j < LANES<A>; ++j) i[j] = j;
  return i;
}

// S [ROWS, n vectors] of q's rows and a panel of k, into c
template <typename A>
INLINE void scores(A* c, const A* q, int64_t wide, const A* panel, int64_t d, int64_t n) {
  const int64_t L = LANES<A>;
  for (int64_t j = 0; j < n; j += 4) {
    const int64_t left = n - j;
#define SOME(W)                                                                \
  {                                                                            \
    vec<A> t[ROWS][W] = {};                                                    \
    multiply<W>(t, q, wide, 1, panel + j * L, KEYS, d);                        \
    for (int i = 0; i < ROWS; ++i)                                             \
      for (int m = 0; m < W; ++m) put(c + i * KEYS + (j + m) * L, t[i][m]);    \
  }
    if (left >= 4) SOME(4) else if (left == 3) SOME(3) else if (left == 2) SOME(2) else SOME(1)
#undef SOME
  }
}

// Whole rows: q [s, b, a, d], k and v [s, b, g, d] are slices of one tensor, and have its strides. y and dy
// [s, b, a, d], lse [b, a, s]; dq, dk and dv lie in one tensor [s, b, a + 2 g, d], in this order.
inline Sizes of_rows(int64_t s, int64_t b, int64_t a, int64_t g, int64_t d, int64_t along_s, int64_t along_b,
                     double scale) {
  const At in{along_b, d, along_s}, y{a * d, d, b * a * d}, lse{a * s, s, 1};
  const At grad{(a + 2 * g) * d, d, b * (a + 2 * g) * d};
  return Sizes{b, s, s, a, g, d, 1, scale, in, in, y, lse, y, grad, grad};
}

}  // namespace

// Blocks: [b, heads, tokens, d]; the strides follow. dq, dk and dv lie in memory as [b, tokens, heads, d].
#define STRIDES(x) int64_t x##_b, int64_t x##_h, int64_t x##_s
#define BLOCK                                                                                                \
  int64_t b, int64_t s, int64_t keys, int64_t a, int64_t g, int64_t d, int64_t causal, double scale,         \
      STRIDES(q), STRIDES(k), STRIDES(y), STRIDES(lse), STRIDES(dy)
#define SIZES                                                                                                \
  Sizes {                                                                                                    \
    b, s, keys, a, g, d, causal, scale, {q_b, q_h, q_s}, {k_b, k_h, k_s}, {y_b, y_h, y_s},                   \
        {lse_b, lse_h, lse_s}, {dy_b, dy_h, dy_s}, {s * a * d, d, a * d}, {keys * g * d, d, g * d}           \
  }
