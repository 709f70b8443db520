// y = x W^T + b for weights of few bits: every row with the same bits whatever the others are. A tile of weights is
// decoded once for all rows. Where bf16 is not multiplied in pairs, weights become the floats that they stand for, and
// every output is one sum over K in order.
#pragma once
#include "grouped_choice.h"
#include "grouped_bytes.h"
#include "grouped_ends.h"
#include "linear_grouped_dots.h"
#include "linear_grouped_job.h"

namespace betoken {

// R rows of x [.., k], over 32 k: weights [32][32 columns], kept sums [R][32].
template <int R>
inline void grouped_vectors(const float* x, int64_t k, const float* weights, float* kept) {
  constexpr int kVectors = kColumns / kNative;
  Native sums[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load_native(kept + r * kColumns + v * kNative);
  for (int i = 0; i < 32; ++i, weights += kColumns) {
    Native values[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) values[r] = Native{} + x[r * k + i];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Native columns = load_native(weights + v * kNative);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][v] += columns * values[r];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store_native(kept + r * kColumns + v * kNative, sums[r][v]);
}

// Whether scale times (code - zero) is scale times code less scale times zero: only the result may be rounded.
inline bool is_zero_exact(const GroupedFormat& format) {
  if (is_zeros(format.offset)) return false;
  const bool is_power = (format.zero & (format.zero - 1)) == 0;
  return !format.zero || (format.offset == kNone && format.scale != kFloat && (is_power || !has_units(format.scale)));
}

// Decodes 32 columns at [from, from + 32) of K for codes that are integers, with the results of `decode_floats`:
// use(lane, k of 32, weights of 8 k). `ends`: raw scales and offsets, from index `first` on. HAS_ZEROS: zeros are
// subtracted from codes before scaling; otherwise scale times code and scale times zero are exact.
template <int LAYOUT, bool HAS_ZEROS, class Use>
[[gnu::always_inline]] inline void each_number(const GroupedColumns& columns, const DotEnds& ends, int first, int block,
                                               int64_t from, Use use) {
  const GroupedFormat& format = columns.at.format;
  const uint8_t* step = columns.codes(from);
  const Native zero = Native{} + float(format.zero);
  const bool has_offsets = format.offset != kNone;
#pragma GCC unroll 1
  for (int quarter = 0; quarter < kStep / kQuarter; ++quarter)
#pragma GCC unroll 8
    for (int lane = 0; lane < kColumns; lane += kNative) {
      const int end = first + (block == 16 ? quarter / 2 : 0);
      const Native scale = load_native(ends.scales[end] + lane);
      const Native offset = has_offsets ? load_native(ends.offsets[end] + lane) : Native{};
      const Native zeros = HAS_ZEROS && is_zeros(format.offset) ? zero + offset : zero;
      const Native added = HAS_ZEROS ? is_zeros(format.offset) ? Native{} : offset : offset - zero * scale;
      const ByteQuarter<LAYOUT> codes(step, lane, quarter);
      [&]<int... K>(std::integer_sequence<int, K...>) {
        const Native floats[] = {__builtin_convertvector(codes.template code<K>(), Native)...};
        const Native numbers[] = {(HAS_ZEROS ? floats[K] - zeros : floats[K]) * scale + added...};
        use(lane, quarter * kQuarter, numbers);
      }(std::make_integer_sequence<int, kQuarter>());
    }
}

// each(ends, place of the first one, k) for every step of K, fetching ahead.
template <class Each>
inline void each_step(const GroupedColumns& columns, Each each) {
  const int64_t k = columns.at.k;
  const int block = dot_block(columns.at.format);
  DotAhead ahead(columns, k / kStep, 4096);
  DotEnds ends;
  for (int64_t from = 0; from < k; from += kStep) {
    if (from % kDepthChunk == 0) {
      const int64_t end = std::min<int64_t>(from + kDepthChunk, k);
      if (block == 32) decode_ends<32, true>(columns, from, end, ends);
      else decode_ends<16, true>(columns, from, end, ends);
    }
    ahead.ask();
    each(ends, int(from % kDepthChunk / block), from);
  }
}

template <int LAYOUT, bool HAS_ZEROS>
inline void integers_one(const GroupedColumns& columns, const float* x, float* kept) {
  constexpr int kVectors = kColumns / kNative;
  const int block = dot_block(columns.at.format);
  Native sums[kVectors] = {};
  each_step(columns, [&](const DotEnds& ends, int first, int64_t from) {
    each_number<LAYOUT, HAS_ZEROS>(columns, ends, first, block, from, [&](int lane, int k, auto& weights) {
      Native sum = sums[lane / kNative];
#pragma GCC unroll 8
      for (int i = 0; i < kQuarter; ++i) sum += weights[i] * x[from + k + i];
      sums[lane / kNative] = sum;
    });
  });
  for (int v = 0; v < kVectors; ++v) store_native(kept + v * kNative, sums[v]);
}

constexpr int kMostRows = kNative == 16 ? 8 : kNative == 8 ? 3 : 1;  // whose sums registers hold

// Rows of x [rows, k], at most `most` a pass, over 32 k from `from` on: kept sums [rows][32].
inline void multiply_decoded(const float* x, int64_t rows, int most, int64_t k, const float* weights, int64_t from,
                             float* kept) {
  by_even_rows<kMostRows>(rows, most, [&](auto num_rows, int64_t row) {
    grouped_vectors<decltype(num_rows)::value>(x + row * k + from, k, weights, kept + row * kColumns);
  });
}

template <int LAYOUT, bool HAS_ZEROS>
inline void integers_group(const GroupedColumns& columns, const float* x, int64_t rows, int most, float* kept) {
  if (rows == 1) return integers_one<LAYOUT, HAS_ZEROS>(columns, x, kept);
  const int block = dot_block(columns.at.format);
  alignas(64) float weights[32 * kColumns];
  each_step(columns, [&](const DotEnds& ends, int first, int64_t from) {
    each_number<LAYOUT, HAS_ZEROS>(columns, ends, first, block, from, [&](int lane, int k, auto& numbers) {
#pragma GCC unroll 8
      for (int i = 0; i < kQuarter; ++i) store_native(weights + (k + i) * kColumns + lane, numbers[i]);
    });
    multiply_decoded(x, rows, most, columns.at.k, weights, from, kept);
  });
}

// The sums of a group's columns, [rows][32], zeros before.
template <int CODE>
inline void grouped_group(const GroupedColumns& columns, const float* x, int64_t rows, int most, float* kept) {
  constexpr bool kHasOthers = CODE == kFloat8 || CODE == kBytes || CODE == kNibbles || CODE == kThrees;
  const GroupedFormat& format = columns.at.format;
  if constexpr (CODE != kFloat8) {
    if (!kHasOthers || (!format.is_table() && format.factor() == 1)) {
      if (!is_zero_exact(format)) return integers_group<CODE, true>(columns, x, rows, most, kept);
      return integers_group<CODE, false>(columns, x, rows, most, kept);
    }
  }
  if constexpr (kHasOthers) {
    alignas(64) float weights[32 * kColumns];
    for (int64_t from = 0; from < columns.at.k; from += 32) {
      decode_floats<CODE>(columns, from, weights);
      multiply_decoded(x, rows, most, columns.at.k, weights, from, kept);
    }
  }
}

// Give the vectors their x as floats.
inline void widen(GroupedLinear<float>& job, std::vector<float>&) { job.floats = job.x; }
inline void widen(GroupedLinear<bf16>& job, std::vector<float>& floats) {
  floats.resize(job.rows * job.at.k);
  for (int64_t i = 0; i < job.rows * job.at.k; i += kLanes) store16(&floats[i], load16(job.x + i));
  job.floats = floats.data();
}

// Numbers of rows in a pass over weights, which change no bit; fewer if registers hold fewer.
struct RowsAPass {
  const char* name;
  int num;
};
constexpr RowsAPass kRowsAPass[] = {{"8 rows a pass", kMostChunkRows}, {"4 rows a pass", 4}, {"2 rows a pass", 2}};

inline Choices& exact_choices() {
  static Choices choices;
  return choices;
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
  job.rows_a_pass = kRowsAPass[exact_choices().of(job.at.format, job.rows)].num;
  if (multiply_in_pairs(job)) return;
  static thread_local std::vector<float> floats;
  widen(job, floats);
  void (*multiply)(const GroupedColumns&, const float*, int64_t, int, float*) = nullptr;
  with_layout(job.at.format.layout(), [&](auto code) { multiply = grouped_group<decltype(code)::value>; });
  over_groups(job, [&](int group) {
    static thread_local std::vector<float> kept;
    kept.assign(job.rows * kColumns, 0.0f);
    multiply(job.columns(group), job.floats, job.rows, job.rows_a_pass, kept.data());
    job.finish_group(group, kept.data());
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
