// Sixteen-lane float vectors in GCC's vector extension, and the conversions of the half types.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AMX_BF16__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace foretoken {

constexpr int kLanes = 16;
typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

inline F16 splat(float x) { return F16{} + x; }

inline F16 load16(const float* from) {
  F16 x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline F16 load16(const bf16* from) {
#if defined(__AVX512F__)  // the compiler makes two halves of the conversion below and joins them
  return (F16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#endif
  H16 half;
  std::memcpy(&half, from, sizeof half);
  return (F16)(__builtin_convertvector(half, U16) << 16);
}

inline void store16(float* to, F16 x) { std::memcpy(to, &x, sizeof x); }

inline void store16(bf16* to, F16 x) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &half, sizeof half);
#else
  const U16 bits = (U16)x;
  const U16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U16 quiet = (bits >> 16) | 0x40u;
  const U16 is_nan = (U16)(x != x);
  const H16 half = __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), H16);
  std::memcpy(to, &half, sizeof half);
#endif
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
inline F16 select(I16 mask, F16 yes, F16 no) { return mask ? yes : no; }

// e^x for x <= 88; exactly 0 below -87.3. Cephes' polynomial, about 1 ulp.
[[gnu::always_inline]] inline F16 exp16(F16 x) {
  const I16 tiny = x < -87.3f;
  const F16 scaled = x * 1.44269504f;
  const F16 magic = splat(12582912.0f);  // adding it rounds to the nearest integer
  const F16 whole = (scaled + magic) - magic;
  F16 r = x - whole * 0.693359375f;
  r = r - whole * -2.12194440e-4f;
  F16 y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const I16 exponent = __builtin_convertvector(select(tiny, F16{}, whole), I16) << 23;
  return select(tiny, F16{}, (F16)((I16)y + exponent));
}

inline F16 tanh16(F16 x) {
  const F16 limited = select(x > 20.0f, splat(20.0f), select(x < -20.0f, splat(-20.0f), x));
  return 1.0f - 2.0f / (exp16(2.0f * limited) + 1.0f);
}

#if defined(__AMX_BF16__)
// Linux grants a process the tile registers on request.
inline bool has_tiles() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return granted;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
#else
inline bool has_tiles() { return false; }
#endif

}  // namespace foretoken
