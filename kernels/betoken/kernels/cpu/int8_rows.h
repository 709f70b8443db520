// Rows of activations as int8: blocks of 32 inputs with one scale each, their largest size over 127.
//
// A code is x * (127 / largest) rounded to the nearest integer, halves to even. A block whose largest is below 2^-100 is
// all zeros. A block with a number that is not finite has a scale that is not finite either.
#pragma once
#include "grouped_ends.h"

namespace betoken {

constexpr int kRowBlockInputs = 32;
constexpr int kByteTileRows = 16;

// Unsigned times signed bytes, four at a time.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define BETOKEN_BYTE_DOTS
#elif defined(__AVXVNNI__) && !defined(BETOKEN_WIDE)
#define BETOKEN_BYTE_DOTS
#endif
#if defined(BETOKEN_BYTE_DOTS)
constexpr bool kHasByteDots = true;
#else
constexpr bool kHasByteDots = false;
#endif

// Codes of bytes are multiplied as words unless the processor adds up products of bytes in 32 bits.
constexpr bool multiplies_words(int layout) { return layout == kBytes && !kHasByteDots; }
// Codes of bytes are stored signed, and made unsigned for products of bytes.
constexpr int added_zero(int layout) { return layout == kBytes && kHasByteDots ? 128 : 0; }

// Place of input i of a block in memory: the order of bytes in which codes of few bits are unpacked.
constexpr int place_of(int layout, int i) {
  constexpr int kPlaces[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  return layout == kBytes ? i : i / 8 * 8 + kPlaces[i % 8];
}

struct Int8Rows {
  int64_t rows = 0, k = 0;
  std::vector<int8_t> bytes;    // [k / 32][rows][32]
  std::vector<int16_t> words;   // in their place if words are multiplied
  std::vector<float> scales;    // [k / 32][rows]
  std::vector<int32_t> starts;  // [k / block][rows]: less sums of codes times the zero of the weight's codes
  std::vector<float> sums;      // [k / block][rows]: sums of codes times the scale

  template <int LAYOUT>
  auto* codes(int64_t block, int64_t row) {
    const int64_t at = (block * rows + row) * kRowBlockInputs;
    if constexpr (multiplies_words(LAYOUT)) return &words[at];
    else return &bytes[at];
  }

  void resize(int layout, int64_t num_rows, int64_t num_inputs, int block) {
    rows = num_rows;
    k = num_inputs;
    if (multiplies_words(layout)) words.resize(rows * k);
    else bytes.resize(rows * k + kByteTileRows * kRowBlockInputs);  // tiles read sixteen rows, however many there are
    scales.resize(rows * k / kRowBlockInputs);
    starts.resize(rows * k / block);
    sums.resize(rows * k / block);
  }
};

// Codes of a block in order; returns its scale.
inline float round_block(const float* x, int32_t* codes) {
  Native parts[kRowBlockInputs / kNative];
  NativeInts most = {};
#pragma GCC unroll 8
  for (int i = 0; i < kRowBlockInputs / kNative; ++i) {
    parts[i] = load_native(x + i * kNative);
    const NativeInts size = (NativeInts)parts[i] & 0x7fffffff;  // ordered as the floats, NaN above all
    most = size > most ? size : most;
  }
#if defined(BETOKEN_WIDE)
  const int32_t bits = _mm512_reduce_max_epi32((__m512i)most);
#else
  int32_t bits = 0;
  for (int lane = 0; lane < kNative; ++lane) bits = std::max<int32_t>(bits, most[lane]);
#endif
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  const bool is_zero = largest < 0x1p-100f;
  const float inverse = is_zero ? 0 : 127 / largest;
#pragma GCC unroll 8
  for (int i = 0; i < kRowBlockInputs / kNative; ++i) {
    const Native rounded = parts[i] * inverse + 12582912.0f;  // its last bits are the nearest integer
    const NativeInts code = (NativeInts)rounded - 0x4b400000;
    std::memcpy(codes + i * kNative, &code, sizeof code);
  }
  return is_zero ? 0 : largest / 127;
}

// Codes of a block to their places.
template <int LAYOUT, class Code>
inline void store_codes(const int32_t* codes, Code* out) {
#if defined(BETOKEN_WIDE)
  if constexpr (sizeof(Code) == 1) {
    const __m128i order = LAYOUT == kBytes ? _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                                           : _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    for (int i = 0; i < kRowBlockInputs; i += 16)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm_shuffle_epi8(_mm512_cvtepi32_epi8(_mm512_loadu_si512(codes + i)), order));
    return;
  }
#endif
#pragma GCC unroll 32
  for (int i = 0; i < kRowBlockInputs; ++i) out[place_of(LAYOUT, i)] = codes[i];
}

template <int LAYOUT, int BLOCK>
inline void round_row(const float* x, int64_t row, int zero, Int8Rows& to) {
  constexpr int kParts = kRowBlockInputs / BLOCK;
  for (int64_t block = 0; block < to.k / kRowBlockInputs; ++block) {
    int32_t codes[kRowBlockInputs];
    const float scale = round_block(x + block * kRowBlockInputs, codes);
    to.scales[block * to.rows + row] = scale;
    store_codes<LAYOUT>(codes, to.codes<LAYOUT>(block, row));
    for (int part = 0; part < kParts; ++part) {
      int32_t sum = 0;
      for (int i = 0; i < BLOCK; ++i) sum += codes[part * BLOCK + i];
      to.starts[(block * kParts + part) * to.rows + row] = -sum * (zero + added_zero(LAYOUT));
      to.sums[(block * kParts + part) * to.rows + row] = float(sum) * scale;
    }
  }
}

inline void round_row(const GroupedFormat& format, const float* x, int64_t row, Int8Rows& to) {
  with_layout(format.layout(), [&](auto layout) {
    constexpr int kLayout = decltype(layout)::value;
    if constexpr (kLayout != kFloat8) {
      if (dot_block(format) == 32) round_row<kLayout, 32>(x, row, format.zero, to);
      else round_row<kLayout, 16>(x, row, format.zero, to);
    }
  });
}

}  // namespace betoken
