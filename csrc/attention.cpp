// SPDX-License-Identifier: Apache-2.0
// Grouped-query attention for the CPU, forward and backward, without a matrix of scores (Dao et al. 2022):
// some queries at a time meet 64 keys at a time, and what they share stays in the first caches. Causal: query
// i looks at keys 0 to i, else at all. mpu/layers/attention.py calls it for whole rows, block_attention.py
// block by block; its twin is torch's scaled_dot_product_attention.
//
//   forward    S = scale Q K^T;  m, l: running maximum and sum of exp(S - m);  O = sum exp(S - m) V / l
//              lse = m + log l
//   backward   P = exp(S - lse);  dV = P^T dO;  dS = scale P (dO V^T - sum dO O);  dQ = dS K;  dK = dS^T Q
//
// q and y [b, a, s, d], k and v [b, g, keys, d], lse [b, a, s], each with its own strides, k and v with the same.
// A thread takes (sequence, group) pairs, so results do not depend on their number. In backward y and lse are
// those of all keys of a query, which may be more than these.

#include "cpu.h"

#include <algorithm>
#include <cstdlib>

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors stay inside this file

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

// rows of x, `apart` from each other, to rows of `wide`, multiplied; the rest is 0
template <typename T, typename A>
INLINE void pack(const T* x, int64_t apart, int64_t rows, int64_t d, A* y, int64_t all, int64_t wide, A by) {
  for (int64_t i = 0; i < all; ++i) {
    const int64_t real = i < rows ? d : 0;
#pragma omp simd
    for (int64_t j = 0; j < real; ++j) y[i * wide + j] = load(x[i * apart + j]) * by;
    for (int64_t j = real; j < wide; ++j) y[i * wide + j] = 0;
  }
}

// the next rows of x, which lie far apart, come to the cache while this thread multiplies
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

template <typename T>
INLINE void forward(const T* q, const T* k, const T* v, T* y, wide<T>* lse, int64_t from, int64_t to,
                    Sizes z) {
  using A = wide<T>;
  using V = vec<A>;
  const int64_t W = z.wide<A>(), L = LANES<A>, each = z.a / z.g;
  Room<A> room(2 * z.keys() * W + QUERIES * (2 * W + KEYS + 2 * L));
  A *kt = room.take(z.keys() * W), *vs = room.take(z.keys() * W), *qs = room.take(QUERIES * W);
  A *out = room.take(QUERIES * W), *p = room.take(QUERIES * KEYS), *top = room.take(QUERIES);
  A* total = room.take(QUERIES * L);
  const typename Lanes<A>::index number = numbers<A>();
  using Index = std::decay_t<decltype(number[0])>;
  for (int64_t unit = from; unit < to; ++unit) {
    const int64_t batch = unit / z.g, group = unit % z.g, at = batch * z.k.b + group * z.k.h;
    pack(k + at, z.k.s, z.all, z.d, vs, z.keys(), W, A(1));
    transpose(vs, z.keys(), W, kt);
    pack(v + at, z.k.s, z.all, z.d, vs, z.keys(), W, A(1));
    for (int64_t head = group * each; head < (group + 1) * each; ++head) {
      for (int64_t first = 0; first < z.s; first += QUERIES) {
        const int64_t real = std::min(QUERIES, z.s - first), rows = (real + ROWS - 1) / ROWS * ROWS;
        const int64_t next = std::min(QUERIES, z.s - first - real) + QUERIES;
        const T* qhere = q + first * z.q.s + batch * z.q.b + head * z.q.h;
        pack(qhere, z.q.s, real, z.d, qs, rows, W, A(z.scale));
        expect(qhere, z.q.s, QUERIES, next, z.d);
        std::fill(out, out + rows * W, A(0));
        std::fill(total, total + rows * L, A(0));
        std::fill(top, top + rows, std::numeric_limits<A>::lowest());
        const int64_t end = z.causal ? std::min(first + rows, z.all) : z.all;
        for (int64_t panel = 0; panel < end; panel += KEYS) {
          for (int64_t r = 0; r < rows; r += ROWS) {
            const int64_t last = z.causal ? first + r + ROWS - 1 : z.all - 1;
            if (last < panel) continue;
            const int64_t n = seen<A>(panel, last);
            scores(p + r * KEYS, qs + r * W, W, kt + panel * W, z.d, n);
            for (int64_t i = r; i < r + ROWS; ++i) {
              A* row = p + i * KEYS;
              const int64_t most = (z.causal ? first + i : last) - panel;  // the last key it looks at
              V peak = V{} + std::numeric_limits<A>::lowest();
              for (int64_t j = 0; j < n; ++j) {
                V x = get(row + j * L);
                if (most < j * L + L - 1) {
                  x = number <= Index(most - j * L) ? x : V{} + std::numeric_limits<A>::lowest();
                  put(row + j * L, x);
                }
                peak = larger(peak, x);
              }
              const A before = top[i], now = std::max(before, largest(peak));
              V added{};
              for (int64_t j = 0; j < n; ++j) {
                const V e = power(get(row + j * L) - now);
                put(row + j * L, e);
                added += e;
              }
              if (now > before) {
                const A fade = exponential(before - now);
                put(total + i * L, get(total + i * L) * fade + added);
                for (int64_t j = 0; j < W; j += L) put(out + i * W + j, get(out + i * W + j) * fade);
                top[i] = now;
              } else {
                put(total + i * L, get(total + i * L) + added);
              }
            }
            const int64_t keys = std::min(KEYS, last + 1 - panel);
            accumulate_rows(out + r * W, p + r * KEYS, KEYS, 1, vs + panel * W, W, keys);
          }
        }
        for (int64_t i = 0; i < real; ++i) {
          const A whole = sum(get(total + i * L)), part = A(1) / whole;
          lse[batch * z.lse.b + head * z.lse.h + (first + i) * z.lse.s] = top[i] + std::log(whole);
          T* to_y = y + batch * z.y.b + head * z.y.h + (first + i) * z.y.s;
#pragma omp simd
          for (int64_t j = 0; j < z.d; ++j) store(to_y + j, out[i * W + j] * part);
        }
      }
    }
  }
}

