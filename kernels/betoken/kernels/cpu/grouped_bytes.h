// Integer codes of a quarter of a step as bytes (words for codes of 8 bits), unpacked for all of its k at once.
#pragma once
#include "grouped.h"

namespace betoken {

typedef uint16_t NativeWords __attribute__((vector_size(4 * kNative)));
typedef int16_t NativeShorts __attribute__((vector_size(4 * kNative)));

inline NativeWords load_words(const void* from) {
  NativeWords words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

// Of kNative columns, four bytes each, for eight k: 0, 4, 1, 5 in `first` and 2, 6, 3, 7 in `second`.
template <int LAYOUT>
struct ByteQuarter {
  NativeWords first = {}, second = {};

  ByteQuarter(const uint8_t* step, int lane, int quarter) {
    const int tile = lane / 16, column = lane % 16 * 4;
    if constexpr (!is_plane(LAYOUT)) {
      const NativeWords words = load_words(step + (quarter * 2 + tile) * tile_bytes(LAYOUT) + column);
      first = words & 0x0f0f;
      second = words >> 4 & 0x0f0f;
    }
    if constexpr (LAYOUT == kFives || LAYOUT == kThrees) {  // products put bits 0 and 2, or 1 and 3, in two bytes
      constexpr int kBit = LAYOUT == kFives ? 4 : 2;
      constexpr uint16_t kShifts = 0x41 << kBit, kMask = 0x0101 << kBit;
      const uint8_t* plane = step + (LAYOUT == kThrees ? kThirdAt : plane_at(LAYOUT)) + tile * 64 + column;
      const NativeWords bits = load_words(plane) >> quarter * 4 & 0xf;
      first |= bits * kShifts & kMask;
      second |= bits * uint16_t(kShifts / 2) & kMask;
    }
    if constexpr (LAYOUT == kSixes || is_plane(LAYOUT)) {  // likewise bits 0, 1, 4 and 5, or 2, 3, 6 and 7
      constexpr int kBit = LAYOUT == kSixes ? 4 : 0;
      constexpr uint16_t kShifts = 0x11 << kBit, kMask = 0x0303 << kBit;
      const uint8_t* plane = step + plane_at(LAYOUT) + (quarter / 2 * 2 + tile) * 64 + column;
      const NativeWords bits = load_words(plane) >> quarter % 2 * 8;
      first |= (bits & 0x33) * kShifts & kMask;
      second |= (bits >> 2 & 0x33) * kShifts & kMask;
    }
  }

  // Codes at K of the eight.
  template <int K>
  NativeInts code() const {
    constexpr int kByte = K / 4 + K % 2 * 2;
    const NativeBits bits = (NativeBits)(K / 2 % 2 ? second : first);
    if constexpr (kByte == 3) return (NativeInts)(bits >> 24);
    else return (NativeInts)(bits >> kByte * 8 & 0xffu);
  }
};

// Signed words of two k of each column.
template <>
struct ByteQuarter<kBytes> {
  NativeShorts pairs[kQuarterPairs];

  ByteQuarter(const uint8_t* step, int lane, int quarter) {
    typedef int8_t Bytes __attribute__((vector_size(2 * kNative)));
#pragma GCC unroll 4
    for (int pair = 0; pair < kQuarterPairs; ++pair) {
      Bytes bytes;
      std::memcpy(&bytes, step + (quarter * 2 + lane / 16) * tile_bytes(kBytes) + pair * 32 + lane % 16 * 2, sizeof bytes);
      pairs[pair] = __builtin_convertvector(bytes, NativeShorts);
    }
  }

  template <int K>
  NativeInts code() const {
    const NativeInts words = (NativeInts)pairs[K / 2];
    return K % 2 ? words >> 16 : (words << 16) >> 16;
  }
};

}  // namespace betoken
