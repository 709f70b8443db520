// Products of weights of few bits by dot products of bf16 pairs (AVX512-BF16), which hold their codes exactly: a group's
// sum of codes times x is scaled and, with the group's sum of x times its offset, added to the output's, in float.
#pragma once
#include "linear_grouped_job.h"

#if defined(__AVX512BF16__)
namespace betoken {

inline int dot_block(const GroupedFormat& format) { return format.group % 32 ? 16 : 32; }

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
      else if (table) number = table[i % 16];
      uint32_t bits;
      std::memcpy(&bits, &number, sizeof bits);
      words[i] = uint16_t(bits >> 16);
    }
    for (size_t t = 0; t < sizeof tables / 64; ++t) tables[t] = _mm512_loadu_si512(words + 32 * t);
  }

  // What the four pairs of a quarter share: their words, and the bits above the fourth from the lowest on.
  struct Quarter {
    const uint8_t* at;
    __m512i words, high;
  };

  Quarter begin(const uint8_t* step, int tile, int quarter) const {
    Quarter begun{step + (quarter * 2 + tile) * tile_bytes(CODE), {}, {}};
    if constexpr (!is_byte(CODE) && CODE != kTwos) begun.words = _mm512_loadu_si512(begun.at);
    if constexpr (CODE == kTwos || CODE == kFives || CODE == kSixes) {
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

inline __m512bh pair_of(const bf16* x) {
  int32_t values;
  std::memcpy(&values, x, sizeof values);
  return (__m512bh)_mm512_set1_epi32(values);
}

inline void load_scales(const GroupedColumns& columns, int64_t k, __m512 (&scale)[2], __m512 (&offset)[2]) {
  const GroupedFormat& format = columns.at.format;
  const int64_t group = k / format.group;
  for (int tile = 0; tile < 2; ++tile) {
    scale[tile] = (__m512)(columns.scale(group, tile * 16) * format.factor());
    offset[tile] = (__m512)columns.offset(group, tile * 16);
    if (is_zeros(format.offset)) offset[tile] = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), offset[tile]), scale[tile]);
  }
}

// A block's sums, scaled, and the sum of its x times the offset: once a block, so that groups of any length add up alike.
struct BlockEnd {
  __m512 scale[2], offset[2];
  const float* x_sums;  // of row 0, or null
  int64_t num_blocks;

  [[gnu::always_inline]] __m512 add(__m512 total, __m512 sum, int tile, int64_t row) const {
    total = _mm512_fmadd_ps(scale[tile], sum, total);
    return x_sums ? _mm512_fmadd_ps(offset[tile], _mm512_set1_ps(x_sums[row * num_blocks]), total) : total;
  }
};

// At block `index` of K.
inline BlockEnd block_end(const GroupedLinear<bf16>& job, const GroupedColumns& columns, int64_t index, int block) {
  BlockEnd end;
  load_scales(columns, index * block, end.scale, end.offset);
  end.x_sums = job.x_sums ? job.x_sums + index : nullptr;
  end.num_blocks = job.at.k / block;
  return end;
}

inline void finish_tile(const GroupedLinear<bf16>& job, int64_t group, int64_t row, int tile, __m512 total) {
  const int64_t column = group * kColumns + tile * 16;
  if (column < job.out.n) job.out.finish(row, column, F16{{(Native)total}});
}

constexpr int64_t kAhead = 2048;  // bytes that codes are asked for before they are read

// Few rows: codes become weights in registers.
template <int R, int CODE, int BLOCK>
inline void grouped_few(const GroupedLinear<bf16>& job, int64_t group) {
  const GroupedColumns columns = job.columns(group);
  const DotCodes<CODE> codes(job.at.format);
  const int64_t k = job.at.k;
  __m512 totals[R][2] = {};
  for (int64_t from = 0; from < k; from += BLOCK) {
    const uint8_t* step = columns.codes(from);
    for (int64_t line = 0; line < step_bytes(CODE) * BLOCK / kStep; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(step + kAhead + line), _MM_HINT_T0);
    __m512 sums[R][2] = {};
    for (int quarter = int(from % kStep) / kQuarter, i = 0; i < BLOCK; ++quarter, i += kQuarter)
      codes.each_pair(step, quarter, [&](int pair, __m512bh left, __m512bh right) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const __m512bh x = pair_of(job.x + r * k + from + i + 2 * pair);
          sums[r][0] = _mm512_dpbf16_ps(sums[r][0], left, x);
          sums[r][1] = _mm512_dpbf16_ps(sums[r][1], right, x);
        }
      });
    const BlockEnd end = block_end(job, columns, from / BLOCK, BLOCK);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
      for (int tile = 0; tile < 2; ++tile) totals[r][tile] = end.add(totals[r][tile], sums[r][tile], tile, r);
  }
  for (int r = 0; r < R; ++r)
    for (int tile = 0; tile < 2; ++tile) finish_tile(job, group, r, tile, totals[r][tile]);
}

