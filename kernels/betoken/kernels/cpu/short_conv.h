// Short causal convolution over paged inputs; see betoken.kernels.short_conv.
#pragma once
#include <vector>

#include "attention.h"

namespace betoken {

inline void round_to(float* to, const float* sums, int64_t size) { std::memcpy(to, sums, sizeof(float) * size); }
inline void round_to(bf16* to, const float* sums, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    F16 x;
    const int64_t num = std::min<int64_t>(kLanes, size - i);
    std::memcpy(&x, sums + i, sizeof(float) * num);
    bf16 half[kLanes];
    store16(half, x);
    std::memcpy(to + i, half, sizeof(bf16) * num);
  }
}

template <class T>
struct ShortConv {
  const T* x;  // [R, C], to be written first; null: nothing to write
  T* inputs;  // [pages, page_size, C]
  const T* weight;  // [taps, C], oldest first
  const T* bias;  // [C] or null
  T* out;  // [R, C]
  Rows rows;
  int64_t page_size, num_channels, num_taps;

  T* input(int64_t row, int64_t slot) const {
    const int32_t* pages = rows.page_ids + rows.page_starts[rows.row_segments[row]];
    return inputs + (int64_t(pages[slot / page_size]) * page_size + slot % page_size) * num_channels;
  }
  // The input at a position of the row's own path.
  const T* seen(int64_t row, int64_t position) const {
    const int64_t fork = rows.fork(row);
    return input(row, position < fork ? position : rows.path_slots[rows.path_starts[row] + position - fork]);
  }
};

template <class T>
void convolve_row(const ShortConv<T>& job, int64_t row, float* sums) {
  const int64_t num_channels = job.num_channels;
  std::fill(sums, sums + num_channels, 0.0f);
  for (int64_t tap = 0; tap < job.num_taps; ++tap) {
    const int64_t position = job.rows.positions[row] - (job.num_taps - 1) + tap;
    if (position < 0) continue;  // adds 0
    const T *x = job.seen(row, position), *weight = job.weight + tap * num_channels;
    for (int64_t c = 0; c < num_channels; ++c) sums[c] += to_float(x[c]) * to_float(weight[c]);
  }
  if (job.bias)
    for (int64_t c = 0; c < num_channels; ++c) sums[c] += to_float(job.bias[c]);
  round_to(job.out + row * num_channels, sums, num_channels);
}

template <class T>
void short_conv(const ShortConv<T>& job) {
  constexpr int64_t kRows = 16;  // per task: a verify step is one task, which wakes no thread
  if (job.x)
    for (int64_t row = 0; row < job.rows.num_rows; ++row)
      std::memcpy(job.input(row, job.rows.own_slot(row)), job.x + row * job.num_channels, sizeof(T) * job.num_channels);
  auto body = [&](int task) {
    static thread_local std::vector<float> sums;
    sums.resize(job.num_channels);
    const int64_t end = std::min(job.rows.num_rows, (task + 1) * kRows);
    for (int64_t row = task * kRows; row < end; ++row) convolve_row(job, row, sums.data());
  };
  parallel(int((job.rows.num_rows + kRows - 1) / kRows), body);
}

}  // namespace betoken
