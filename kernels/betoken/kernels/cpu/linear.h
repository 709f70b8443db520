// y = x W^T + b for any number of rows, each row with the same bits whatever the others are: every output is one
// accumulator that runs over K in order.
//
// Packed weights are groups of 64 columns, N padded with 0. bf16, K padded with 0: [N/64][K/32][4 tiles][16 pairs of k]
// [16 columns][2] where bf16 is multiplied in pairs, else [N/64][K/2][64 columns][2]. float: [N/64][K][64].
#pragma once
#include <algorithm>
#include <utility>

#include "pool.h"
#include "simd.h"

namespace betoken {

constexpr int kGroup = 64, kDepth = 32;
constexpr int kRowBlock = 16;
constexpr int64_t kMinParallelBytes = 48 * 1024;

// Whether bf16 is multiplied in pairs.
inline bool has_pair_products() { return has_tiles() || has_dots(); }

inline int64_t ceil_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline void pack_bf16(const bf16* weight, int64_t n, int64_t k, bf16* packed) {
  const int64_t depth = ceil_to(k, kDepth), columns = ceil_to(n, kGroup);
  std::memset(static_cast<void*>(packed), 0, sizeof(bf16) * columns * depth);
  for (int64_t column = 0; column < n; ++column) {
    bf16* group = packed + column / kGroup * kGroup * depth;
    const int64_t tile = column % kGroup / 16, lane = column % 16;
    for (int64_t i = 0; i < k; ++i)
      group[has_pair_products() ? ((i / kDepth * 4 + tile) * 16 + i % kDepth / 2) * 32 + lane * 2 + i % 2
                                : (i / 2 * kGroup + column % kGroup) * 2 + i % 2] = weight[column * k + i];
  }
}

inline void pack_float(const float* weight, int64_t n, int64_t k, float* packed) {
  std::memset(packed, 0, sizeof(float) * ceil_to(n, kGroup) * k);
  for (int64_t column = 0; column < n; ++column)
    for (int64_t i = 0; i < k; ++i)
      packed[(column / kGroup * k + i) * kGroup + column % kGroup] = weight[column * k + i];
}

template <class T>
struct Linear {
  const T* x;       // [rows, k], for bf16 k is a multiple of 32
  const T* packed;
  const T* bias;    // [n] or null
  T* y;             // [rows, n]
  int64_t rows, k, n;
  const float* floats = nullptr;  // x, where bf16 is not multiplied in pairs
  float* sums = nullptr;          // [rows, n]: where results go as they were added up, and not to y

  // Store up to 16 columns of a row.
  void finish(int64_t row, int64_t column, F16 sum) const {
    if (sums) store(sums + row * n + column, column, sum);
    else store(y + row * n + column, column, sum);
  }

