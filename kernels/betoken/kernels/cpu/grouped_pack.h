// Packs low-bit weights from their formats' own tensors into the layout of grouped.h.
#pragma once
#include "grouped.h"

namespace betoken {

// A format's own tensors of [N, K], and their destinations.
struct GroupedSource {
  const uint8_t *values, *high, *scales, *scale_units, *offsets, *offset_units;
  int64_t n, k, num_groups, num_units;  // as they are, not padded

  int code(int layout, int64_t column, int64_t i) const {
    if (is_byte(layout)) return values[column * k + i];
    if (is_plane(layout)) {
      const int low = values[column * ((k + 3) / 4) + i / 4] >> (i % 4 * 2) & 3;
      return layout == kTwos ? low : low | (high[column * ((k + 7) / 8) + i / 8] >> (i % 8) & 1) << 2;
    }
    int code = values[column * ((k + 1) / 2) + i / 2] >> (i % 2 * 4) & 15;
    if (layout == kFives) code |= (high[column * ((k + 7) / 8) + i / 8] >> (i % 8) & 1) << 4;
    if (layout == kSixes) code |= (high[column * ((k + 3) / 4) + i / 4] >> (i % 4 * 2) & 3) << 4;
    return code;
  }
};

// Writes the bits of k (of 32) into a plane of `bits` for each code.
inline void put_plane(uint8_t* plane, int bits, int column, int k, int code) {
  const int pairs = 16 / bits, shift = k / 2 % pairs * bits;
  const int word = (k / 2 / pairs * 2 + column / 16) * 32 + column % 16 * 2 + k % 2;
  plane[word * 2 + shift / 8] |= uint8_t(code << (shift % 8));
}

// k: of the step.
inline void put_code(int layout, uint8_t* step, int column, int k, int code) {
  if (is_plane(layout)) {
    put_plane(step, 2, column, k, code & 3);
    if (layout == kThrees) put_plane(step + kThirdAt, 1, column, k, code >> 2);
    return;
  }
  const int tile = column / 16, word = column % 16 * 2 + k % 2, pair = k % kQuarter / 2;
  uint8_t* words = step + (k / kQuarter * 2 + tile) * tile_bytes(layout);
  if (is_byte(layout)) {
    words[pair * 32 + word] = uint8_t(code);
    return;
  }
  words[word * 2 + pair / 2] |= uint8_t((code & 15) << (pair % 2 * 4));
  if (layout != kNibbles) put_plane(step + plane_at(layout), plane_bits(layout), column, k, code >> 4);
}

// The even ones of codes of 1, 2 or 4 bits, next to each other.
template <int BITS>
inline uint32_t even_codes(uint32_t codes) {
  if constexpr (BITS == 1) {
    codes &= 0x55555555u;
    codes |= codes >> 1;
  }
  if constexpr (BITS <= 2) {
    codes &= 0x33333333u;
    codes |= codes >> 2;
  }
  codes &= 0x0f0f0f0fu;
  codes = (codes | codes >> 4) & 0x00ff00ffu;
  return (codes | codes >> 8) & 0xffffu;
}

// Codes in order -> the word of the even ones, then the word of the odd ones.
template <int BITS>
inline void put_words(const uint8_t* codes, uint8_t* words) {
  uint32_t word;
  std::memcpy(&word, codes, sizeof word);
  word = even_codes<BITS>(word) | even_codes<BITS>(word >> BITS) << 16;
  std::memcpy(words, &word, sizeof word);
}

// The plane of a whole step of one column; `bits`: of its codes, from the step on.
template <int BITS>
inline void put_step_plane(const uint8_t* bits, uint8_t* plane, int column) {
  for (int word = 0; word < BITS; ++word)
    put_words<BITS>(bits + word * 4, plane + (word * 2 + column / 16) * 64 + column % 16 * 4);
}

// The codes of a whole step of one column, from k on; `column` is of the group.
template <int LAYOUT>
inline void put_step(const GroupedSource& source, int64_t row, int64_t k, uint8_t* step, int column) {
  const int tile = column / 16, at = column % 16 * 4;
  auto bits = [&](const uint8_t* codes, int num_codes) {  // codes of a byte
    return codes + row * ((source.k + num_codes - 1) / num_codes) + k / num_codes;
  };
  if constexpr (is_byte(LAYOUT)) {
    for (int pair = 0; pair < kStep / 2; ++pair)
      std::memcpy(step + (pair / kQuarterPairs * 2 + tile) * tile_bytes(LAYOUT) + pair % kQuarterPairs * 32 + at / 2,
                  bits(source.values, 1) + pair * 2, 2);
  } else if constexpr (is_plane(LAYOUT)) {
    put_step_plane<2>(bits(source.values, 4), step, column);
    if constexpr (LAYOUT == kThrees) put_step_plane<1>(bits(source.high, 8), step + kThirdAt, column);
  } else {
    for (int quarter = 0; quarter < kStep / kQuarter; ++quarter)
      put_words<4>(bits(source.values, 2) + quarter * 4, step + (quarter * 2 + tile) * tile_bytes(LAYOUT) + at);
    if constexpr (LAYOUT != kNibbles)
      put_step_plane<plane_bits(LAYOUT)>(bits(source.high, 8 / plane_bits(LAYOUT)), step + plane_at(LAYOUT), column);
  }
}

// Columns of a group next to each other, from one row per column.
inline void put_numbers(const uint8_t* from, int64_t n, int64_t first, int64_t count, int size, uint8_t* to) {
  for (int64_t column = 0; from && column < kColumns && first + column < n; ++column)
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(to + (i * kColumns + column) * size, from + ((first + column) * count + i) * size, size);
}

inline void pack_columns(const GroupedSource& source, const GroupedLayout& at, int64_t first, uint8_t* base) {
  const GroupedFormat& format = at.format;
  std::memset(base, 0, at.bytes);
  put_numbers(source.scales, source.n, first, source.num_groups, number_bytes(format.scale), base);
  put_numbers(source.offsets, source.n, first, source.num_groups, number_bytes(format.offset), base + at.offsets_at);
  if (has_units(format.scale))
    put_numbers(source.scale_units, source.n, first, source.num_units, 2, base + at.scale_units_at);
  if (has_units(format.offset))
    put_numbers(source.offset_units, source.n, first, source.num_units, 2, base + at.offset_units_at);
  with_layout(format.layout(), [&](auto kind) {
    constexpr int kLayout = decltype(kind)::value;
    for (int64_t column = 0; column < kColumns && first + column < source.n; ++column) {
      int64_t i = 0;
      uint8_t* step = base + at.codes_at;
      for (; i + kStep <= source.k; i += kStep, step += step_bytes(kLayout))
        put_step<kLayout>(source, first + column, i, step, int(column));
      for (; i < source.k; ++i)
        put_code(kLayout, step, int(column), int(i % kStep), source.code(kLayout, first + column, i));
    }
  });
}

}  // namespace betoken
