// SPDX-License-Identifier: Apache-2.0
// Attention's backward (attention.h):
//
//   P = exp(S - lse);  dV = P^T dO;  dS = scale P (dO V^T - sum dO O);  dQ = dS K;  dK = dS^T Q

#include "attention.h"

namespace {

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

#define BACKWARD(T, k)                                                                                    \
  CLONES static void backward_##k(const void* q, const void* key, const void* v, const void* y,           \
                                  const void* lse, const void* dy, void* dq, void* dk, void* dv,          \
                                  int64_t from, int64_t to, Sizes z) {                                    \
    backward<T>((const T*)q, (const T*)key, (const T*)v, (const T*)y, (const wide<T>*)lse, (const T*)dy,  \
                (T*)dq, (T*)dk, (T*)dv, from, to, z);                                                     \
  }
KINDS(BACKWARD)

extern "C" void weft_block_backward(int64_t kind, int64_t threads, const void* q, const void* k,
                                    const void* v, const void* y, const void* lse, const void* dy,
                                    void* dq, void* dk, void* dv, BLOCK) {
  const Sizes z = SIZES;
  over_rows(b * g, s * keys, (int)threads, WORK {
    (void)t;
    PICK(backward, q, k, v, y, lse, dy, dq, dk, dv, a, b, z);
  });
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
