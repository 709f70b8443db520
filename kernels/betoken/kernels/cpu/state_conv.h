// Short causal convolution whose earlier inputs wait in rings; see betoken.kernels.state_conv.
#pragma once
#include "pool.h"
#include "state_rows.h"

namespace betoken {

template <class T>
struct StateConv {
  const T* x;  // [R, C]
  T* ring;  // [N, Q, C]
  const T* weight;  // [taps, C], oldest first
  const T* bias;  // [C] or null
  T* out;  // [R, C]
  const StateRows* rows;
  int64_t ring_size, num_channels, num_taps;

  T* waiting(int64_t segment, int64_t slot) const {
    return ring + (rows->states[segment] * ring_size + slot % ring_size) * num_channels;
  }
  const T* seen(int64_t row, int64_t position) const {
    const int64_t segment = rows->row_segments[row], slot = rows->slot_at(row, position);
    const int64_t own = rows->row_at(segment, slot);
    return own >= 0 ? x + own * num_channels : waiting(segment, slot);
  }
};

template <class T>
void convolve_state_row(const StateConv<T>& job, int64_t row, float* sums) {
  const int64_t num_channels = job.num_channels;
  std::fill(sums, sums + num_channels, 0.0f);
  for (int64_t tap = 0; tap < job.num_taps; ++tap) {
    const int64_t position = job.rows->positions[row] - (job.num_taps - 1) + tap;
    if (position < 0) continue;  // adds 0
    const T *x = job.seen(row, position), *weight = job.weight + tap * num_channels;
    for (int64_t c = 0; c < num_channels; ++c) sums[c] += to_float(x[c]) * to_float(weight[c]);
  }
  if (job.bias)
    for (int64_t c = 0; c < num_channels; ++c) sums[c] += to_float(job.bias[c]);
  round_floats(job.out + row * num_channels, sums, num_channels);
}

template <class T>
void state_conv(const StateConv<T>& job) {
  constexpr int64_t kRows = 16;  // of a task: a verify step is one, which wakes nobody
  const StateRows& rows = *job.rows;
  auto body = [&](int task) {
    static thread_local std::vector<float> sums;
    sums.resize(job.num_channels);
    const int64_t end = std::min(rows.num_rows, (task + 1) * kRows);
    for (int64_t row = task * kRows; row < end; ++row) convolve_state_row(job, row, sums.data());
  };
  parallel(int((rows.num_rows + kRows - 1) / kRows), body);
  for (int64_t segment = 0; segment < rows.num_segments; ++segment) {
    const int64_t begin = rows.row_starts[segment], end = rows.row_starts[segment + 1];
    for (int64_t row = std::max(begin, end - job.ring_size); row < end; ++row)
      std::memcpy(job.waiting(segment, rows.first_slots[segment] + row - begin), job.x + row * job.num_channels,
                  sizeof(T) * job.num_channels);
  }
}

}  // namespace betoken