  template <class Out>
  void store(Out* to, int64_t column, F16 sum) const {
    if (column + kLanes <= n) {
      if (bias) sum += load16(bias + column);
      store16(to, sum);
      return;
    }
    Out out[kLanes];
    F16 padded = {};
    for (int64_t i = 0; i < n - column; ++i) padded.set(i, bias ? to_float(bias[column + i]) : 0.0f);
    store16(out, sum + padded);
    for (int64_t i = 0; i < n - column; ++i) to[i] = out[i];
  }
};

#if defined(__AMX_BF16__)
// One group of 64 columns by tile registers: 16 rows at a time.
inline void linear_tiles(const Linear<bf16>& job, int64_t group) {
  const bf16* weights = job.packed + group * kGroup * job.k;
  alignas(64) float sums[kRowBlock][kGroup];
  int configured = 0;
  for (int64_t row = 0; row < job.rows; row += kRowBlock) {
    const int num_rows = job.rows - row < kRowBlock ? int(job.rows - row) : kRowBlock;
    if (num_rows != configured) {
      TileConfig config;
      for (int tile = 0; tile < 6; ++tile) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = uint8_t(tile < 5 ? num_rows : 16);  // 0-3 sums, 4 rows of x, 5-7 weights
      }
      config.row_bytes[6] = config.row_bytes[7] = 64;
      config.rows[6] = config.rows[7] = 16;
      _tile_loadconfig(&config);
      configured = num_rows;
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const bf16* x = job.x + row * job.k;
    const bf16* tile = weights;
    for (int64_t i = 0; i < job.k; i += kDepth, tile += 4 * 512) {
      for (int line = 0; line < 64; line += 1)
        _mm_prefetch(reinterpret_cast<const char*>(tile + 4 * 512 * 2) + line * 64, _MM_HINT_T0);
      _tile_loadd(4, x + i, int(job.k * 2));
      _tile_loadd(5, tile, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, tile + 512, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, tile + 1024, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, tile + 1536, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, &sums[0][0], kGroup * 4);
    _tile_stored(1, &sums[0][16], kGroup * 4);
    _tile_stored(2, &sums[0][32], kGroup * 4);
    _tile_stored(3, &sums[0][48], kGroup * 4);
    for (int r = 0; r < num_rows; ++r)
      for (int64_t c = 0; c < kGroup && group * kGroup + c < job.n; c += kLanes)
        job.finish(row + r, group * kGroup + c, load16(&sums[r][c]));
  }
  _tile_release();
}
#endif

#if defined(__AVX512BF16__)
template <int R>
inline void finish_dots(const Linear<bf16>& job, int64_t group, int64_t row, const __m512 (&sums)[R][4]) {
  for (int tile = 0; tile < 4; ++tile) {
    const int64_t column = group * kGroup + tile * 16;
    for (int r = 0; r < R && column < job.n; ++r) job.finish(row + r, column, F16{{(Native)sums[r][tile]}});
  }
}

// One group of 64 columns by dot products of pairs: R rows. Weights are read in memory order, and prefetched three pages
// ahead: the processor's own prefetching ends at every page, and is late for the caches nearby. Unrolled further, the
// compiler would keep so many values of x that it runs out of registers.
template <int R>
inline void linear_dots(const Linear<bf16>& job, int64_t group, int64_t row) {
  constexpr int64_t kAhead = 3 * 4096 / sizeof(bf16);
  const bf16* weights = job.packed + group * kGroup * job.k;
  const bf16* x = job.x + row * job.k;
  __m512 sums[R][4];
  for (int r = 0; r < R; ++r)
    for (int tile = 0; tile < 4; ++tile) sums[r][tile] = _mm512_setzero_ps();
  for (int64_t i = 0; i < job.k; i += kDepth, weights += 4 * 512)
#pragma GCC unroll 4
    for (int tile = 0; tile < 4; ++tile)
#pragma GCC unroll 4
      for (int pair = 0; pair < 16; ++pair) {
        const bf16* at = weights + tile * 512 + pair * 32;
        __builtin_prefetch(at + kAhead);
        const __m512bh columns = (__m512bh)_mm512_loadu_si512(at);
        for (int r = 0; r < R; ++r) {
          int32_t values;
          std::memcpy(&values, x + r * job.k + i + 2 * pair, sizeof values);
          sums[r][tile] = _mm512_dpbf16_ps(sums[r][tile], columns, (__m512bh)_mm512_set1_epi32(values));
        }
      }
  finish_dots<R>(job, group, row, sums);
}

// The same sums once the group's weights are in the cache, where their order does not matter: each value of x serves
// four tiles. Meanwhile the first four such passes each fetch a quarter of the next group's weights; later ones ask for
// the last quarter again.
template <int R>
inline void linear_dots_cached(const Linear<bf16>& job, int64_t group, int64_t row, int64_t pass) {
  const bf16* weights = job.packed + group * kGroup * job.k;
  const bf16* x = job.x + row * job.k;
  const bf16* next = weights + kGroup * job.k + std::min<int64_t>(pass - 1, 3) * kGroup * job.k / 4;
  __m512 sums[R][4];
  for (int r = 0; r < R; ++r)
    for (int tile = 0; tile < 4; ++tile) sums[r][tile] = _mm512_setzero_ps();
  for (int64_t i = 0; i < job.k; i += kDepth, weights += 4 * 512)
    for (int pair = 0; pair < 16; ++pair, next += 32) {
      __builtin_prefetch(next, 0, 2);
      __m512bh columns[4];
      for (int tile = 0; tile < 4; ++tile)
        columns[tile] = (__m512bh)_mm512_loadu_si512(weights + tile * 512 + pair * 32);
      for (int r = 0; r < R; ++r) {
        int32_t values;
        std::memcpy(&values, x + r * job.k + i + 2 * pair, sizeof values);
        for (int tile = 0; tile < 4; ++tile)
          sums[r][tile] = _mm512_dpbf16_ps(sums[r][tile], columns[tile], (__m512bh)_mm512_set1_epi32(values));
      }
    }
  finish_dots<R>(job, group, row, sums);
}
#endif

// Packed weights as floats: kStep values of k are contiguous.
struct FloatColumns {
  typedef float Weight;
  static constexpr int kStep = 1;
  static Native load(const float* from, int) { return load_native(from); }
};
struct PairColumns {
  typedef bf16 Weight;
  static constexpr int kStep = 2;
  static Native load(const bf16* from, int odd) {
    NativeBits bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Native)(odd ? bits & 0xffff0000u : bits << 16);
  }
};

// One group of 64 columns by float vectors: rows [row, row + R), whose values are floats x [R, k]; as many columns at
// once as leave all sums in registers. Weights are fetched a page ahead: the processor's own prefetching ends at every
// page.
template <int R, class Columns, class T>
inline void linear_vectors(const Linear<T>& job, const float* x, int64_t group, int64_t row) {
  constexpr int kMostSums = kNative == 8 ? 12 : 24;  // of 16 registers, of 32
  constexpr int kWidth = R * 64 / kNative <= kMostSums ? 64 : R * 32 / kNative <= kMostSums ? 32 : 16;
  constexpr int kVectors = kWidth / kNative;
  constexpr int64_t kLine = kGroup * Columns::kStep;
  const typename Columns::Weight* weights = job.packed + group * kGroup * job.k;
  for (int64_t column = 0; column < kGroup; column += kWidth) {
    Native sums[R][kVectors] = {};
    const typename Columns::Weight* at = weights + column * Columns::kStep;
    for (int64_t i = 0; i < job.k; i += Columns::kStep, at += kLine) {
#pragma GCC unroll 4
      for (int64_t ahead = 0; ahead < kLine; ahead += 64 / sizeof *at)
        if (column == 0) __builtin_prefetch(at + 4096 / sizeof *at + ahead);
#pragma GCC unroll 2
      for (int step = 0; step < Columns::kStep; ++step) {
        Native columns[kVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) columns[v] = Columns::load(at + v * kNative * Columns::kStep, step);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) sums[r][v] += columns[v] * x[r * job.k + i + step];
      }
    }
    float out[R][kWidth];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) store_native(&out[r][v * kNative], sums[r][v]);
    for (int64_t tile = 0; tile < kWidth && group * kGroup + column + tile < job.n; tile += kLanes)
      for (int r = 0; r < R; ++r) job.finish(row + r, group * kGroup + column + tile, load16(&out[r][tile]));
  }
}

