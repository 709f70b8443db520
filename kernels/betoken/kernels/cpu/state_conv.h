// Short causal convolution whose earlier inputs wait in rings; see betoken.kernels.state_conv.
#pragma once
#include "pool.h"
#include "recurrent_lanes.h"
#include "state_rows.h"

namespace betoken {

template <class T>
struct StateConv {
  const T* x;  // [R, C], a row every `pitch` numbers
  T* ring;  // [N, Q, C]
  const T* weight;  // [taps, C], oldest first
  const T* bias;  // [C] or null
  T* out;  // [R, C]
  const StateRows* rows;
  int64_t pitch, ring_size, num_channels, num_taps;

  T* waiting(int64_t segment, int64_t slot) const {
    return ring + (rows->states[segment] * ring_size + slot % ring_size) * num_channels;
  }
  const T* seen(int64_t row, int64_t position) const {
    const int64_t segment = rows->row_segments[row], slot = rows->slot_at(row, position);
    const int64_t own = rows->row_at(segment, slot);
    return own >= 0 ? x + own * pitch : waiting(segment, slot);
  }
};

// `seen`: room for the inputs of the taps.
template <class T>
void convolve_state_row(const StateConv<T>& job, int64_t row, std::vector<const T*>& seen) {
  const int64_t num_channels = job.num_channels, before = job.rows->positions[row] - (job.num_taps - 1);
  const int64_t begin = std::max<int64_t>(0, -before);  // inputs before position 0 add 0
  for (int64_t tap = begin; tap < job.num_taps; ++tap) seen[tap] = job.seen(row, before + tap);
  for (int64_t c = 0; c < num_channels; c += kLanes) {
    const int64_t num = std::min<int64_t>(kLanes, num_channels - c);
    F16 sum{};
    for (int64_t tap = begin; tap < job.num_taps; ++tap)
      sum = fused(load_some(seen[tap] + c, num), load_some(job.weight + tap * num_channels + c, num), sum);
    if (job.bias) sum += load_some(job.bias + c, num);
    store_some(job.out + row * num_channels + c, sum, num);
  }
}

template <class T>
void state_conv(const StateConv<T>& job) {
  constexpr int64_t kRows = 16;  // per task: a verify step is one task, which wakes no thread
  const StateRows& rows = *job.rows;
  auto body = [&](int task) {
    static thread_local std::vector<const T*> seen;
    seen.resize(job.num_taps);
    const int64_t end = std::min(rows.num_rows, (task + 1) * kRows);
    for (int64_t row = task * kRows; row < end; ++row) convolve_state_row(job, row, seen);
  };
  parallel(int((rows.num_rows + kRows - 1) / kRows), body);
  for (int64_t segment = 0; segment < rows.num_segments; ++segment) {
    const int64_t begin = rows.row_starts[segment], end = rows.row_starts[segment + 1];
    for (int64_t row = std::max(begin, end - job.ring_size); row < end; ++row)
      std::memcpy(job.waiting(segment, rows.first_slots[segment] + row - begin), job.x + row * job.pitch,
                  sizeof(T) * job.num_channels);
  }
}

}  // namespace betoken
