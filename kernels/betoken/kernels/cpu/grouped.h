// Weights of few bits as they lie packed, and how their numbers come out: w = scale (code - zero) + offset, in float.
//
// Columns (outputs) go in groups of 32, N padded, in two tiles of 16; K is padded to a whole number of steps of 32, for
// which x holds zeros. In the order of memory, a group of columns is: its scales [G][32], its offsets [G][32], the units
// of both [U][32], then its codes by steps. A step is four quarters of four pairs of k, each of two tiles: for codes of
// 4, 5 and 6 bits a word for each column and parity of k, its lowest nibble that of the first pair; for codes of 8 bits
// [4 pairs][16 columns][2]. Behind the quarters lie, a bit or two for each code, the bits above the fourth:
// [CODE - 4][2 tiles][16 columns][2 parities] words, the first pair in the lowest bits.
#pragma once
#include <algorithm>
#include <utility>

#include "pool.h"
#include "simd.h"

namespace betoken {

enum CodeKind { kNibbles = 4, kFives = 5, kSixes = 6, kBytes = 8, kFloat8 = 9 };
enum NumberKind {
  kNone = 0, kHalf = 1, kBFloat = 2, kFloat = 3, kUnsignedUnits = 4, kSignedUnits = 5, kZeros = 6, kSignedZeros = 7
};

constexpr int kColumns = 32, kStep = 32, kQuarter = 8, kQuarterPairs = 4;
constexpr int kUnit = 256;  // k that share a unit

struct GroupedFormat {
  int code, scale, offset, zero;
  int64_t group;

  // As `code_of` in grouped.py writes it.
  static GroupedFormat of(int64_t number) {
    return {int(number & 255), int(number >> 8 & 255), int(number >> 16 & 255), int(number >> 24 & 255), number >> 32};
  }
};

inline int number_bytes(int kind) {
  return kind == kNone ? 0 : kind == kHalf || kind == kBFloat ? 2 : kind == kFloat ? 4 : 1;
}
inline bool is_zeros(int kind) { return kind == kZeros || kind == kSignedZeros; }
inline bool has_units(int kind) { return kind == kUnsignedUnits || kind == kSignedUnits; }
constexpr bool is_byte(int code) { return code == kBytes || code == kFloat8; }
constexpr int64_t tile_bytes(int code) { return is_byte(code) ? 128 : 64; }  // of a quarter
constexpr int64_t step_bytes(int code) { return is_byte(code) ? 1024 : 512 + 128 * (code - 4); }

struct GroupedLayout {
  GroupedFormat format;
  int64_t k, num_groups, num_units, offsets_at, scale_units_at, offset_units_at, codes_at, bytes;

  GroupedLayout(GroupedFormat given, int64_t padded_k) : format(given), k(padded_k) {
    num_groups = (k + format.group - 1) / format.group;
    num_units = (k + kUnit - 1) / kUnit;
    offsets_at = num_groups * kColumns * number_bytes(format.scale);
    scale_units_at = offsets_at + num_groups * kColumns * number_bytes(format.offset);
    offset_units_at = scale_units_at + (has_units(format.scale) ? num_units * kColumns * 2 : 0);
    codes_at = offset_units_at + (has_units(format.offset) ? num_units * kColumns * 2 : 0);
    bytes = codes_at + k / kStep * step_bytes(format.code);
  }
};

// Halves have no vector type everywhere: their bits as floats are 2^-112 of them, subnormal ones too.
inline Native half_to_float(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Native)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#endif
  NativeHalves half;
  std::memcpy(&half, from, sizeof half);
  const NativeBits bits = __builtin_convertvector(half, NativeBits);
  const Native size = (Native)((bits & 0x7fffu) << 13) * 0x1p112f;
  return (Native)((NativeBits)size | (bits & 0x8000u) << 16);
}

inline NativeInts load_bytes(const uint8_t* from, bool is_signed) {
  typedef uint8_t Unsigned __attribute__((vector_size(kNative)));
  typedef int8_t Signed __attribute__((vector_size(kNative)));
  Unsigned bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return is_signed ? __builtin_convertvector((Signed)bytes, NativeInts) : __builtin_convertvector(bytes, NativeInts);
}

// kNative numbers of one kind, those of columns `lane` and on.
inline Native load_numbers(int kind, const uint8_t* numbers, const uint8_t* units, int lane) {
  switch (kind) {
    case kHalf: return half_to_float(numbers + lane * 2);
    case kBFloat: return load_native(reinterpret_cast<const bf16*>(numbers) + lane);
    case kFloat: return load_native(reinterpret_cast<const float*>(numbers) + lane);
    case kNone: return Native{};
    case kZeros: return __builtin_convertvector(load_bytes(numbers + lane, false), Native);
    case kSignedZeros: return __builtin_convertvector(load_bytes(numbers + lane, true), Native);
  }
  return half_to_float(units + lane * 2) *
         __builtin_convertvector(load_bytes(numbers + lane, kind == kSignedUnits), Native);
}

// Where a group of columns keeps its scales, offsets and codes.
struct GroupedColumns {
  const GroupedLayout& at;
  const uint8_t* base;

  Native scale(int64_t group, int lane) const {
    return load_numbers(at.format.scale, base + group * kColumns * number_bytes(at.format.scale),
                        base + at.scale_units_at + group * at.format.group / kUnit * kColumns * 2, lane);
  }
  // What is added for x of 1, or the zeros.
  Native offset(int64_t group, int lane) const {
    return load_numbers(at.format.offset, base + at.offsets_at + group * kColumns * number_bytes(at.format.offset),
                        base + at.offset_units_at + group * at.format.group / kUnit * kColumns * 2, lane);
  }
  const uint8_t* codes(int64_t k) const { return base + at.codes_at + k / kStep * step_bytes(at.format.code); }
};

