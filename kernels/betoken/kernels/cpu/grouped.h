// Packed low-bit weights and their dequantisation: w = scale (code - zero) + offset, in float.
//
// Columns (outputs) go in groups of 32, N padded, in two tiles of 16; K is padded to a whole number of steps of 32, for
// which x holds zeros. In the order of memory, a group of columns is: its scales [G][32], its offsets [G][32], the units
// of both [U][32], then its codes by steps. A step is four quarters of four pairs of k, each of two tiles: for codes of
// 4, 5 and 6 bits a word for each column and parity of k, its lowest nibble belongs to the first pair; for codes of 8 bits
// [4 pairs][16 columns][2]. After the quarters follows a plane of the one or two bits of each code above the fourth:
// [bits][2 tiles][16 columns][2 parities] words, the first pair in the lowest bits. Codes of 2 bits are such a plane only,
// codes of 3 bits a plane of the low two bits and then one of the third.
#pragma once
#include <algorithm>
#include <utility>

#include "pool.h"
#include "simd.h"

namespace betoken {

// The first seven are layouts, too; codes of three and four bits may be table indices, codes of eight bits parts of 127.
enum CodeKind {
  kTwos = 2, kThrees = 3, kNibbles = 4, kFives = 5, kSixes = 6, kBytes = 8, kFloat8 = 9, kSnorm8 = 10,
  kE2m1 = 11, kNf4 = 12, kFp4 = 13, kIq4 = 14, kIq3Xxs = 15, kIq3S = 16, kIq2 = 17, kIq1 = 18
};
enum NumberKind {
  kNone = 0, kHalf = 1, kBFloat = 2, kFloat = 3, kUnsignedUnits = 4, kSignedUnits = 5, kZeros = 6, kSignedZeros = 7,
  kPowers = 8  // of two, the exponent of a float
};

constexpr float kTables[8][16] = {
    {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6},
    {-1, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f,
     0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1},
    {0, 0.0625f / 12, 8.0f / 12, 1, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f, -0.0f, -0.0625f / 12, -8.0f / 12, -1, -4.0f / 12,
     -0.5f, -2.0f / 12, -0.25f},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {1, 3, 5, 7, 9, 11, 13, 15.5f, -1, -3, -5, -7, -9, -11, -13, -15.5f},
    {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15},
    {1, 3.125f, 5.375f, 0, -1, -3.125f, -5.375f, 0},
    {-1.125f, -0.125f, 0.875f, 0, -0.875f, 0.125f, 1.125f, 0}};

constexpr int kColumns = 32, kStep = 32, kQuarter = 8, kQuarterPairs = 4;
constexpr int kUnit = 256;  // k that share a unit

struct GroupedFormat {
  int code, scale, offset, zero;
  int64_t group;

  // As `code_of` in grouped.py writes it.
  static GroupedFormat of(int64_t number) {
    return {int(number & 255), int(number >> 8 & 255), int(number >> 16 & 255), int(number >> 24 & 255), number >> 32};
  }

  int layout() const { return is_table() ? code >= kIq2 ? kThrees : kNibbles : code == kSnorm8 ? kBytes : code; }
  bool is_table() const { return code >= kE2m1; }
  const float* table() const { return is_table() ? kTables[code - kE2m1] : nullptr; }
  bool is_exact_in_bf16() const { return code != kNf4 && code != kFp4; }
  float factor() const { return code == kSnorm8 ? 1.0f / 127 : 1; }  // of every number, after its scale
};

constexpr int number_bytes(int kind) {
  return kind == kNone ? 0 : kind == kHalf || kind == kBFloat ? 2 : kind == kFloat ? 4 : 1;
}
constexpr bool is_zeros(int kind) { return kind == kZeros || kind == kSignedZeros; }
constexpr bool has_units(int kind) { return kind == kUnsignedUnits || kind == kSignedUnits; }
constexpr bool is_byte(int code) { return code == kBytes || code == kFloat8; }
constexpr int64_t tile_bytes(int code) { return is_byte(code) ? 128 : 64; }  // of a quarter
constexpr bool is_plane(int code) { return code == kTwos || code == kThrees; }
constexpr int64_t plane_at(int code) { return is_plane(code) ? 0 : 512; }
constexpr int plane_bits(int code) { return is_plane(code) ? code : code - 4; }
constexpr int64_t kThirdAt = 256;  // the third bits of kThrees
constexpr int64_t step_bytes(int code) { return is_byte(code) ? 1024 : plane_at(code) + 128 * plane_bits(code); }

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
    bytes = codes_at + k / kStep * step_bytes(format.layout());
  }
};