template <typename T>
INLINE void backward(const T* q, const T* k, const T* v, const T* y, const wide<T>* lse, const T* dy,
                     T* to_q, T* to_k, T* to_v, int64_t from, int64_t to, Sizes z) {
  using A = wide<T>;
  using V = vec<A>;
  const int64_t W = z.wide<A>(), L = LANES<A>, each = z.a / z.g;
  const A scale = A(z.scale);
  Room<A> room(5 * z.keys() * W + QUERIES * (3 * W + 2 * KEYS + 2 * L));
  A *kt = room.take(z.keys() * W), *vt = room.take(z.keys() * W), *ks = room.take(z.keys() * W);
  A *dk = room.take(z.keys() * W), *dv = room.take(z.keys() * W), *qs = room.take(QUERIES * W);
  A *dys = room.take(QUERIES * W), *dq = room.take(QUERIES * W), *p = room.take(QUERIES * KEYS);
  A *ds = room.take(QUERIES * KEYS), *norm = room.take(QUERIES), *pull = room.take(QUERIES);
  const typename Lanes<A>::index number = numbers<A>();
  using Index = std::decay_t<decltype(number[0])>;
  for (int64_t unit = from; unit < to; ++unit) {
    const int64_t batch = unit / z.g, group = unit % z.g, at = batch * z.k.b + group * z.k.h;
    pack(v + at, z.k.s, z.all, z.d, ks, z.keys(), W, A(1));
    transpose(ks, z.keys(), W, vt);
    pack(k + at, z.k.s, z.all, z.d, ks, z.keys(), W, A(1));
    transpose(ks, z.keys(), W, kt);
    std::fill(dk, dk + z.keys() * W, A(0));
    std::fill(dv, dv + z.keys() * W, A(0));
    for (int64_t head = group * each; head < (group + 1) * each; ++head) {
      for (int64_t first = 0; first < z.s; first += QUERIES) {
        const int64_t real = std::min(QUERIES, z.s - first), rows = (real + ROWS - 1) / ROWS * ROWS;
        const int64_t next = std::min(QUERIES, z.s - first - real) + QUERIES;
        const T* qhere = q + first * z.q.s + batch * z.q.b + head * z.q.h;
        const T* yhere = y + first * z.y.s + batch * z.y.b + head * z.y.h;
        const T* dyhere = dy + first * z.dy.s + batch * z.dy.b + head * z.dy.h;
        pack(qhere, z.q.s, real, z.d, qs, rows, W, A(1));
        pack(dyhere, z.dy.s, real, z.d, dys, rows, W, A(1));
        expect(qhere, z.q.s, QUERIES, next, z.d);
        expect(yhere, z.y.s, QUERIES, next, z.d);
        expect(dyhere, z.dy.s, QUERIES, next, z.d);
        std::fill(dq, dq + rows * W, A(0));
        for (int64_t i = 0; i < rows; ++i) {
          A dot = 0;
          const T* row = yhere + i * z.y.s;
          const int64_t d = i < real ? z.d : 0;
#pragma omp simd reduction(+ : dot)
          for (int64_t j = 0; j < d; ++j) dot += load(row[j]) * dys[i * W + j];
          pull[i] = dot;
          norm[i] = i < real ? lse[batch * z.lse.b + head * z.lse.h + (first + i) * z.lse.s] : A(0);
        }
        const int64_t end = z.causal ? std::min(first + rows, z.all) : z.all;
        for (int64_t panel = 0; panel < end; panel += KEYS) {
          for (int64_t r = 0; r < rows; r += ROWS) {
            const int64_t last = z.causal ? first + r + ROWS - 1 : z.all - 1;
            if (last < panel) continue;
            const int64_t n = seen<A>(panel, last);
            scores(p + r * KEYS, qs + r * W, W, kt + panel * W, z.d, n);
            scores(ds + r * KEYS, dys + r * W, W, vt + panel * W, z.d, n);
            for (int64_t i = r; i < r + ROWS; ++i) {
              const int64_t most = (z.causal ? first + i : last) - panel;
              for (int64_t j = 0; j < n * L; j += L) {
                V e = power(get(p + i * KEYS + j) * scale - norm[i]);
                if (most < j + L - 1) e = number <= Index(most - j) ? e : V{};
                put(p + i * KEYS + j, e);
                put(ds + i * KEYS + j, e * (get(ds + i * KEYS + j) - pull[i]));
              }
            }
            const int64_t keys = std::min(KEYS, last + 1 - panel);
            accumulate_rows(dq + r * W, ds + r * KEYS, KEYS, 1, ks + panel * W, W, keys);
          }
          const int64_t keys = std::min(KEYS, (z.causal ? first + rows : z.all) - panel);
          for (int64_t n = 0; n < keys; n += ROWS) {
            const int64_t before = z.causal ? std::max(int64_t(0), panel + n - first) : 0;
            const int64_t m = before / ROWS * ROWS;  // the first that look
            A *dvs = dv + (panel + n) * W, *dks = dk + (panel + n) * W;
            accumulate_rows(dvs, p + m * KEYS + n, 1, KEYS, dys + m * W, W, rows - m);
            accumulate_rows(dks, ds + m * KEYS + n, 1, KEYS, qs + m * W, W, rows - m);
          }
        }
        for (int64_t i = 0; i < real; ++i) {
          T* to_dq = to_q + batch * z.dq.b + head * z.dq.h + (first + i) * z.dq.s;
#pragma omp simd
          for (int64_t j = 0; j < z.d; ++j) store(to_dq + j, dq[i * W + j] * scale);
        }
      }
    }
    for (int64_t i = 0; i < z.all; ++i) {
      const int64_t here = batch * z.dk.b + group * z.dk.h + i * z.dk.s;
      T *to_dk = to_k + here, *to_dv = to_v + here;
#pragma omp simd
      for (int64_t j = 0; j < z.d; ++j) {
        store(to_dk + j, dk[i * W + j] * scale);
        store(to_dv + j, dv[i * W + j]);
      }
    }
  }
}

}  // namespace