inline float float8_to_float(uint8_t code) {  // E4M3: no infinities; NaN is refused at load
  const uint32_t bits = uint32_t(code & 0x7f) << 20 | uint32_t(code & 0x80) << 24;
  float small;
  std::memcpy(&small, &bits, sizeof small);
  return small * 0x1p120f;
}

// Codes at k (of 32) of a step, those of kNative columns from `lane` on, as floats, zero not subtracted.
template <int CODE>
inline Native load_codes(const uint8_t* step, int lane, int k) {
  const int tile = lane / 16, quarter = k / kQuarter, pair = k % kQuarter / 2, odd = k % 2;
  const uint8_t* words_at = step + (quarter * 2 + tile) * tile_bytes(CODE);
  if constexpr (is_byte(CODE)) {
    NativeHalves words;
    std::memcpy(&words, words_at + pair * 32 + lane % 16 * 2, sizeof words);
    const NativeBits bits = __builtin_convertvector(words, NativeBits) >> (odd * 8) & 0xffu;
    if constexpr (CODE == kBytes) return __builtin_convertvector(((NativeInts)bits << 24) >> 24, Native);
    const NativeBits small = (bits & 0x7fu) << 20 | (bits & 0x80u) << 24;
    return (Native)small * 0x1p120f;
  } else {
    NativeBits words;
    std::memcpy(&words, words_at + lane % 16 * 4, sizeof words);
    NativeBits code = words >> (odd * 16 + pair * 4) & 0xfu;
    if constexpr (CODE != kNibbles) {
      constexpr int kBits = CODE - 4, kPairs = 16 / kBits;  // of a word
      const int place = k / 2 / kPairs;
      std::memcpy(&words, step + 512 + (place * 2 + tile) * 64 + lane % 16 * 4, sizeof words);
      code |= (words >> (odd * 16 + k / 2 % kPairs * kBits) & ((1u << kBits) - 1)) << 4;
    }
    return __builtin_convertvector((NativeInts)code, Native);
  }
}

// The numbers of 32 columns at [from, from + 32) of K: out [32][32] by k.
template <int CODE>
inline void decode_floats(const GroupedColumns& columns, int64_t from, float* out) {
  const GroupedFormat& format = columns.at.format;
  const Native zero = Native{} + float(format.zero);
  const uint8_t* step = columns.codes(from);
  for (int64_t k = from; k < from + kStep; k += 16) {  // a group is a whole number of these
    for (int lane = 0; lane < kColumns; lane += kNative) {
      const Native scale = columns.scale(k / format.group, lane), offset = columns.offset(k / format.group, lane);
      const Native zeros = is_zeros(format.offset) ? zero + offset : zero;
      const Native added = is_zeros(format.offset) ? Native{} : offset;
#pragma GCC unroll 4
      for (int64_t i = k - from; i < k - from + 16; ++i)
        store_native(out + i * kColumns + lane, (load_codes<CODE>(step, lane, int(i)) - zeros) * scale + added);
    }
  }
}

template <class Operation>
inline void with_code(int code, Operation operation) {
  switch (code) {
    case kNibbles: return operation(std::integral_constant<int, kNibbles>());
    case kFives: return operation(std::integral_constant<int, kFives>());
    case kSixes: return operation(std::integral_constant<int, kSixes>());
    case kBytes: return operation(std::integral_constant<int, kBytes>());
    default: return operation(std::integral_constant<int, kFloat8>());
  }
}

// What a format's own tensors hold of [N, K], and where they are to go.
struct GroupedSource {
  const uint8_t *values, *high, *scales, *scale_units, *offsets, *offset_units;
  int64_t n, k, num_groups, num_units;  // as they are, not padded

  int code(int code_kind, int64_t column, int64_t i) const {
    if (code_kind == kBytes || code_kind == kFloat8) return values[column * k + i];
    int code = values[column * ((k + 1) / 2) + i / 2] >> (i % 2 * 4) & 15;
    if (code_kind == kFives) code |= (high[column * ((k + 7) / 8) + i / 8] >> (i % 8) & 1) << 4;
    if (code_kind == kSixes) code |= (high[column * ((k + 3) / 4) + i / 4] >> (i % 4 * 2) & 3) << 4;
    return code;
  }
};

// k: of the step.
inline void put_code(int code_kind, uint8_t* step, int column, int k, int code) {
  const int tile = column / 16, word = column % 16 * 2 + k % 2, pair = k % kQuarter / 2;
  uint8_t* words = step + (k / kQuarter * 2 + tile) * tile_bytes(code_kind);
  if (is_byte(code_kind)) {
    words[pair * 32 + word] = uint8_t(code);
    return;
  }
  words[word * 2 + pair / 2] |= uint8_t((code & 15) << (pair % 2 * 4));
  if (code_kind == kNibbles) return;
  const int bits = code_kind - 4, pairs = 16 / bits, shift = k / 2 % pairs * bits;
  step[512 + (k / 2 / pairs * 2 + tile) * 64 + word * 2 + shift / 8] |= uint8_t((code >> 4) << (shift % 8));
}

// Columns of a group beside each other, from one row a column.
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
  for (int64_t column = 0; column < kColumns && first + column < source.n; ++column)
    for (int64_t i = 0; i < source.k; ++i)
      put_code(format.code, base + at.codes_at + i / kStep * step_bytes(format.code), int(column), int(i % kStep),
               source.code(format.code, first + column, i));
}

}  // namespace betoken
