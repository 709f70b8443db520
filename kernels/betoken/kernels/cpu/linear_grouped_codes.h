// Codes of few bits as the bf16 pairs that dot products take (AVX512-BF16), which hold them exactly.
#pragma once
#include "linear_grouped_job.h"

#if defined(__AVX512BF16__)
namespace betoken {

// Sixteen columns by pairs of k as bf16, 4 vectors a step; codes less their constant zero.
template <int CODE>
struct DotCodes {
  __m512i tables[CODE == kFloat8 ? 4 : CODE == kSixes ? 2 : 1];

  explicit DotCodes(const GroupedFormat& format) {
    if constexpr (CODE == kBytes) return;
    const float* table = format.table();
    uint16_t words[128];
    for (int i = 0; i < 128; ++i) {
      float number = float(i % (1 << CODE % 8)) - float(format.zero);
      if constexpr (CODE == kFloat8) number = float8_to_float(uint8_t(i));
      else if (table) number = table[i % (1 << CODE % 8)];
      uint32_t bits;
      std::memcpy(&bits, &number, sizeof bits);
      words[i] = uint16_t(bits >> 16);
    }
    for (size_t t = 0; t < sizeof tables / 64; ++t) tables[t] = _mm512_loadu_si512(words + 32 * t);
  }

  // What the four pairs of a quarter share: their words (the third bits of kThrees), and the bits of their plane from the
  // lowest on.
  struct Quarter {
    const uint8_t* at;
    __m512i words, high;
  };

  Quarter begin(const uint8_t* step, int tile, int quarter) const {
    Quarter begun{step + (quarter * 2 + tile) * tile_bytes(CODE), {}, {}};
    if constexpr (!is_byte(CODE) && !is_plane(CODE)) begun.words = _mm512_loadu_si512(begun.at);
    if constexpr (CODE == kThrees)
      begun.words = _mm512_srl_epi16(_mm512_loadu_si512(step + kThirdAt + tile * 64), _mm_cvtsi32_si128(quarter * 4));
    if constexpr (is_plane(CODE) || CODE == kFives || CODE == kSixes) {
      const int place = CODE == kFives ? 0 : quarter / 2, shift = CODE == kFives ? quarter * 4 : quarter % 2 * 8;
      const __m512i high = _mm512_loadu_si512(step + plane_at(CODE) + (place * 2 + tile) * 64);
      begun.high = _mm512_srl_epi16(high, _mm_cvtsi32_si128(shift));
    }
    return begun;
  }

  template <int I>
  __m512bh pair(const Quarter& quarter) const {
    if constexpr (CODE == kBytes) {
      const __m128i* from = reinterpret_cast<const __m128i*>(quarter.at + I * 32);
      const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
      const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)));
      return _mm512_cvtne2ps_pbh(high, low);
    } else if constexpr (CODE == kFloat8) {
      const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(quarter.at + I * 32)));
      const __m512i small = _mm512_permutex2var_epi16(tables[0], codes, tables[1]);
      const __m512i large = _mm512_permutex2var_epi16(tables[2], codes, tables[3]);
      const __m512i sizes = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(64)), small, large);
      const __m512i signs = _mm512_and_si512(_mm512_slli_epi16(codes, 8), _mm512_set1_epi16(short(0x8000)));
      return (__m512bh)_mm512_or_si512(sizes, signs);
    } else if constexpr (CODE == kTwos) {
      return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(quarter.high, I * 2), tables[0]);
    } else if constexpr (CODE == kThrees) {
      const __m512i low = _mm512_srli_epi16(quarter.high, I * 2);
      const __m512i third = I <= 2 ? _mm512_slli_epi16(quarter.words, I <= 2 ? 2 - I : 0)
                                   : _mm512_srli_epi16(quarter.words, I <= 2 ? 0 : I - 2);
      const __m512i codes = _mm512_ternarylogic_epi64(_mm512_set1_epi16(3), low, third, 0xca);  // 3 ? low : third
      return (__m512bh)_mm512_permutexvar_epi16(codes, tables[0]);
    } else {
      const __m512i low = _mm512_srli_epi16(quarter.words, I * 4);
      if constexpr (CODE == kNibbles) return (__m512bh)_mm512_permutexvar_epi16(low, tables[0]);
      constexpr int kShift = 4 - I * (CODE - 4);
      const __m512i high =
          kShift >= 0 ? _mm512_slli_epi16(quarter.high, kShift) : _mm512_srli_epi16(quarter.high, -kShift);
      const __m512i codes = _mm512_ternarylogic_epi64(_mm512_set1_epi16(15), low, high, 0xca);  // 15 ? low : high
      if constexpr (CODE == kFives) return (__m512bh)_mm512_permutexvar_epi16(codes, tables[0]);
      return (__m512bh)_mm512_permutex2var_epi16(tables[0], codes, tables[1]);
    }
  }

  // operation(I, weights of tile 0, weights of tile 1) for the pairs of a quarter, in order.
  template <class Operation>
  [[gnu::always_inline]] void each_pair(const uint8_t* step, int quarter, Operation operation) const {
    const Quarter tiles[2] = {begin(step, 0, quarter), begin(step, 1, quarter)};
    operation(0, pair<0>(tiles[0]), pair<0>(tiles[1]));
    operation(1, pair<1>(tiles[0]), pair<1>(tiles[1]));
    operation(2, pair<2>(tiles[0]), pair<2>(tiles[1]));
    operation(3, pair<3>(tiles[0]), pair<3>(tiles[1]));
  }
};

}  // namespace betoken
#endif
