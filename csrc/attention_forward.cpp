// SPDX-License-Identifier: Apache-2.0
// Attention's forward (attention.h):
//
//   S = scale Q K^T;  m, l: running maximum and sum of exp(S - m);  O = sum exp(S - m) V / l;  lse = m + log l

#include "attention.h"

namespace {

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

}  // namespace

#define FORWARD(T, k)                                                                                     \
  CLONES static void forward_##k(const void* q, const void* key, const void* v, void* y, void* lse,       \
                                 int64_t from, int64_t to, Sizes z) {                                     \
    forward<T>((const T*)q, (const T*)key, (const T*)v, (T*)y, (wide<T>*)lse, from, to, z);               \
  }
KINDS(FORWARD)

// Whether this machine has the vectors of 64 bytes that attention.h is written for, and the compiler used them.
extern "C" int64_t weft_attention_is_fast() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  return __builtin_cpu_supports("x86-64-v4") != 0;
#else
  return 0;
#endif
}

extern "C" void weft_block_forward(int64_t kind, int64_t threads, const void* q, const void* k,
                                   const void* v, void* y, void* lse, BLOCK) {
  const Sizes z = SIZES;
  over_rows(b * g, s * keys, (int)threads, WORK { (void)t; PICK(forward, q, k, v, y, lse, a, b, z); });
}

extern "C" void weft_attention_forward(int64_t kind, int64_t threads, const void* q, const void* k,
                                       const void* v, void* y, void* lse, int64_t s, int64_t b, int64_t a,
                                       int64_t g, int64_t d, int64_t along_s, int64_t along_b, double scale) {
  const Sizes z = of_rows(s, b, a, g, d, along_s, along_b, scale);
  over_rows(b * g, s * s, (int)threads, WORK { (void)t; PICK(forward, q, k, v, y, lse, a, b, z); });
}
