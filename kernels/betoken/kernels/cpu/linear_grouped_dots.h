// Products of weights of few bits by dot products of bf16 pairs (AVX512-BF16), which hold their codes exactly: a block's
// sum of codes times x is scaled and, with the block's sum of x times its offset, added to the output's, in float.
#pragma once
#include "grouped_ends.h"
#include "linear_grouped_codes.h"

#if defined(__AVX512BF16__)
namespace betoken {

inline __m512bh pair_of(const bf16* x) {
  int32_t values;
  std::memcpy(&values, x, sizeof values);
  return (__m512bh)_mm512_set1_epi32(values);
}

// A block's sums, scaled, and the sum of its x times the offset: once a block, so that groups of any length add up alike.
[[gnu::always_inline]] inline __m512 end_block(const DotEnds& ends, int block, int tile, __m512 sum, const float* x_sum,
                                               __m512 total) {
  total = _mm512_fmadd_ps(_mm512_load_ps(ends.scales[block] + tile * 16), sum, total);
  return x_sum ? _mm512_fmadd_ps(_mm512_load_ps(ends.offsets[block] + tile * 16), _mm512_set1_ps(*x_sum), total) : total;
}

inline void finish_tile(const GroupedLinear<bf16>& job, int64_t group, int64_t row, int tile, __m512 total) {
  const int64_t column = group * kColumns + tile * 16;
  if (column < job.out.n) job.out.finish(row, column, F16{{(Native)total}});
}

// Rows [row, row + R), over BLOCKS blocks from block `first` of a chunk on, `from` of K: side by side, as their sums do
// not meet.
template <int R, int CODE, int BLOCK, int BLOCKS>
[[gnu::always_inline]] inline void few_blocks(const GroupedLinear<bf16>& job, int64_t row, const DotCodes<CODE>& codes,
                                              const uint8_t* step, const DotEnds& ends, int first, int64_t from,
                                              __m512 (&totals)[R][2]) {
  constexpr int kQuarters = BLOCK / kQuarter;
  const int64_t k = job.at.k;
  const bf16* x = job.x + row * k + from;
  const int begun = BLOCK % kStep && BLOCKS == 1 ? int(from % kStep) / kQuarter : 0;
  __m512 sums[BLOCKS][R][2] = {};
#pragma GCC unroll 4
  for (int part = 0; part < kQuarters; ++part)
#pragma GCC unroll 4
    for (int b = 0; b < BLOCKS; ++b) {
      const int i = b * BLOCK + part * kQuarter;
      codes.each_pair(step + i / kStep * step_bytes(CODE), begun + i % kStep / kQuarter,
                      [&](int pair, __m512bh left, __m512bh right) {
#pragma GCC unroll 6
                        for (int r = 0; r < R; ++r) {
                          const __m512bh values = pair_of(x + r * k + i + 2 * pair);
                          sums[b][r][0] = _mm512_dpbf16_ps(sums[b][r][0], left, values);
                          sums[b][r][1] = _mm512_dpbf16_ps(sums[b][r][1], right, values);
                        }
                      });
    }
#pragma GCC unroll 4
  for (int b = 0; b < BLOCKS; ++b) {
    const float* x_sums = job.x_sums ? job.x_sums + (from / BLOCK + b) * job.rows + row : nullptr;
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int tile = 0; tile < 2; ++tile)
        totals[r][tile] = end_block(ends, first + b, tile, sums[b][r][tile], x_sums ? x_sums + r : nullptr, totals[r][tile]);
  }
}

// Few rows: codes become weights in registers.
template <int R, int CODE, int BLOCK>
inline void grouped_few(const GroupedLinear<bf16>& job, int64_t group, int64_t row) {
  constexpr int kBlocks = R == 1 ? 4 : R <= 3 ? 2 : 1;  // as many sums as hide how long a dot product takes
  const GroupedColumns columns = job.columns(group);
  const DotCodes<CODE> codes(job.at.format);
  DotAhead ahead(columns, job.at.k / BLOCK, 4096);
  DotEnds ends;
  __m512 totals[R][2] = {};
  for (int64_t from = 0; from < job.at.k; from += kDepthChunk) {
    const int64_t end = std::min<int64_t>(from + kDepthChunk, job.at.k);
    decode_ends<BLOCK>(columns, from, end, ends);
    const uint8_t* steps = columns.codes(from);
    const int num_blocks = int((end - from) / BLOCK);
    int i = 0;
    auto add = [&](auto blocks) {
      for (int b = 0; b < blocks; ++b) ahead.ask();
      few_blocks<R, CODE, BLOCK, decltype(blocks)::value>(job, row, codes, steps + i * BLOCK / kStep * step_bytes(CODE),
                                                          ends, i, from + i * BLOCK, totals);
      i += blocks;
    };
    while (i + kBlocks <= num_blocks) add(std::integral_constant<int, kBlocks>());
    while (i < num_blocks) add(std::integral_constant<int, 1>());
  }
  for (int r = 0; r < R; ++r)
    for (int tile = 0; tile < 2; ++tile) finish_tile(job, group, row + r, tile, totals[r][tile]);
}