#define FORWARD(T, k)                                                                                     \
  CLONES static void forward_##k(const void* q, const void* key, const void* v, void* y, void* lse,       \
                                 int64_t from, int64_t to, Sizes z) {                                     \
    forward<T>((const T*)q, (const T*)key, (const T*)v, (T*)y, (wide<T>*)lse, from, to, z);               \
  }
#define BACKWARD(T, k)                                                                                    \
  CLONES static void backward_##k(const void* q, const void* key, const void* v, const void* y,           \
                                  const void* lse, const void* dy, void* dq, void* dk, void* dv,          \
                                  int64_t from, int64_t to, Sizes z) {                                    \
    backward<T>((const T*)q, (const T*)key, (const T*)v, (const T*)y, (const wide<T>*)lse, (const T*)dy,  \
                (T*)dq, (T*)dk, (T*)dv, from, to, z);                                                     \
  }
KINDS(FORWARD) KINDS(BACKWARD)

// Whether this machine has the vectors of 64 bytes that this file is written for, and the compiler used them.
extern "C" int64_t weft_attention_is_fast() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  return __builtin_cpu_supports("x86-64-v4") != 0;
#else
  return 0;
#endif
}

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

extern "C" void weft_block_forward(int64_t kind, int64_t threads, const void* q, const void* k,
                                   const void* v, void* y, void* lse, BLOCK) {
  const Sizes z = SIZES;
  over_rows(b * g, s * keys, (int)threads, WORK { (void)t; PICK(forward, q, k, v, y, lse, a, b, z); });
}

