// y = x W^T + b for weights of few bits and rows that are rounded to int8: a block's sum of codes times codes is an exact
// integer, scaled and added to its output in float, blocks in order. No sum is fused with a product (see
// INT8_LIBRARY), so that every processor gives the same bits.
#pragma once
#include "grouped_choice.h"
#include "int8_codes.h"
#include "int8_tiles.h"

namespace betoken {

// Whether these kernels take a format's codes: integers.
inline bool takes_int8(const GroupedFormat& format) { return format.code <= kBytes || format.code == kSnorm8; }

// The sums of a group's columns over K, [rows][32]; TILES: integer sums by tile registers.
template <int LAYOUT, int BLOCK, bool TILES>
inline void int8_group(const GroupedColumns& columns, Int8Rows& x, float* totals) {
  constexpr int kParts = kStep / BLOCK;
  constexpr int kVectors = kNative == 16 ? 2 : 1;  // of columns, whose codes registers hold
  const int64_t rows = x.rows, rows_at_once = TILES ? kByteTileRows : rows;
  const bool has_offsets = columns.at.format.offset != kNone;
  [[maybe_unused]] std::conditional_t<TILES, ByteTiles<LAYOUT, BLOCK>, char> tiles{};
  DotAhead ahead(columns, x.k / kStep, 4096);
  DotEnds ends;
  for (int64_t from = 0; from < x.k; from += kStep) {
    if (from % kDepthChunk == 0) {
      const int64_t end = std::min<int64_t>(from + kDepthChunk, x.k);
      decode_ends<BLOCK>(columns, from, end, ends);
      if constexpr (TILES) tiles.decode(columns, from, end);
    }
    ahead.ask();
    const int64_t block = from / kStep;
    const auto* codes_of_x = x.codes<LAYOUT>(block, 0);
    const float* scales_of_x = &x.scales[block * rows];
    const int32_t* starts = &x.starts[block * kParts * rows];
    const float* sums = &x.sums[block * kParts * rows];
    for (int64_t first = 0; first < rows; first += rows_at_once) {
      if constexpr (TILES) tiles.multiply(int(from % kDepthChunk / kStep), codes_of_x + first * kStep);
      for (int lane = 0; lane < kColumns; lane += kNative * kVectors) {
        [[maybe_unused]] ByteCodes<LAYOUT> codes[kVectors];
        Native scales[kVectors][kParts], offsets[kVectors][kParts] = {};
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          if constexpr (!TILES) codes[v] = ByteCodes<LAYOUT>(columns.codes(from), lane + v * kNative);
#pragma GCC unroll 2
          for (int part = 0; part < kParts; ++part) {
            const int64_t end = from % kDepthChunk / BLOCK + part;
            scales[v][part] = load_native(ends.scales[end] + lane + v * kNative);
            if (has_offsets) offsets[v][part] = load_native(ends.offsets[end] + lane + v * kNative);
          }
        }
        for (int64_t row = first; row < std::min(first + rows_at_once, rows); ++row) {
          float* kept = totals + row * kColumns + lane;
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            Native total = load_native(kept + v * kNative);
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
              NativeInts dot = NativeInts{} + starts[part * rows + row];
              if constexpr (TILES) dot += tiles.sum(part, row - first, lane + v * kNative);
              else dot = codes[v].template dot<BLOCK>(part, codes_of_x + row * kStep, dot);
              total += __builtin_convertvector(dot, Native) * (scales[v][part] * scales_of_x[row]);
              if (has_offsets) total += offsets[v][part] * sums[part * rows + row];
            }
            store_native(kept + v * kNative, total);
          }
        }
      }
    }
  }
}

typedef void (*Int8Multiply)(const GroupedColumns& columns, Int8Rows& x, float* totals);

template <bool TILES>
Int8Multiply int8_multiply(const GroupedFormat& format) {
  Int8Multiply found = nullptr;
  with_layout(format.layout(), [&](auto layout) {
    constexpr int kLayout = decltype(layout)::value;
    if constexpr (kLayout != kFloat8)
      found = dot_block(format) == 32 ? int8_group<kLayout, 32, TILES> : int8_group<kLayout, 16, TILES>;
  });
  return found;
}

// Kernels that give the same bits, of which `Choices` holds indices.
struct Int8Candidate {
  const char* name;
  Int8Multiply (*multiply_of)(const GroupedFormat& format);
};

// Candidates of one process, the reference first. One may be added while products run: the list never moves.
struct Int8Candidates {
  Int8Candidate all[16];
  int num = 0;

  void add(Int8Candidate candidate) {
    if (num < int(std::size(all))) all[num++] = candidate;
  }
  // Add what this compilation has and the processor executes.
  void add_own() {
    add({kNative == 16 ? "512-bit vectors" : kNative == 8 ? "256-bit vectors" : "128-bit vectors", int8_multiply<false>});
#if defined(BETOKEN_BYTE_TILES)
    if (tiles_granted()) add({"tiles", int8_multiply<true>});
#endif
  }
};

inline Int8Candidates& int8_candidates() {
  static Int8Candidates candidates = [] {
    Int8Candidates made;
    made.add_own();
    return made;
  }();
  return candidates;
}

inline Choices& int8_choices() {
  static Choices choices;
  return choices;
}

// body(i) of [0, num), on the pool if that is worth it.
template <class Body>
inline void over_rows(int64_t num, int64_t k, Body body) {
  if (num * k < 1 << 15)
    for (int row = 0; row < num; ++row) body(row);
  else
    parallel(int(num), body);
}

template <class T>
void linear_int8(const GroupedLinear<T>& job) {
  static thread_local Int8Rows kept;
  Int8Rows& x = kept;  // of this thread, for all of the pool
  const GroupedFormat& format = job.at.format;
  const Int8Multiply multiply = int8_candidates().all[int8_choices().of(format, job.rows)].multiply_of(format);
  x.resize(format.layout(), job.rows, job.at.k, dot_block(format));
  over_rows(job.rows, job.at.k, [&](int row) {
    static thread_local std::vector<float> floats;
    floats.resize(job.at.k);
    for (int64_t i = 0; i < job.at.k; i += kLanes) store16(&floats[i], load16(job.x + row * job.at.k + i));
    round_row(format, floats.data(), row, x);
  });
  over_groups(job, [&](int group) {
    static thread_local std::vector<float> totals;
    totals.assign(job.rows * kColumns, 0.0f);
    multiply(job.columns(group), x, totals.data());
    job.finish_group(group, totals.data());
  });
}

}  // namespace betoken
