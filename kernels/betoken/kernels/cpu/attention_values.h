// Sums of the values that a block's weights are for.
#pragma once
#include <type_traits>

#include "attention_block.h"

namespace betoken {

// Add the weighted values of places [begin, end) to parts [16][width]: Q queries, V vectors at offset d. Inlined, its
// sums would not stay in registers.
template <int Q, int V, class T>
[[gnu::noinline]] void add_values(const Attention<T>& job, int64_t head, int64_t begin, int64_t end, int query, int64_t d,
                                  int64_t width, const float (*weights)[kLanes], Scratch& scratch) {
  const T* values = job.value_cache + head * job.value_size + d;
  const int64_t slot_size = job.num_heads * job.value_size;
  const bool whole = V > 1 || d + kNative <= job.value_size;
  Native sums[Q][V];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[q][v] = load_native(&scratch.parts[(query + q) * width + d + v * kNative]);
  for (int64_t place = begin; place < end; ++place) {
    const T* from = values + scratch.slots[place] * slot_size;
    if (query == 0) fetch(values + scratch.slots[std::min(place + 24, end - 1)] * slot_size, V * kNative);
    Native value[V];
    if (whole) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) value[v] = load_native(from + v * kNative);
    } else {
      value[0] = Native{};
      for (int64_t i = 0; d + i < job.value_size; ++i) value[0][i] = to_float(from[i]);
    }
    const float* weight = &weights[place][query];
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[q][v] += value[v] * weight[q];
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store_native(&scratch.parts[(query + q) * width + d + v * kNative], sums[q][v]);
}

// The same for all dimensions of the queries [first, stop).
template <class T>
void add_values(const Attention<T>& job, int64_t head, int64_t begin, int64_t end, int first, int stop,
                const float (*weights)[kLanes], Scratch& scratch) {
  constexpr int kVectors = kNative == kLanes ? 4 : 2;  // whose sums stay in registers
  const int64_t width = padded_width(job);
  const auto add = [&]<int Q>(std::integral_constant<int, Q>, int query) {
    int64_t d = 0;
    for (; d + kVectors * kNative <= job.value_size; d += kVectors * kNative)
      add_values<Q, kVectors>(job, head, begin, end, query, d, width, weights, scratch);
    for (; d < job.value_size; d += kNative) add_values<Q, 1>(job, head, begin, end, query, d, width, weights, scratch);
  };
  for (int query = first / 4 * 4; query < stop; query += 4)
    if (stop - query == 3) add(std::integral_constant<int, 3>(), query);
    else add(std::integral_constant<int, 4>(), query);
}

}  // namespace betoken
