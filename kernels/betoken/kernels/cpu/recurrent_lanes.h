// What the recurrent kernels compute sixteen numbers at a time: products that round once, and the ends of vectors.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace betoken {

// a * b + c, rounded once if the processor can. Explicit, because a compiler that fuses by itself may choose one of two
// products at one place and the other at another: rows of the same path would differ.
[[gnu::always_inline]] inline F16 fused(const F16& a, const F16& b, const F16& c) {
  return by_parts<F16>(
      [](Native x, Native y, Native z) {
#if defined(__AVX512F__)
        return (Native)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
        return (Native)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__aarch64__)
        return (Native)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
        return x * y + z;
#endif
      },
      a, b, c);
}

// The first `num` of sixteen numbers; the others are 0.
template <class T>
[[gnu::always_inline]] inline F16 load_some(const T* from, int64_t num) {
  if (num >= kLanes) return load16(from);
  T padded[kLanes] = {};
  std::memcpy(padded, from, sizeof(T) * num);
  return load16(padded);
}

template <class T>
[[gnu::always_inline]] inline void store_some(T* to, const F16& x, int64_t num) {
  if (num >= kLanes) return store16(to, x);
  T padded[kLanes];
  store16(padded, x);
  std::memcpy(to, padded, sizeof(T) * num);
}

// Numbers of a vector of `size`, with zeros up to whole lanes.
constexpr int64_t padded_size(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// The sum of sixteen lanes, by halves.
inline float sum_lanes(const F16& x) {
  float lanes[kLanes];
  store16(lanes, x);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

}  // namespace betoken