// The weights of some k, decoded: bf16 [pairs of k][2 tiles][32], and the ends of their blocks.
struct DotChunk {
  alignas(64) bf16 weights[kDepthChunk / 2 * 64];
  DotEnds ends;
};

template <int CODE, int BLOCK>
inline void decode_chunk(const GroupedColumns& columns, const DotCodes<CODE>& codes, int64_t from, int64_t end,
                         DotChunk& chunk) {
  decode_ends<BLOCK>(columns, from, end, chunk.ends);
  bf16* weights = chunk.weights;
  const uint8_t* step = columns.codes(from);
  for (int64_t k = from; k < end; k += kStep, step += step_bytes(CODE))
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; ++quarter, weights += kQuarterPairs * 64)
      codes.each_pair(step, quarter, [&](int pair, __m512bh left, __m512bh right) {
        _mm512_store_si512(weights + pair * 64, (__m512i)left);
        _mm512_store_si512(weights + pair * 64 + 32, (__m512i)right);
      });
}

// The sums of `grouped_few` over a decoded chunk; totals are kept [rows][32].
template <int R, int BLOCK>
inline void grouped_chunk(const GroupedLinear<bf16>& job, const DotChunk& chunk, int64_t row, int64_t from, int64_t end,
                          DotAhead& ahead, float* kept) {
  const int64_t k = job.at.k;
  const bf16* weights = chunk.weights;
  const bf16* x = job.x + row * k + from;
  float* totals = kept + row * kColumns;
  const float* x_sums = job.x_sums ? job.x_sums + from / BLOCK * job.rows + row : nullptr;
  for (int block = 0; block < (end - from) / BLOCK; ++block) {
    if (row == 0) ahead.ask();
    __m512 sums[R][2] = {};
#pragma GCC unroll 2
    for (int i = 0; i < BLOCK; i += 2, weights += 64, x += 2) {
      const __m512bh left = (__m512bh)_mm512_load_si512(weights), right = (__m512bh)_mm512_load_si512(weights + 32);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512bh values = pair_of(x + r * k);
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], left, values);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], right, values);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int tile = 0; tile < 2; ++tile) {
        float* total = totals + r * kColumns + tile * 16;
        _mm512_storeu_ps(total, end_block(chunk.ends, block, tile, sums[r][tile], x_sums ? x_sums + r : nullptr,
                                          _mm512_loadu_ps(total)));
      }
    if (x_sums) x_sums += job.rows;
  }
}

template <int CODE, int BLOCK>
inline void grouped_dots(const GroupedLinear<bf16>& job, int64_t group) {
  if (job.rows <= kMostDotRows)
    return by_even_rows<kMostDotRows>(job.rows, job.rows_a_pass, [&](auto num_rows, int64_t row) {
      grouped_few<decltype(num_rows)::value, CODE, BLOCK>(job, group, row);
    });
  static thread_local DotChunk chunk;
  static thread_local std::vector<float> kept;
  kept.assign(job.rows * kColumns, 0.0f);
  const GroupedColumns columns = job.columns(group);
  const DotCodes<CODE> codes(job.at.format);
  DotAhead ahead(columns, job.at.k / BLOCK, kDepthChunk / kStep * step_bytes(CODE));
  for (int64_t from = 0; from < job.at.k; from += kDepthChunk) {
    const int64_t end = std::min<int64_t>(from + kDepthChunk, job.at.k);
    decode_chunk<CODE, BLOCK>(columns, codes, from, end, chunk);
    by_even_rows<kMostChunkRows>(job.rows, job.rows_a_pass, [&](auto num_rows, int64_t row) {
      grouped_chunk<decltype(num_rows)::value, BLOCK>(job, chunk, row, from, end, ahead, kept.data());
    });
  }
  for (int64_t row = 0; row < job.rows; ++row)
    for (int tile = 0; tile < 2; ++tile)
      finish_tile(job, group, row, tile, _mm512_loadu_ps(&kept[row * kColumns + tile * 16]));
}

// [k / block][rows], the sums of x that offsets are multiplied by.
inline void sum_blocks(const GroupedLinear<bf16>& job, float* sums) {
  const int block = dot_block(job.at.format);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  const bf16* from = job.x;
  for (int64_t row = 0; row < job.rows; ++row)
    for (int64_t i = 0; i < job.at.k / block; ++i, from += block) {
      const __m512i x = block == 32 ? _mm512_loadu_si512(from)
                                    : _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      sums[i * job.rows + row] = _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)x, ones));
    }
}

}  // namespace betoken
#endif
