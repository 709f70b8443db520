// y = x W^T + b for weights of few bits and rows that are rounded to int8: a block's sum of codes times codes is an exact
// integer, scaled and added to its output in float, blocks in order. No sum is fused with a product (see
// INT8_LIBRARY), so that every processor gives the same bits.
#pragma once
#include "int8_codes.h"

namespace betoken {

// Whether these kernels take a format's codes: integers.
inline bool takes_int8(const GroupedFormat& format) { return format.code <= kBytes || format.code == kSnorm8; }

// The sums of a group's columns over K, [rows][32].
template <int LAYOUT, int BLOCK>
inline void int8_group(const GroupedColumns& columns, Int8Rows& x, float* totals) {
  constexpr int kParts = kStep / BLOCK;
  constexpr int kVectors = kNative == 16 ? 2 : 1;  // of columns, whose codes registers hold
  const int64_t rows = x.rows;
  const bool has_offsets = columns.at.format.offset != kNone;
  DotAhead ahead(columns, x.k / kStep, 4096);
  DotEnds ends;
  for (int64_t from = 0; from < x.k; from += kStep) {
    if (from % kDepthChunk == 0) decode_ends<BLOCK>(columns, from, std::min<int64_t>(from + kDepthChunk, x.k), ends);
    ahead.ask();
    const int64_t block = from / kStep;
    const auto* codes_of_x = x.codes<LAYOUT>(block, 0);
    const float* scales_of_x = &x.scales[block * rows];
    const int32_t* zeros = &x.zeros[block * kParts * rows];
    const float* sums = &x.sums[block * kParts * rows];
    for (int lane = 0; lane < kColumns; lane += kNative * kVectors) {
      ByteCodes<LAYOUT> codes[kVectors];
      Native scales[kVectors][kParts], offsets[kVectors][kParts] = {};
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        codes[v] = ByteCodes<LAYOUT>(columns.codes(from), lane + v * kNative);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          const int64_t end = from % kDepthChunk / BLOCK + part;
          scales[v][part] = load_native(ends.scales[end] + lane + v * kNative);
          if (has_offsets) offsets[v][part] = load_native(ends.offsets[end] + lane + v * kNative);
        }
      }
      for (int64_t row = 0; row < rows; ++row) {
        float* kept = totals + row * kColumns + lane;
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          Native total = load_native(kept + v * kNative);
#pragma GCC unroll 2
          for (int part = 0; part < kParts; ++part) {
            const NativeInts dot =
                codes[v].template dot<BLOCK>(part, codes_of_x + row * kStep) - zeros[part * rows + row];
            total += __builtin_convertvector(dot, Native) * (scales[v][part] * scales_of_x[row]);
            if (has_offsets) total += offsets[v][part] * sums[part * rows + row];
          }
          store_native(kept + v * kNative, total);
        }
      }
    }
  }
}

// The kernels of one layout.
struct Int8Kernels {
  int block;
  void (*round)(const float* x, int64_t row, int zero, Int8Rows& to);
  void (*multiply)(const GroupedColumns& columns, Int8Rows& x, float* totals);

  static Int8Kernels of(const GroupedFormat& format) {
    Int8Kernels found{};
    with_layout(format.layout(), [&](auto layout) {
      constexpr int kLayout = decltype(layout)::value;
      if constexpr (kLayout != kFloat8)
        found = dot_block(format) == 32 ? Int8Kernels{32, round_row<kLayout, 32>, int8_group<kLayout, 32>}
                                        : Int8Kernels{16, round_row<kLayout, 16>, int8_group<kLayout, 16>};
    });
    return found;
  }
};

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
  const Int8Kernels kernels = Int8Kernels::of(format);
  x.resize(format.layout(), job.rows, job.at.k, kernels.block);
  over_rows(job.rows, job.at.k, [&](int row) {
    static thread_local std::vector<float> floats;
    floats.resize(job.at.k);
    for (int64_t i = 0; i < job.at.k; i += kLanes) store16(&floats[i], load16(job.x + row * job.at.k + i));
    kernels.round(floats.data(), row, format.zero, x);
  });
  over_groups(job, [&](int group) {
    static thread_local std::vector<float> totals;
    totals.assign(job.rows * kColumns, 0.0f);
    kernels.multiply(job.columns(group), x, totals.data());
    job.finish_group(group, totals.data());
  });
}

}  // namespace betoken