extern "C" void weft_block_backward(int64_t kind, int64_t threads, const void* q, const void* k,
                                    const void* v, const void* y, const void* lse, const void* dy,
                                    void* dq, void* dk, void* dv, BLOCK) {
  const Sizes z = SIZES;
  over_rows(b * g, s * keys, (int)threads, WORK {
    (void)t;
    PICK(backward, q, k, v, y, lse, dy, dq, dk, dv, a, b, z);
  });
}

// Whole rows: q [s, b, a, d], k and v [s, b, g, d] are slices of one tensor, and have its strides. y and dy
// [s, b, a, d], lse [b, a, s]; dq, dk and dv lie in one tensor [s, b, a + 2 g, d], in this order.
static Sizes of_rows(int64_t s, int64_t b, int64_t a, int64_t g, int64_t d, int64_t along_s, int64_t along_b,
                     double scale) {
  const At in{along_b, d, along_s}, y{a * d, d, b * a * d}, lse{a * s, s, 1};
  const At grad{(a + 2 * g) * d, d, b * (a + 2 * g) * d};
  return Sizes{b, s, s, a, g, d, 1, scale, in, in, y, lse, y, grad, grad};
}

extern "C" void weft_attention_forward(int64_t kind, int64_t threads, const void* q, const void* k,
                                       const void* v, void* y, void* lse, int64_t s, int64_t b, int64_t a,
                                       int64_t g, int64_t d, int64_t along_s, int64_t along_b, double scale) {
  const Sizes z = of_rows(s, b, a, g, d, along_s, along_b, scale);
  over_rows(b * g, s * s, (int)threads, WORK { (void)t; PICK(forward, q, k, v, y, lse, a, b, z); });
}

extern "C" void weft_attention_backward(int64_t kind, int64_t threads, const void* q, const void* k,
                                        const void* v, const void* y, const void* lse, const void* dy,
                                        void* dqkv, int64_t s, int64_t b, int64_t a, int64_t g, int64_t d,
                                        int64_t along_s, int64_t along_b, double scale) {
  const Sizes z = of_rows(s, b, a, g, d, along_s, along_b, scale);
  char* const dq = (char*)dqkv;
  const int64_t head = d * (kind == 0 ? 4 : kind == 1 ? 8 : 2);  // bytes
  over_rows(b * g, s * s, (int)threads, WORK {
    (void)t;
    PICK(backward, q, k, v, y, lse, dy, dq, dq + z.a * head, dq + (z.a + z.g) * head, a, b, z);
  });
}
