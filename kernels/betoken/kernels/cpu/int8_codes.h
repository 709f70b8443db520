// Products of codes of few bits and bytes of x, which stay exact integers.
#pragma once
#include "grouped_bytes.h"
#include "int8_rows.h"

namespace betoken {

constexpr int kFours = kStep / 4;  // vectors of four k in a step

// Four bytes or two words of x in every column.
inline NativeInts spread(const void* x) {
  int32_t values;
  std::memcpy(&values, x, sizeof values);
  return NativeInts{} + values;
}

// Products of unsigned bytes and signed ones, by pairs, and sums of neighbours. Neither overflows for codes of at most
// 6 bits and x from -127 on.
inline NativeShorts multiply_bytes(NativeWords weights, NativeInts x) {
#if defined(BETOKEN_WIDE) && defined(__AVX512BW__)
  return (NativeShorts)_mm512_maddubs_epi16((__m512i)weights, (__m512i)x);
#elif defined(__AVX2__) && !defined(BETOKEN_WIDE)
  return (NativeShorts)_mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
#else
  const NativeShorts values = (NativeShorts)x;
  return (NativeShorts)(weights & 0xff) * ((values << 8) >> 8) + (NativeShorts)(weights >> 8) * (values >> 8);
#endif
}
inline NativeInts multiply_words(NativeShorts weights, NativeShorts x) {
#if defined(BETOKEN_WIDE) && defined(__AVX512BW__)
  return (NativeInts)_mm512_madd_epi16((__m512i)weights, (__m512i)x);
#elif defined(__AVX2__) && !defined(BETOKEN_WIDE)
  return (NativeInts)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
#else
  const NativeInts left = (NativeInts)weights, right = (NativeInts)x;
  return ((left << 16) >> 16) * ((right << 16) >> 16) + (left >> 16) * (right >> 16);
#endif
}

#if defined(BETOKEN_BYTE_DOTS)
inline NativeInts add_products(NativeInts sum, NativeWords weights, NativeInts x) {
#if defined(BETOKEN_WIDE)
  return (NativeInts)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
#elif defined(__AVX512VNNI__)
  return (NativeInts)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)weights, (__m256i)x);
#else
  return (NativeInts)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)x);
#endif
}
#endif

// A step's codes for kNative columns from `lane` on.
template <int LAYOUT>
struct ByteCodes {
  static constexpr int kMostSums = LAYOUT == kSixes ? 2 : LAYOUT == kFives ? 4 : 8;  // of products that 16 bits hold
  NativeWords fours[kFours];

  ByteCodes() = default;
  ByteCodes(const uint8_t* step, int lane) {
#pragma GCC unroll 4
    for (int quarter = 0; quarter < kStep / kQuarter; ++quarter) {
      const ByteQuarter<LAYOUT> codes(step, lane, quarter);
      fours[quarter * 2] = codes.first;
      fours[quarter * 2 + 1] = codes.second;
    }
  }

  // Sums of codes times x over BLOCK k, the part-th of the step, added to `sum`.
  template <int BLOCK>
  NativeInts dot(int part, const int8_t* x, NativeInts sum) const {
    constexpr int kNum = BLOCK / 4;
    const NativeWords* codes = fours + part * kNum;
    x += part * BLOCK;
#if defined(BETOKEN_BYTE_DOTS)
#pragma GCC unroll 8
    for (int i = 0; i < kNum; ++i) sum = add_products(sum, codes[i], spread(x + i * 4));
#else
    constexpr int kMost = kMostSums < kNum ? kMostSums : kNum;
#pragma GCC unroll 4
    for (int i = 0; i < kNum; i += kMost) {
      NativeShorts products = multiply_bytes(codes[i], spread(x + i * 4));
#pragma GCC unroll 8
      for (int j = i + 1; j < i + kMost; ++j) products += multiply_bytes(codes[j], spread(x + j * 4));
      sum += multiply_words(products, NativeShorts{} + int16_t(1));
    }
#endif
    return sum;
  }
};

#if defined(BETOKEN_BYTE_DOTS)
template <>
struct ByteCodes<kBytes> : ByteCodes<kNibbles> {
  ByteCodes() = default;
  ByteCodes(const uint8_t* step, int lane) {
#if defined(BETOKEN_WIDE)
    alignas(64) static constexpr uint16_t kPairs[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(kPairs);
#endif
#pragma GCC unroll 8
    for (int i = 0; i < kFours; ++i) {
      const uint8_t* pairs = step + (i / 2 * 2 + lane / 16) * tile_bytes(kBytes) + i % 2 * 64 + lane % 16 * 2;
#if defined(BETOKEN_WIDE)
      fours[i] = (NativeWords)_mm512_permutexvar_epi16(order, _mm512_loadu_si512(pairs)) ^ 0x8080;
#else
      const __m128i even = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs));
      const __m128i odd = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs + 32));
      const __m256i four = _mm256_set_m128i(_mm_unpackhi_epi16(even, odd), _mm_unpacklo_epi16(even, odd));
      fours[i] = (NativeWords)four ^ 0x8080;
#endif
    }
  }
};
#else
template <>
struct ByteCodes<kBytes> {
  NativeShorts pairs[kStep / 2];

  ByteCodes() = default;
  ByteCodes(const uint8_t* step, int lane) {
#pragma GCC unroll 4
    for (int quarter = 0; quarter < kStep / kQuarter; ++quarter) {
      const ByteQuarter<kBytes> codes(step, lane, quarter);
      std::memcpy(&pairs[quarter * kQuarterPairs], codes.pairs, sizeof codes.pairs);
    }
  }

  template <int BLOCK>
  NativeInts dot(int part, const int16_t* x, NativeInts sum) const {
#pragma GCC unroll 16
    for (int i = part * BLOCK / 2; i < (part + 1) * BLOCK / 2; ++i)
      sum += multiply_words(pairs[i], (NativeShorts)spread(x + i * 2));
    return sum;
  }
};
#endif

}  // namespace betoken
