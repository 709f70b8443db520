// Linear recurrences over committed states and rings; see betoken.kernels.linear_recurrence.
#pragma once
#include "pool.h"
#include "recurrence_strip.h"

namespace betoken {

// Leave the inputs of uncommitted rows in the rings, once no head reads them any more.
template <class T>
void store_waiting(const Recurrence<T>& job) {
  const StateRows& rows = *job.rows;
  for (int64_t segment = 0; segment < rows.num_segments; ++segment) {
    for (int64_t row = RecurrencePlan::first_uncommitted(rows, segment); row < rows.row_starts[segment + 1]; ++row) {
      const int64_t slot = rows.first_slots[segment] + row - rows.row_starts[segment];
      const int64_t at = int64_t(rows.states[segment]) * job.num_waiting + slot % job.num_waiting;
      std::memcpy(job.waiting_keys + at * job.key_width(), job.key + row * job.key_pitch, sizeof(T) * job.key_width());
      std::memcpy(job.waiting_values + at * job.value_width(), job.value + row * job.value_pitch,
                  sizeof(T) * job.value_width());
      std::memcpy(job.waiting_gates + at * job.gate_width(), job.gates + row * job.gate_width(),
                  sizeof(float) * job.gate_width());
    }
  }
}

template <class T>
void linear_recurrence(const Recurrence<T>& job) {
  static thread_local RecurrencePlan plan;
  const RecurrencePlan& made = plan;  // the pool's threads have their own plans
  plan.make(*job.rows, job.num_waiting);
  const int64_t strips = (job.value_size + kStrip - 1) / kStrip;
  auto body = [&](int task) {
    static thread_local std::vector<float> memory;
    const int64_t segment = task / (job.num_heads * strips), head = task / strips % job.num_heads;
    const Advance* advances = made.advances.data();
    RecurrentStrip<T>(job, segment, head, task % strips * kStrip, memory)
        .run(advances + made.starts[segment], advances + made.starts[segment + 1], !job.rows->applied[segment]);
  };
  parallel(int(job.rows->num_segments * job.num_heads * strips), body);
  store_waiting(job);
}

}  // namespace betoken
