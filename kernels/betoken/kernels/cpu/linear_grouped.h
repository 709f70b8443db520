// y = x W^T + b for weights of few bits: every row with the same bits whatever the others are. A tile of weights is
// decoded once for all rows. Where bf16 is not multiplied in pairs, weights become the floats that they stand for, and
// every output is one sum over K in order.
#pragma once
#include "linear_grouped_dots.h"
#include "linear_grouped_job.h"

namespace betoken {

// Rows [row, row + R), over 32 k from `from` on: weights [32][32 columns], kept sums [rows][32].
template <int R, class T>
inline void grouped_vectors(const GroupedLinear<T>& job, const float* weights, int64_t row, int64_t from, float* kept) {
  constexpr int kVectors = kColumns / kNative;
  Native sums[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load_native(kept + (row + r) * kColumns + v * kNative);
  const float* x = job.floats + row * job.at.k + from;
  for (int i = 0; i < 32; ++i, weights += kColumns) {
    Native columns[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) columns[v] = load_native(weights + v * kNative);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] += columns[v] * x[r * job.at.k + i];
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store_native(kept + (row + r) * kColumns + v * kNative, sums[r][v]);
}

template <int CODE, class T>
inline void grouped_group(const GroupedLinear<T>& job, int64_t group) {
  constexpr int kMostRows = kNative == 16 ? 8 : kNative == 8 ? 2 : 1;  // whose sums registers hold
  static thread_local std::vector<float> kept;
  kept.assign(job.rows * kColumns, 0.0f);
  alignas(64) float weights[32 * kColumns];
  const GroupedColumns columns = job.columns(group);
  for (int64_t from = 0; from < job.at.k; from += 32) {
    decode_floats<CODE>(columns, from, weights);
    by_even_rows<kMostRows>(job.rows, [&](auto num_rows, int64_t row) {
      grouped_vectors<decltype(num_rows)::value>(job, weights, row, from, kept.data());
    });
  }
  for (int64_t row = 0; row < job.rows; ++row)
    for (int64_t i = 0; i < kColumns && group * kColumns + i < job.out.n; i += kLanes)
      job.out.finish(row, group * kColumns + i, load16(&kept[row * kColumns + i]));
}

// Give the vectors their x as floats.
inline void widen(GroupedLinear<float>& job, std::vector<float>&) { job.floats = job.x; }
inline void widen(GroupedLinear<bf16>& job, std::vector<float>& floats) {
  floats.resize(job.rows * job.at.k);
  for (int64_t i = 0; i < job.rows * job.at.k; i += kLanes) store16(&floats[i], load16(job.x + i));
  job.floats = floats.data();
}

template <class T, class Body>
inline void over_groups(const GroupedLinear<T>& job, Body body) {
  const int num_groups = int(ceil_to(job.out.n, kColumns) / kColumns);
  if (num_groups * job.at.bytes * (job.rows > 4 ? job.rows / 4 : 1) < kMinParallelBytes)
    for (int group = 0; group < num_groups; ++group) body(group);
  else
    parallel(num_groups, body);
}

inline bool multiply_in_pairs(GroupedLinear<float>&) { return false; }
inline bool multiply_in_pairs(GroupedLinear<bf16>& job) {
#if defined(__AVX512BF16__)
  if (!has_pair_products() || !job.at.format.is_exact_in_bf16()) return false;
  static thread_local std::vector<float> sums;
  if (job.at.format.offset != kNone) {
    sums.resize(job.rows * job.at.k / dot_block(job.at.format));
    sum_blocks(job, sums.data());
    job.x_sums = sums.data();
  }
  with_layout(job.at.format.layout(), [&](auto code) {
    constexpr int kCode = decltype(code)::value;
    if (dot_block(job.at.format) == 32) over_groups(job, [&](int group) { grouped_dots<kCode, 32>(job, group); });
    else over_groups(job, [&](int group) { grouped_dots<kCode, 16>(job, group); });
  });
  return true;
#else
  return false;
#endif
}

template <class T>
void linear_grouped(GroupedLinear<T> job) {
  if (multiply_in_pairs(job)) return;
  static thread_local std::vector<float> floats;
  widen(job, floats);
  with_layout(job.at.format.layout(), [&](auto code) {
    over_groups(job, [&](int group) { grouped_group<decltype(code)::value>(job, group); });
  });
}

// The rows of W that `ids` name: out [num_ids, k_out].
inline void grouped_rows(const GroupedLayout& at, const uint8_t* packed, const int64_t* ids, int64_t num_ids,
                         int64_t k_out, float* out) {
  with_layout(at.format.layout(), [&](auto code) {
    alignas(64) float weights[32 * kColumns];
    for (int64_t row = 0; row < num_ids; ++row) {
      const GroupedColumns columns{at, packed + ids[row] / kColumns * at.bytes};
      for (int64_t from = 0; from < k_out; from += 32) {
        decode_floats<decltype(code)::value>(columns, from, weights);
        for (int64_t i = from; i < std::min<int64_t>(from + 32, k_out); ++i)
          out[row * k_out + i] = weights[(i - from) * kColumns + ids[row] % kColumns];
      }
    }
  });
}

}  // namespace betoken