// Halves have no vector type everywhere: their bits as floats are 2^-112 of them, subnormal ones too.
inline Native half_to_float(const uint8_t* from) {
#if defined(BETOKEN_WIDE)
  return (Native)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__) && defined(__AVX__)
  return (Native)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
  NativeHalves half;
  std::memcpy(&half, from, sizeof half);
  const NativeBits bits = __builtin_convertvector(half, NativeBits);
  const Native size = (Native)((bits & 0x7fffu) << 13) * 0x1p112f;
  return (Native)((NativeBits)size | (bits & 0x8000u) << 16);
}

inline NativeInts load_bytes(const uint8_t* from, bool is_signed) {
#if defined(BETOKEN_WIDE)  // of the conversion below GCC makes numbers one by one
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (NativeInts)(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (NativeInts)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  typedef uint8_t Unsigned __attribute__((vector_size(kNative)));
  typedef int8_t Signed __attribute__((vector_size(kNative)));
  Unsigned bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return is_signed ? __builtin_convertvector((Signed)bytes, NativeInts) : __builtin_convertvector(bytes, NativeInts);
#endif
}

// kNative numbers of one kind, from column `lane` on.
template <int KIND>
[[gnu::always_inline]] inline Native load_numbers(const uint8_t* numbers, const uint8_t* units, int lane) {
  if constexpr (KIND == kNone) return Native{};
  if constexpr (KIND == kHalf) return half_to_float(numbers + lane * 2);
  if constexpr (KIND == kBFloat) return load_native(reinterpret_cast<const bf16*>(numbers) + lane);
  if constexpr (KIND == kFloat) return load_native(reinterpret_cast<const float*>(numbers) + lane);
  if constexpr (is_zeros(KIND)) return __builtin_convertvector(load_bytes(numbers + lane, KIND == kSignedZeros), Native);
  if constexpr (KIND == kPowers) {
    const NativeBits power = (NativeBits)load_bytes(numbers + lane, false);
    return (Native)(power << 23 | ((NativeBits)(power == 0u) & 0x00400000u));
  }
  return half_to_float(units + lane * 2) * __builtin_convertvector(load_bytes(numbers + lane, KIND == kSignedUnits), Native);
}

// operation(the kind as a constant): what is hoisted out of a loop over numbers of one kind.
template <class Operation>
[[gnu::always_inline]] inline auto with_number(int kind, Operation operation) {
  switch (kind) {
    case kHalf: return operation(std::integral_constant<int, kHalf>());
    case kBFloat: return operation(std::integral_constant<int, kBFloat>());
    case kFloat: return operation(std::integral_constant<int, kFloat>());
    case kUnsignedUnits: return operation(std::integral_constant<int, kUnsignedUnits>());
    case kSignedUnits: return operation(std::integral_constant<int, kSignedUnits>());
    case kZeros: return operation(std::integral_constant<int, kZeros>());
    case kSignedZeros: return operation(std::integral_constant<int, kSignedZeros>());
    case kPowers: return operation(std::integral_constant<int, kPowers>());
    default: return operation(std::integral_constant<int, kNone>());
  }
}

// Offsets of a column group's scales, offsets and codes.
struct GroupedColumns {
  const GroupedLayout& at;
  const uint8_t* base;

  // KIND: the format's.
  template <int KIND>
  Native scale(int64_t group, int lane) const {
    return load_numbers<KIND>(base + group * kColumns * number_bytes(KIND), units(at.scale_units_at, group), lane);
  }
  // What is added for x of 1, or the zeros.
  template <int KIND>
  Native offset(int64_t group, int lane) const {
    return load_numbers<KIND>(base + at.offsets_at + group * kColumns * number_bytes(KIND),
                              units(at.offset_units_at, group), lane);
  }
  Native scale(int64_t group, int lane) const {
    return with_number(at.format.scale, [&](auto kind) { return scale<decltype(kind)::value>(group, lane); });
  }
  Native offset(int64_t group, int lane) const {
    return with_number(at.format.offset, [&](auto kind) { return offset<decltype(kind)::value>(group, lane); });
  }
  const uint8_t* units(int64_t from, int64_t group) const {
    return base + from + group * at.format.group / kUnit * kColumns * 2;
  }
  const uint8_t* codes(int64_t k) const { return base + at.codes_at + k / kStep * step_bytes(at.format.layout()); }
};

inline float float8_to_float(uint8_t code) {  // E4M3: no infinities; NaN is refused at load
  const uint32_t bits = uint32_t(code & 0x7f) << 20 | uint32_t(code & 0x80) << 24;
  float small;
  std::memcpy(&small, &bits, sizeof small);
  return small * 0x1p120f;
}

// The bits of k (of 32) in a plane of BITS for each code.
template <int BITS>
inline NativeBits load_plane(const uint8_t* plane, int lane, int k) {
  constexpr int kPairs = 16 / BITS;  // of a word
  NativeBits words;
  std::memcpy(&words, plane + (k / 2 / kPairs * 2 + lane / 16) * 64 + lane % 16 * 4, sizeof words);
  return words >> (k % 2 * 16 + k / 2 % kPairs * BITS) & ((1u << BITS) - 1);
}

inline Native look_up(const float* table, NativeBits codes) {
#if defined(BETOKEN_WIDE)
  return (Native)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table));
