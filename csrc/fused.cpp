// SPDX-License-Identifier: Apache-2.0
// Elementwise pieces of a Llama layer for the CPU, each in one pass over memory: RMSNorm, SwiGLU, RoPE and
// the cross entropy of a row, forward and backward. mpu/native.py loads them and mpu/layers/fused.py calls them
// through ctypes. The layers have the same formulas in torch, with which every function here is compared.

#include "cpu.h"

namespace {

template <typename T>
INLINE void norm_forward(const T* x, const T* w, T* y, wide<T>* inverse, int64_t from, int64_t to,
                         int64_t h, double eps) {
  using A = wide<T>;
  for (int64_t i = from; i < to; ++i) {
    const T* row = x + i * h;
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < h; ++j) sum += load(row[j]) * load(row[j]);
    const A r = A(1) / std::sqrt(sum / A(h) + A(eps));
    inverse[i] = r;
#pragma omp simd
    for (int64_t j = 0; j < h; ++j) store(y + i * h + j, load(row[j]) * r * load(w[j]));
  }
}

// adds this thread's part of dw [h]
template <typename T>
INLINE void norm_backward(const T* x, const T* w, const wide<T>* inverse, const T* dy, T* dx,
                          wide<T>* dw, int64_t from, int64_t to, int64_t h) {
  using A = wide<T>;
  for (int64_t i = from; i < to; ++i) {
    const T *row = x + i * h, *grad = dy + i * h;
    const A r = inverse[i];
    A dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < h; ++j) {
      const A p = load(grad[j]) * load(row[j]);
      dw[j] += p * r;
      dot += p * load(w[j]);
    }
    const A pull = dot * r * r * r / A(h);
#pragma omp simd
    for (int64_t j = 0; j < h; ++j)
      store(dx + i * h + j, load(grad[j]) * load(w[j]) * r - load(row[j]) * pull);
  }
}

// y may be x
template <typename T>
INLINE void add(const T* x, const T* more, T* y, int64_t from, int64_t to) {
#pragma omp simd
  for (int64_t j = from; j < to; ++j) store(y + j, load(x[j]) + load(more[j]));
}

template <typename T>
INLINE void swiglu_forward(const T* x, T* y, int64_t from, int64_t to, int64_t f) {
  using A = wide<T>;
  for (int64_t i = from; i < to; ++i) {
    const T *gate = x + 2 * i * f, *up = gate + f;
#pragma omp simd
    for (int64_t j = 0; j < f; ++j) {
      const A g = load(gate[j]);
      store(y + i * f + j, g / (A(1) + exponential(-g)) * load(up[j]));
    }
  }
}

template <typename T>
INLINE void swiglu_backward(const T* x, const T* dy, T* dx, int64_t from, int64_t to, int64_t f) {
  using A = wide<T>;
  for (int64_t i = from; i < to; ++i) {
    const T *gate = x + 2 * i * f, *up = gate + f;
    T *dgate = dx + 2 * i * f, *dup = dgate + f;
#pragma omp simd
    for (int64_t j = 0; j < f; ++j) {
      const A g = load(gate[j]), d = load(dy[i * f + j]);
      const A s = A(1) / (A(1) + exponential(-g));
      store(dup + j, d * g * s);
      store(dgate + j, d * load(up[j]) * s * (A(1) + g * (A(1) - s)));
    }
  }
}

// a row has `heads` heads of size d, the first `turned` of which are rotated; `share` successive rows have one angle;
// y may be x
template <typename T>
INLINE void rope(const T* x, const wide<T>* cos, const wide<T>* sin, T* y, int64_t from, int64_t to,
                 int64_t heads, int64_t turned, int64_t d, int64_t share, double sign) {
  using A = wide<T>;
  const int64_t half = d / 2;
  for (int64_t i = from; i < to; ++i) {
    const A *c = cos + i / share * half, *s = sin + i / share * half;
    for (int64_t n = 0; n < turned; ++n) {
      const T* a = x + (i * heads + n) * d;
      T* out = y + (i * heads + n) * d;
#pragma omp simd
      for (int64_t j = 0; j < half; ++j) {
        const A first = load(a[j]), second = load(a[j + half]), t = A(sign) * s[j];
        store(out + j, first * c[j] - second * t);
        store(out + j + half, second * c[j] + first * t);
      }
    }
    const int64_t rest = (i * heads + turned) * d;
    if (x == y) continue;
    std::memcpy(y + rest, x + rest, sizeof(T) * (heads - turned) * d);
  }
}