// As few passes over the weights as MOST rows a pass allow, of even size.
template <template <int> class Kernel, int MOST, class Job>
void by_rows(const Job& job, int64_t group) {
  const int64_t num_passes = (job.rows + MOST - 1) / MOST;
  for (int64_t pass = 0; pass < num_passes; ++pass) {
    const int64_t row = job.rows * pass / num_passes, num_rows = job.rows * (pass + 1) / num_passes - row;
    [&]<int... I>(std::integer_sequence<int, I...>) {
      (void)((num_rows == I + 1 && (Kernel<I + 1>::run(job, group, row, pass), true)) || ...);
    }(std::make_integer_sequence<int, MOST>());
  }
}

#if defined(__AVX512BF16__)
template <int R>
struct Dots {
  static void run(const Linear<bf16>& job, int64_t group, int64_t row, int64_t pass) {
    if (pass) linear_dots_cached<R>(job, group, row, pass);
    else linear_dots<R>(job, group, row);
  }
};
#endif
template <int R>
struct Vectors {
  static void run(const Linear<float>& job, int64_t group, int64_t row, int64_t) {
    linear_vectors<R, FloatColumns>(job, job.x + row * job.k, group, row);
  }
  static void run(const Linear<bf16>& job, int64_t group, int64_t row, int64_t) {
    linear_vectors<R, PairColumns>(job, job.floats + row * job.k, group, row);
  }
};

inline void linear_group(const Linear<bf16>& job, int64_t group) {
#if defined(__AMX_BF16__)
  if (has_tiles()) return linear_tiles(job, group);
#endif
#if defined(__AVX512BF16__)
  if (has_dots()) return by_rows<Dots, 6>(job, group);
#endif
  by_rows<Vectors, 6>(job, group);
}
inline void linear_group(const Linear<float>& job, int64_t group) { by_rows<Vectors, 6>(job, group); }

// Give `linear_vectors` its x.
inline void widen(Linear<bf16>& job) {
  if (has_pair_products()) return;
  static thread_local std::vector<float> floats;
  floats.resize(job.rows * job.k);
  for (int64_t i = 0; i < job.rows * job.k; i += kLanes) store16(&floats[i], load16(job.x + i));
  job.floats = floats.data();
}
inline void widen(Linear<float>&) {}

template <class T>
void linear(Linear<T> job) {
  const int num_groups = int(ceil_to(job.n, kGroup) / kGroup);
  widen(job);
  auto body = [&](int group) { linear_group(job, group); };
  if (int64_t(sizeof(T)) * job.n * job.k * (job.rows > 16 ? job.rows / 16 : 1) < kMinParallelBytes)
    for (int group = 0; group < num_groups; ++group) body(group);
  else
    parallel(num_groups, body);
}

}  // namespace betoken