#else
  Native found;
  for (int i = 0; i < kNative; ++i) found[i] = table[codes[i]];
  return found;
#endif
}

// Codes at k (of 32) of a step, for kNative columns from `lane` on, as floats, zero not subtracted; LAYOUT is of the
// codes, `table` maps codes of three or four bits to numbers, if given.
template <int LAYOUT>
inline Native load_codes(const uint8_t* step, int lane, int k, const float* table) {
  const int tile = lane / 16, quarter = k / kQuarter, pair = k % kQuarter / 2, odd = k % 2;
  if constexpr (LAYOUT == kTwos) {
    return __builtin_convertvector((NativeInts)load_plane<2>(step, lane, k), Native);
  } else if constexpr (LAYOUT == kThrees) {
    const NativeBits code = load_plane<2>(step, lane, k) | load_plane<1>(step + kThirdAt, lane, k) << 2;
    return table ? look_up(table, code) : __builtin_convertvector((NativeInts)code, Native);
  } else if constexpr (is_byte(LAYOUT)) {
    NativeHalves words;
    std::memcpy(&words, step + (quarter * 2 + tile) * tile_bytes(LAYOUT) + pair * 32 + lane % 16 * 2, sizeof words);
    const NativeBits bits = __builtin_convertvector(words, NativeBits) >> (odd * 8) & 0xffu;
    if constexpr (LAYOUT == kBytes) return __builtin_convertvector(((NativeInts)bits << 24) >> 24, Native);
    const NativeBits small = (bits & 0x7fu) << 20 | (bits & 0x80u) << 24;
    return (Native)small * 0x1p120f;
  } else {
    NativeBits words;
    std::memcpy(&words, step + (quarter * 2 + tile) * tile_bytes(LAYOUT) + lane % 16 * 4, sizeof words);
    NativeBits code = words >> (odd * 16 + pair * 4) & 0xfu;
    if constexpr (LAYOUT != kNibbles) code |= load_plane<LAYOUT - 4>(step + plane_at(LAYOUT), lane, k) << 4;
    if constexpr (LAYOUT == kNibbles)
      if (table) return look_up(table, code);
    return __builtin_convertvector((NativeInts)code, Native);
  }
}

// The numbers of 32 columns at [from, from + 32) of K: out [32][32] by k.
template <int LAYOUT>
inline void decode_floats(const GroupedColumns& columns, int64_t from, float* out) {
  const GroupedFormat& format = columns.at.format;
  const Native zero = Native{} + float(format.zero);
  const float* table = format.table();
  const float factor = format.factor();
  const uint8_t* step = columns.codes(from);
  for (int64_t k = from; k < from + kStep; k += 16) {  // a group is a whole number of these
    for (int lane = 0; lane < kColumns; lane += kNative) {
      const Native scale = columns.scale(k / format.group, lane), offset = columns.offset(k / format.group, lane);
      const Native zeros = is_zeros(format.offset) ? zero + offset : zero;
      const Native added = is_zeros(format.offset) ? Native{} : offset;
#pragma GCC unroll 4
      for (int64_t i = k - from; i < k - from + 16; ++i)
        store_native(out + i * kColumns + lane,
                     ((load_codes<LAYOUT>(step, lane, int(i), table) - zeros) * scale + added) * factor);
    }
  }
}

template <class Operation>
inline void with_layout(int layout, Operation operation) {
  switch (layout) {
    case kTwos: return operation(std::integral_constant<int, kTwos>());
    case kThrees: return operation(std::integral_constant<int, kThrees>());
    case kNibbles: return operation(std::integral_constant<int, kNibbles>());
    case kFives: return operation(std::integral_constant<int, kFives>());
    case kSixes: return operation(std::integral_constant<int, kSixes>());
    case kBytes: return operation(std::integral_constant<int, kBytes>());
    default: return operation(std::integral_constant<int, kFloat8>());
  }
}

}  // namespace betoken