// over each row's first `real` columns: top, the maximum; total, the sum of exp(x - top); chosen, x at the label
// (0 where another rank has it). Column 0 is number `first` of the vocabulary. They lie in out [3, rows].
template <typename T>
INLINE void softmax_stats(const T* x, const int64_t* label, wide<T>* out, int64_t from, int64_t to,
                          int64_t rows, int64_t width, int64_t first, int64_t real) {
  using A = wide<T>;
  for (int64_t i = from; i < to; ++i) {
    const T* row = x + i * width;
    const int64_t column = label[i] - first;
    A m = real ? A(load(row[0])) : std::numeric_limits<A>::lowest(), sum = 0;
#pragma omp simd reduction(max : m)
    for (int64_t j = 0; j < real; ++j) m = load(row[j]) > m ? load(row[j]) : m;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < real; ++j) sum += exponential(load(row[j]) - m);
    out[i] = m;
    out[rows + i] = sum;
    out[2 * rows + i] = column >= 0 && column < real ? A(load(row[column])) : A(0);
  }
}

// in place: x = weight (exp(x - log_sum) - [column is the label])
template <typename T>
INLINE void softmax_gradient(T* x, const int64_t* label, const wide<T>* log_sum,
                             const wide<T>* weight, int64_t from, int64_t to, int64_t width,
                             int64_t first, int64_t real) {
  using A = wide<T>;
  for (int64_t i = from; i < to; ++i) {
    T* row = x + i * width;
    const int64_t column = label[i] - first;
    const bool here = column >= 0 && column < real;
    const A top = log_sum[i], scale = weight[i], hit = here ? A(load(row[column])) : A(0);
#pragma omp simd
    for (int64_t j = 0; j < real; ++j) store(row + j, exponential(load(row[j]) - top) * scale);
    for (int64_t j = real; j < width; ++j) store(row + j, A(0));
    if (here) store(row + column, (exponential(hit - top) - A(1)) * scale);
  }
}

// how many columns, the first of which is number `first` of a vocabulary of `size`, are not padding
int64_t columns(int64_t first, int64_t size, int64_t width) {
  const int64_t left = size > first ? size - first : 0;
  return left < width ? left : width;
}

}  // namespace

#define NORM_F(T, k)                                                                              \
  CLONES static void norm_forward_##k(const void* x, const void* w, void* y, void* r, int64_t a,  \
                                      int64_t b, int64_t h, double eps) {                         \
    norm_forward<T>((const T*)x, (const T*)w, (T*)y, (wide<T>*)r, a, b, h, eps);                  \
  }
#define NORM_B(T, k)                                                                              \
  CLONES static void norm_backward_##k(const void* x, const void* w, const void* r,               \
                                       const void* dy, void* dx, void* dw, int t, int64_t a,      \
                                       int64_t b, int64_t h) {                                    \
    norm_backward<T>((const T*)x, (const T*)w, (const wide<T>*)r, (const T*)dy, (T*)dx,           \
                     (wide<T>*)dw + t * h, a, b, h);                                              \
  }
#define ADD(T, k)                                                                                 \
  CLONES static void add_##k(const void* x, const void* e, void* y, int64_t a, int64_t b) {       \
    add<T>((const T*)x, (const T*)e, (T*)y, a, b);                                                \
  }
#define GLU_F(T, k)                                                                               \
  CLONES static void swiglu_forward_##k(const void* x, void* y, int64_t a, int64_t b, int64_t f) {\
    swiglu_forward<T>((const T*)x, (T*)y, a, b, f);                                               \
  }
#define GLU_B(T, k)                                                                               \
  CLONES static void swiglu_backward_##k(const void* x, const void* dy, void* dx, int64_t a,      \
                                         int64_t b, int64_t f) {                                  \
    swiglu_backward<T>((const T*)x, (const T*)dy, (T*)dx, a, b, f);                               \
  }
#define ROPE(T, k)                                                                                \
  CLONES static void rope_##k(const void* x, const void* c, const void* s, void* y, int64_t a,    \
                              int64_t b, int64_t n, int64_t m, int64_t d, int64_t e, double g) {  \
    rope<T>((const T*)x, (const wide<T>*)c, (const wide<T>*)s, (T*)y, a, b, n, m, d, e, g);       \
  }
#define STATS(T, k)                                                                               \
  CLONES static void softmax_stats_##k(const void* x, const int64_t* l, void* o, int64_t a,       \
                                       int64_t b, int64_t n, int64_t w, int64_t f, int64_t r) {   \
    softmax_stats<T>((const T*)x, l, (wide<T>*)o, a, b, n, w, f, r);                              \
  }
