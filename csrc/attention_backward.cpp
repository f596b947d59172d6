// SPDX-License-Identifier: Apache-2.0
// Attention's backward (attention.h):
//
//   P = exp(S - lse);  dV = P^T dO;  dS = scale P (dO V^T - sum dO O);  dQ = dS K;  dK = dS^T Q

#include "attention.h"

namespace {

// dq, dk and dv lie in one tensor [s, b, a + 2 g, d], in this order
template <typename T>
INLINE void backward(const T* q, const T* k, const T* v, const T* y, const wide<T>* lse, const T* dy,
                     T* dqkv, int64_t from, int64_t to, Sizes z) {
  using A = wide<T>;
  using V = vec<A>;
  const int64_t W = z.wide<A>(), L = LANES<A>, each = z.a / z.g, all = z.a + 2 * z.g;
  const A scale = A(z.scale);
  Room<A> room(5 * z.keys() * W + QUERIES * (3 * W + 2 * KEYS + 2 * L));
  A *kt = room.take(z.keys() * W), *vt = room.take(z.keys() * W), *ks = room.take(z.keys() * W);
  A *dk = room.take(z.keys() * W), *dv = room.take(z.keys() * W), *qs = room.take(QUERIES * W);
  A *dys = room.take(QUERIES * W), *dq = room.take(QUERIES * W), *p = room.take(QUERIES * KEYS);
  A *ds = room.take(QUERIES * KEYS), *norm = room.take(QUERIES), *pull = room.take(QUERIES);
  const typename Lanes<A>::index number = numbers<A>();
  using Index = std::decay_t<decltype(number[0])>;
  for (int64_t unit = from; unit < to; ++unit) {
    const int64_t batch = unit / z.g, group = unit % z.g, at = batch * z.along_b + group * z.d;
    pack(v + at, z.along_s, z.s, z.d, ks, z.keys(), W, A(1));
    transpose(ks, z.keys(), W, vt);
    pack(k + at, z.along_s, z.s, z.d, ks, z.keys(), W, A(1));
    transpose(ks, z.keys(), W, kt);
    std::fill(dk, dk + z.keys() * W, A(0));
    std::fill(dv, dv + z.keys() * W, A(0));
    for (int64_t head = group * each; head < (group + 1) * each; ++head) {
      for (int64_t first = 0; first < z.s; first += QUERIES) {
        const int64_t real = std::min(QUERIES, z.s - first), rows = (real + ROWS - 1) / ROWS * ROWS;
        const int64_t here = ((first * z.b + batch) * z.a + head) * z.d;
        const int64_t next = std::min(QUERIES, z.s - first - real) + QUERIES, along = z.b * z.a * z.d;
        const T* qhere = q + first * z.along_s + batch * z.along_b + head * z.d;
        pack(qhere, z.along_s, real, z.d, qs, rows, W, A(1));
        pack(dy + here, along, real, z.d, dys, rows, W, A(1));
        expect(qhere, z.along_s, QUERIES, next, z.d);
        expect(y + here, along, QUERIES, next, z.d);
        expect(dy + here, along, QUERIES, next, z.d);
        std::fill(dq, dq + rows * W, A(0));
        for (int64_t i = 0; i < rows; ++i) {
          A dot = 0;
          const T* row = y + here + i * along;
          const int64_t d = i < real ? z.d : 0;
#pragma omp simd reduction(+ : dot)
          for (int64_t j = 0; j < d; ++j) dot += load(row[j]) * dys[i * W + j];
          pull[i] = dot;
          norm[i] = i < real ? lse[(batch * z.a + head) * z.s + first + i] : A(0);
        }
        for (int64_t panel = 0; panel < first + rows && panel < z.s; panel += KEYS) {
          for (int64_t r = 0; r < rows; r += ROWS) {
            const int64_t last = first + r + ROWS - 1;
            if (last < panel) continue;
            const int64_t n = seen<A>(panel, last);
            scores(p + r * KEYS, qs + r * W, W, kt + panel * W, z.d, n);
            scores(ds + r * KEYS, dys + r * W, W, vt + panel * W, z.d, n);
            for (int64_t i = r; i < r + ROWS; ++i) {
              const int64_t most = first + i - panel;
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
          const int64_t keys = std::min(KEYS, first + rows - panel);
          for (int64_t n = 0; n < keys; n += ROWS) {
            const int64_t m = std::max(int64_t(0), panel + n - first) / ROWS * ROWS;  // the first that look
            A *dvs = dv + (panel + n) * W, *dks = dk + (panel + n) * W;
            accumulate_rows(dvs, p + m * KEYS + n, 1, KEYS, dys + m * W, W, rows - m);
            accumulate_rows(dks, ds + m * KEYS + n, 1, KEYS, qs + m * W, W, rows - m);
          }
        }
        for (int64_t i = 0; i < real; ++i) {
          T* to_dq = dqkv + (((first + i) * z.b + batch) * all + head) * z.d;
#pragma omp simd
          for (int64_t j = 0; j < z.d; ++j) store(to_dq + j, dq[i * W + j] * scale);
        }
      }
    }
    for (int64_t i = 0; i < z.s; ++i) {
      T *to_dk = dqkv + ((i * z.b + batch) * all + z.a + group) * z.d, *to_dv = to_dk + z.g * z.d;
#pragma omp simd
      for (int64_t j = 0; j < z.d; ++j) {
        store(to_dk + j, dk[i * W + j] * scale);
        store(to_dv + j, dv[i * W + j]);
      }
    }
  }
}

}  // namespace

#define BACKWARD(T, k)                                                                                    \
  CLONES static void backward_##k(const void* q, const void* key, const void* v, const void* y,           \
                                  const void* lse, const void* dy, void* dqkv, int64_t from, int64_t to,  \
                                  Sizes z) {                                                              \
    backward<T>((const T*)q, (const T*)key, (const T*)v, (const T*)y, (const wide<T>*)lse, (const T*)dy,  \
                (T*)dqkv, from, to, z);                                                                   \
  }
KINDS(BACKWARD)

extern "C" void weft_attention_backward(int64_t kind, int64_t threads, const void* q, const void* k,
                                        const void* v, const void* y, const void* lse, const void* dy,
                                        void* dqkv, int64_t s, int64_t b, int64_t a, int64_t g, int64_t d,
                                        int64_t along_s, int64_t along_b, double scale) {
  const Sizes z{b, s, a, g, d, along_s, along_b, scale};
  over_rows(b * g, s * s, (int)threads, WORK { (void)t; PICK(backward, q, k, v, y, lse, dy, dqkv, a, b, z); });
}
