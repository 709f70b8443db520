// y = x W^T + b for any number of rows, each row with the same bits whatever the others are: every output is one
// accumulator that runs over K in order.
//
// Packed bf16 weights: groups of 64 columns, [N/64][K/32][4 tiles][16 pairs of k][16 columns][2]; K and N padded with 0.
// Packed float weights: groups of 32 columns, [N/32][K][32].
#pragma once
#include <algorithm>
#include <utility>

#include "pool.h"
#include "simd.h"

namespace foretoken {

constexpr int kGroupBf16 = 64, kGroupFloat = 32, kDepth = 32;
constexpr int kRowBlock = 16;
constexpr int64_t kMinParallelBytes = 48 * 1024;

inline int64_t ceil_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline void pack_bf16(const bf16* weight, int64_t n, int64_t k, bf16* packed) {
  const int64_t depth = ceil_to(k, kDepth), columns = ceil_to(n, kGroupBf16);
  std::memset(static_cast<void*>(packed), 0, sizeof(bf16) * columns * depth);
  for (int64_t column = 0; column < n; ++column) {
    bf16* group = packed + column / kGroupBf16 * kGroupBf16 * depth;
    const int64_t tile = column % kGroupBf16 / 16, lane = column % 16;
    for (int64_t i = 0; i < k; ++i)
      group[((i / kDepth * 4 + tile) * 16 + i % kDepth / 2) * 32 + lane * 2 + i % 2] = weight[column * k + i];
  }
}

inline void pack_float(const float* weight, int64_t n, int64_t k, float* packed) {
  std::memset(packed, 0, sizeof(float) * ceil_to(n, kGroupFloat) * k);
  for (int64_t column = 0; column < n; ++column)
    for (int64_t i = 0; i < k; ++i)
      packed[(column / kGroupFloat * k + i) * kGroupFloat + column % kGroupFloat] = weight[column * k + i];
}

template <class T>
struct Linear {
  const T* x;       // [rows, k], for bf16 k is a multiple of 32
  const T* packed;
  const T* bias;    // [n] or null
  T* y;             // [rows, n]
  int64_t rows, k, n;

  // Store up to 16 columns of a row.
  void finish(int64_t row, int64_t column, F16 sum) const {
    if (column + kLanes <= n) {
      if (bias) sum += load16(bias + column);
      store16(y + row * n + column, sum);
      return;
    }
    T out[kLanes];
    F16 padded = {};
    for (int64_t i = 0; i < n - column; ++i) padded[i] = bias ? to_float(bias[column + i]) : 0.0f;
    store16(out, sum + padded);
    for (int64_t i = 0; i < n - column; ++i) y[row * n + column + i] = out[i];
  }
};

#if defined(__AMX_BF16__)
// One group of 64 columns by tile registers: 16 rows at a time.
inline void linear_tiles(const Linear<bf16>& job, int64_t group) {
  const bf16* weights = job.packed + group * kGroupBf16 * job.k;
  alignas(64) float sums[kRowBlock][kGroupBf16];
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
    _tile_stored(0, &sums[0][0], kGroupBf16 * 4);
    _tile_stored(1, &sums[0][16], kGroupBf16 * 4);
    _tile_stored(2, &sums[0][32], kGroupBf16 * 4);
    _tile_stored(3, &sums[0][48], kGroupBf16 * 4);
    for (int r = 0; r < num_rows; ++r)
      for (int64_t c = 0; c < kGroupBf16 && group * kGroupBf16 + c < job.n; c += kLanes)
        job.finish(row + r, group * kGroupBf16 + c, load16(&sums[r][c]));
  }
  _tile_release();
}
#endif

#if defined(__AVX512BF16__)
template <int R>
inline void finish_dots(const Linear<bf16>& job, int64_t group, int64_t row, const __m512 (&sums)[R][4]) {
  for (int tile = 0; tile < 4; ++tile) {
    const int64_t column = group * kGroupBf16 + tile * 16;
    for (int r = 0; r < R && column < job.n; ++r) job.finish(row + r, column, (F16)sums[r][tile]);
  }
}