// The weights of some k, decoded: bf16 [pairs of k][2 tiles][32], and the ends of their blocks.
struct DotChunk {
  alignas(64) bf16 weights[kDepthChunk / 2 * 64];
  BlockEnd ends[kDepthChunk / 16];
};

template <int CODE, int BLOCK>
inline void decode_chunk(const GroupedLinear<bf16>& job, const GroupedColumns& columns, const DotCodes<CODE>& codes,
                         int64_t from, int64_t end, DotChunk& chunk) {
  bf16* weights = chunk.weights;
  for (int64_t k = from; k < end; k += kStep)
    for (int quarter = 0; quarter < 4; ++quarter, weights += kQuarterPairs * 64)
      codes.each_pair(columns.codes(k), quarter, [&](int pair, __m512bh left, __m512bh right) {
        _mm512_store_si512(weights + pair * 64, (__m512i)left);
        _mm512_store_si512(weights + pair * 64 + 32, (__m512i)right);
      });
  for (int64_t k = from; k < end; k += BLOCK) chunk.ends[(k - from) / BLOCK] = block_end(job, columns, k / BLOCK, BLOCK);
}

// The sums of `grouped_few` over a decoded chunk; totals are kept [rows][32].
template <int R, int BLOCK>
inline void grouped_chunk(const GroupedLinear<bf16>& job, const DotChunk& chunk, int64_t row, int64_t from, int64_t end,
                          float* kept) {
  const int64_t k = job.at.k;
  const bf16* weights = chunk.weights;
  const BlockEnd* block_end = chunk.ends;
  for (int64_t block = from; block < end; block += BLOCK, ++block_end) {
    __m512 sums[R][2] = {};
#pragma GCC unroll 2
    for (int64_t i = block; i < block + BLOCK; i += 2, weights += 64) {
      const __m512bh left = (__m512bh)_mm512_load_si512(weights), right = (__m512bh)_mm512_load_si512(weights + 32);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const __m512bh x = pair_of(job.x + (row + r) * k + i);
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], left, x);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], right, x);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int tile = 0; tile < 2; ++tile) {
        float* total = kept + (row + r) * kColumns + tile * 16;
        _mm512_storeu_ps(total, block_end->add(_mm512_loadu_ps(total), sums[r][tile], tile, row + r));
      }
  }
}

template <int CODE, int BLOCK>
inline void grouped_dots(const GroupedLinear<bf16>& job, int64_t group) {
  if (job.rows <= kMostDotRows)
    return by_even_rows<kMostDotRows>(
        job.rows, [&](auto num_rows, int64_t) { grouped_few<decltype(num_rows)::value, CODE, BLOCK>(job, group); });
  static thread_local DotChunk chunk;
  static thread_local std::vector<float> kept;
  kept.assign(job.rows * kColumns, 0.0f);
  const GroupedColumns columns = job.columns(group);
  const DotCodes<CODE> codes(job.at.format);
  for (int64_t from = 0; from < job.at.k; from += kDepthChunk) {
    const int64_t end = std::min<int64_t>(from + kDepthChunk, job.at.k);
    decode_chunk<CODE, BLOCK>(job, columns, codes, from, end, chunk);
    by_even_rows<kMostChunkRows>(job.rows, [&](auto num_rows, int64_t row) {
      grouped_chunk<decltype(num_rows)::value, BLOCK>(job, chunk, row, from, end, kept.data());
    });
  }
  for (int64_t row = 0; row < job.rows; ++row)
    for (int tile = 0; tile < 2; ++tile)
      finish_tile(job, group, row, tile, _mm512_loadu_ps(&kept[row * kColumns + tile * 16]));
}

// [rows, k / block], the sums of x that offsets are multiplied by.
inline void sum_blocks(const GroupedLinear<bf16>& job, float* sums) {
  const int block = dot_block(job.at.format);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (int64_t i = 0; i < job.rows * job.at.k; i += block) {
    const __m512i x = block == 32 ? _mm512_loadu_si512(job.x + i)
                                  : _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(job.x + i)));
    sums[i / block] = _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)x, ones));
  }
}

}  // namespace betoken
#endif
