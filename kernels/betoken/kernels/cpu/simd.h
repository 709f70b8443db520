// Sixteen-lane float vectors in GCC's vector extension, and the conversions of the half types.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace betoken {

constexpr int kLanes = 16;

// A vector as wide as the processor's own. Of wider ones compilers make numbers one by one, or parts through memory, so
// sixteen lanes are a row of these. BETOKEN_NARROW: of half the width, with the instructions of AVX512.
#if defined(__AVX512F__) && !defined(BETOKEN_NARROW)
#define BETOKEN_WIDE
#endif
#if defined(BETOKEN_WIDE)
constexpr int kNative = 16;
#elif defined(__AVX__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
typedef float Native __attribute__((vector_size(4 * kNative)));
typedef int32_t NativeInts __attribute__((vector_size(4 * kNative)));
typedef uint32_t NativeBits __attribute__((vector_size(4 * kNative)));
typedef uint16_t NativeHalves __attribute__((vector_size(2 * kNative)));
constexpr int kParts = kLanes / kNative;

template <class Part, class Number>
struct Sixteen {
  Part parts[kParts] = {};

  Number operator[](int lane) const { return parts[lane / kNative][lane % kNative]; }
  void set(int lane, Number number) { parts[lane / kNative][lane % kNative] = number; }
};
typedef Sixteen<Native, float> F16;
typedef Sixteen<NativeInts, int32_t> I16;

// One operation on each part of what it takes.
template <class Result, class Operation, class... Operands>
[[gnu::always_inline]] inline Result by_parts(Operation operation, const Operands&... operands) {
  Result result;
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) result.parts[part] = operation(operands.parts[part]...);
  return result;
}

inline F16 splat(float x) {
  return by_parts<F16>([x](Native zero) { return zero + x; }, F16{});
}
inline I16 splat(int32_t x) {
  return by_parts<I16>([x](NativeInts zero) { return zero + x; }, I16{});
}

#define BETOKEN_OPERATOR(SIGN, RESULT, OPERAND, NUMBER)                                                    \
  [[gnu::always_inline]] inline RESULT operator SIGN(const OPERAND& a, const OPERAND& b) {                   \
    return by_parts<RESULT>([](auto x, auto y) { return x SIGN y; }, a, b);                                  \
  }                                                                                                          \
  [[gnu::always_inline]] inline RESULT operator SIGN(const OPERAND& a, NUMBER b) { return a SIGN splat(b); } \
  [[gnu::always_inline]] inline RESULT operator SIGN(NUMBER a, const OPERAND& b) { return splat(a) SIGN b; }
BETOKEN_OPERATOR(+, F16, F16, float)
BETOKEN_OPERATOR(-, F16, F16, float)
BETOKEN_OPERATOR(*, F16, F16, float)
BETOKEN_OPERATOR(/, F16, F16, float)
BETOKEN_OPERATOR(<, I16, F16, float)
BETOKEN_OPERATOR(>, I16, F16, float)
BETOKEN_OPERATOR(<=, I16, I16, int32_t)
BETOKEN_OPERATOR(>=, I16, I16, int32_t)
BETOKEN_OPERATOR(&, I16, I16, int32_t)
#undef BETOKEN_OPERATOR

[[gnu::always_inline]] inline F16& operator+=(F16& a, const F16& b) { return a = a + b; }

struct bf16 {
  uint16_t bits;
};

inline Native load_native(const float* from) {
  Native x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Native load_native(const bf16* from) {
#if defined(BETOKEN_WIDE)  // the compiler makes two halves of the conversion below and joins them
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return (Native)_mm512_slli_epi32(bits, 16);
#endif
  NativeHalves half;
  std::memcpy(&half, from, sizeof half);
  return (Native)(__builtin_convertvector(half, NativeBits) << 16);
}

inline void store_native(float* to, const Native& x) { std::memcpy(to, &x, sizeof x); }

template <class T>
inline F16 load16(const T* from) {
  F16 x;
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) x.parts[part] = load_native(from + part * kNative);
  return x;
}

inline void store16(float* to, const F16& x) { std::memcpy(to, &x, sizeof x); }

inline void store16(bf16* to, const F16& x) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x.parts[0]);
  std::memcpy(to, &half, sizeof half);
#else
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    const NativeBits bits = (NativeBits)x.parts[part];
    const NativeBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const NativeBits quiet = (bits >> 16) | 0x40u;
    const NativeBits is_nan = (NativeBits)(x.parts[part] != x.parts[part]);
    const NativeHalves half = __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), NativeHalves);
    std::memcpy(to + part * kNative, &half, sizeof half);
  }
#endif
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
[[gnu::always_inline]] inline F16 select(const I16& mask, const F16& yes, const F16& no) {
  return by_parts<F16>([](NativeInts m, Native y, Native n) { return m ? y : n; }, mask, yes, no);
}

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
  const F16 powered = by_parts<F16>(
      [](Native part, Native exponent) {
        return (Native)((NativeInts)part + (__builtin_convertvector(exponent, NativeInts) << 23));
      },
      y, select(tiny, F16{}, whole));
  return select(tiny, F16{}, powered);
}

inline F16 tanh16(F16 x) {
  const F16 limited = select(x > 20.0f, splat(20.0f), select(x < -20.0f, splat(-20.0f), x));
  return 1.0f - 2.0f / (exp16(2.0f * limited) + 1.0f);
}

#if defined(__AMX_TILE__)
// Linux grants a process the tile registers on request.
inline bool tiles_granted() {
#if defined(BETOKEN_TILES_GRANTED)
  return BETOKEN_TILES_GRANTED;
#else
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return granted;
#endif
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
#endif

// Whether products of bf16 run by tiles.
inline bool has_tiles() {
#if defined(__AMX_BF16__)
  return tiles_granted();
#else
  return false;
#endif
}

// Whether dot products of bf16 pairs (AVX512-BF16) are to be used. Intel's processors run them at half the pace of float
// multiply-adds; their tiles are the fast path, if the hypervisor exposes them. -DBETOKEN_DOTS=true or false decides.
inline bool has_dots() {
#if !defined(__AVX512BF16__)
  return false;
#elif defined(BETOKEN_DOTS)
  return BETOKEN_DOTS;
#else
  static const bool fast = !__builtin_cpu_is("intel");
  return fast;
#endif
}

}  // namespace betoken