#define GRADIENT(T, k)                                                                            \
  CLONES static void softmax_gradient_##k(void* x, const int64_t* l, const void* s,               \
                                          const void* g, int64_t a, int64_t b, int64_t w,         \
                                          int64_t f, int64_t r) {                                 \
    softmax_gradient<T>((T*)x, l, (const wide<T>*)s, (const wide<T>*)g, a, b, w, f, r);           \
  }
KINDS(NORM_F) KINDS(NORM_B) KINDS(ADD) KINDS(GLU_F) KINDS(GLU_B) KINDS(ROPE) KINDS(STATS)
KINDS(GRADIENT)

// x, y [rows, h], w [h], inverse [rows]. With `added` [rows, h], which may be null, the norm is that of
// total = x + added: row by row, while it is in the cache
extern "C" void weft_norm_forward(int64_t kind, int64_t threads, const void* x, const void* added,
                                  const void* w, void* total, void* y, void* inverse, int64_t rows,
                                  int64_t h, double eps) {
  over_rows(rows, h, (int)threads, WORK {
    (void)t;
    if (!added) {
      PICK(norm_forward, x, w, y, inverse, a, b, h, eps);
      return;
    }
    for (int64_t i = a; i < b; ++i) {
      PICK(add, x, added, total, i * h, i * h + h);
      PICK(norm_forward, total, w, y, inverse, i, i + 1, h, eps);
    }
  });
}

// dw [threads, h]: the caller zeroes it before, and adds its rows, one a thread, in order afterwards.
// more [rows, h], which may be null, is added to dx
extern "C" void weft_norm_backward(int64_t kind, int64_t threads, const void* x, const void* w,
                                   const void* inverse, const void* dy, const void* more, void* dx,
                                   void* dw, int64_t rows, int64_t h) {
  over_rows(rows, h, (int)threads, WORK {
    if (!more) {
      PICK(norm_backward, x, w, inverse, dy, dx, dw, t, a, b, h);
      return;
    }
    for (int64_t i = a; i < b; ++i) {
      PICK(norm_backward, x, w, inverse, dy, dx, dw, t, i, i + 1, h);
      PICK(add, dx, more, dx, i * h, i * h + h);
    }
  });
}

// x [rows, 2 f] -> y [rows, f]
extern "C" void weft_swiglu_forward(int64_t kind, int64_t threads, const void* x, void* y,
                                    int64_t rows, int64_t f) {
  over_rows(rows, 4 * f, (int)threads, WORK { (void)t; PICK(swiglu_forward, x, y, a, b, f); });
}

extern "C" void weft_swiglu_backward(int64_t kind, int64_t threads, const void* x, const void* dy,
                                     void* dx, int64_t rows, int64_t f) {
  over_rows(rows, 4 * f, (int)threads, WORK { (void)t; PICK(swiglu_backward, x, dy, dx, a, b, f); });
}

// x, y [rows, heads, d]; cos, sin [rows / share, d / 2]
extern "C" void weft_rope(int64_t kind, int64_t threads, const void* x, const void* cos,
                          const void* sin, void* y, int64_t rows, int64_t heads, int64_t turned,
                          int64_t d, int64_t share, double sign) {
  over_rows(rows, heads * d, (int)threads,
            WORK { (void)t; PICK(rope, x, cos, sin, y, a, b, heads, turned, d, share, sign); });
}

// x [rows, width], label [rows] -> out [3, rows]; column 0 is number `first` of a vocabulary of `size`
extern "C" void weft_softmax_stats(int64_t kind, int64_t threads, const void* x,
                                   const int64_t* label, void* out, int64_t rows, int64_t width,
                                   int64_t first, int64_t size) {
  const int64_t real = columns(first, size, width);
  over_rows(rows, 4 * width, (int)threads, WORK {
    (void)t;
    PICK(softmax_stats, x, label, out, a, b, rows, width, first, real);
  });
}

// x [rows, width] in place; label, log_sum, weight [rows]
extern "C" void weft_softmax_gradient(int64_t kind, int64_t threads, void* x, const int64_t* label,
                                      const void* log_sum, const void* weight, int64_t rows,
                                      int64_t width, int64_t first, int64_t size) {
  const int64_t real = columns(first, size, width);
  over_rows(rows, 4 * width, (int)threads, WORK {
    (void)t;
    PICK(softmax_gradient, x, label, log_sum, weight, a, b, width, first, real);
  });
}