// One group of 64 columns by dot products of pairs: R rows. Weights are read in the order they lie, at the memory's pace;
// unrolled further, the compiler would keep so many values of x that it runs out of registers.
template <int R>
inline void linear_dots(const Linear<bf16>& job, int64_t group, int64_t row) {
  const bf16* weights = job.packed + group * kGroupBf16 * job.k;
  const bf16* x = job.x + row * job.k;
  __m512 sums[R][4];
  for (int r = 0; r < R; ++r)
    for (int tile = 0; tile < 4; ++tile) sums[r][tile] = _mm512_setzero_ps();
  for (int64_t i = 0; i < job.k; i += kDepth, weights += 4 * 512)
#pragma GCC unroll 4
    for (int tile = 0; tile < 4; ++tile)
#pragma GCC unroll 4
      for (int pair = 0; pair < 16; ++pair) {
        const __m512bh columns = (__m512bh)_mm512_loadu_si512(weights + tile * 512 + pair * 32);
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
  const bf16* weights = job.packed + group * kGroupBf16 * job.k;
  const bf16* x = job.x + row * job.k;
  const bf16* next = weights + kGroupBf16 * job.k + std::min<int64_t>(pass - 1, 3) * kGroupBf16 * job.k / 4;
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

// One group of 64 columns of bf16 with neither: R rows, the pairs of k split into even and odd.
template <int R>
inline void linear_pairs(const Linear<bf16>& job, int64_t group, int64_t row) {
  const bf16* weights = job.packed + group * kGroupBf16 * job.k;
  for (int tile = 0; tile < 4; ++tile) {
    F16 sums[R] = {};
    for (int64_t i = 0; i < job.k; i += 2) {
      U16 pair;
      std::memcpy(&pair, weights + ((i / kDepth * 4 + tile) * 16 + i % kDepth / 2) * 32, sizeof pair);
      const F16 even = (F16)(pair << 16), odd = (F16)(pair & 0xffff0000u);
      for (int r = 0; r < R; ++r) {
        sums[r] += even * to_float(job.x[(row + r) * job.k + i]);
        sums[r] += odd * to_float(job.x[(row + r) * job.k + i + 1]);
      }
    }
    const int64_t column = group * kGroupBf16 + tile * 16;
    for (int r = 0; r < R && column < job.n; ++r) job.finish(row + r, column, sums[r]);
  }
}

template <int R>
inline void linear_floats(const Linear<float>& job, int64_t group, int64_t row) {
  const float* weights = job.packed + group * kGroupFloat * job.k;
  F16 sums[R][2] = {};
  for (int64_t i = 0; i < job.k; ++i, weights += kGroupFloat) {
    const F16 low = load16(weights), high = load16(weights + kLanes);
    for (int r = 0; r < R; ++r) {
      const float x = job.x[(row + r) * job.k + i];
      sums[r][0] += low * x;
      sums[r][1] += high * x;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int half = 0; half < 2; ++half)
      if (group * kGroupFloat + half * kLanes < job.n)
        job.finish(row + r, group * kGroupFloat + half * kLanes, sums[r][half]);
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

template <int R>
struct Pairs {
  static void run(const Linear<bf16>& job, int64_t group, int64_t row, int64_t) { linear_pairs<R>(job, group, row); }
};
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
struct Floats {
  static void run(const Linear<float>& job, int64_t group, int64_t row, int64_t) { linear_floats<R>(job, group, row); }
};

inline void linear_group(const Linear<bf16>& job, int64_t group) {
#if defined(__AMX_BF16__)
  if (has_tiles()) return linear_tiles(job, group);
#endif
#if defined(__AVX512BF16__)
  by_rows<Dots, 6>(job, group);
#else
  by_rows<Pairs, 8>(job, group);
#endif
}
inline void linear_group(const Linear<float>& job, int64_t group) { by_rows<Floats, 8>(job, group); }

template <class T>
void linear(const Linear<T>& job) {
  const int64_t width = sizeof(T) == 2 ? kGroupBf16 : kGroupFloat;
  const int num_groups = int(ceil_to(job.n, width) / width);
  auto body = [&](int group) { linear_group(job, group); };
  if (int64_t(sizeof(T)) * job.n * job.k * (job.rows > 16 ? job.rows / 16 : 1) < kMinParallelBytes)
    for (int group = 0; group < num_groups; ++group) body(group);
  else
    parallel(num_groups, body);
}

}  // namespace foretoken
