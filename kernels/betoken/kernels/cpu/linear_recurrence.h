// Linear recurrences over committed states and rings; see betoken.kernels.linear_recurrence.
#pragma once
#include <cmath>

#include "pool.h"
#include "state_rows.h"

namespace betoken {

template <class T>
struct RecurrenceInputs {
  const T *key, *value;  // [G, D], [H, E]
  const float* gates;  // [H, gate_size]
};

template <class T>
struct Recurrence {
  const T *query, *key, *value;  // [R, G, D], [R, G, D], [R, H, E]
  const float* gates;  // [R, H, gate_size]: log decays and beta, or steps
  float* out;  // [R, H, E]
  float* state;  // [N, H, D, E]
  T *waiting_keys, *waiting_values;  // [N, W, G, D], [N, W, H, E]
  float* waiting_gates;  // [N, W, H, gate_size]
  const float* rates;  // [H, D, E] or null
  const StateRows* rows;
  int64_t num_waiting, num_key_heads, key_size, num_heads, value_size, gate_size;
  float scale;
  bool is_delta, normalizes, weighs;

  int64_t key_width() const { return num_key_heads * key_size; }
  int64_t value_width() const { return num_heads * value_size; }
  int64_t gate_width() const { return num_heads * gate_size; }
  int64_t place(int64_t segment, int64_t slot) const {
    return int64_t(rows->states[segment]) * num_waiting + slot % num_waiting;
  }
  RecurrenceInputs<T> inputs(int64_t segment, int64_t slot) const {
    const int64_t row = rows->row_at(segment, slot);
    if (row >= 0) return {key + row * key_width(), value + row * value_width(), gates + row * gate_width()};
    const int64_t at = place(segment, slot);
    return {waiting_keys + at * key_width(), waiting_values + at * value_width(), waiting_gates + at * gate_width()};
  }
};

// One head of one sequence: the state at hand, and room for a row's vectors.
template <class T>
class RecurrentHead {
 public:
  RecurrentHead(const Recurrence<T>& job, int64_t segment, int64_t head, std::vector<float>& memory)
      : job_(job), segment_(segment), head_(head), key_head_(head / (job.num_heads / job.num_key_heads)) {
    const int64_t size = job.key_size * job.value_size;
    memory.resize(size + 2 * job.key_size + 2 * job.value_size);
    own_ = memory.data();
    decay_ = own_ + size;
    direction_ = decay_ + job.key_size;
    written_ = direction_ + job.key_size;
    sums_ = written_ + job.value_size;
  }

  void run() {
    const StateRows& rows = *job_.rows;
    const int64_t size = job_.key_size * job_.value_size;
    const int64_t begin = rows.row_starts[segment_], end = rows.row_starts[segment_ + 1];
    const int64_t applied = rows.applied[segment_], committed = rows.committed[segment_];
    float* kept = job_.state + (int64_t(rows.states[segment_]) * job_.num_heads + head_) * size;
    if (!applied) std::fill(kept, kept + size, 0.0f);
    for (int64_t slot = applied; slot < committed; ++slot) {
      apply(kept, slot);
      const int64_t row = rows.row_at(segment_, slot);
      if (row >= 0) read(kept, row);
    }
    int64_t held = -1;  // the row whose path `own_` has run along
    for (int64_t row = begin + std::max<int64_t>(0, committed - rows.first_slots[segment_]); row < end; ++row) {
      const int64_t position = rows.positions[row];
      int64_t from = position;
      if (held < 0 || position == committed || rows.row_at(segment_, rows.slot_at(row, position - 1)) != held) {
        std::memcpy(own_, kept, sizeof(float) * size);
        from = committed;
      }
      for (int64_t at = from; at <= position; ++at) apply(own_, rows.slot_at(row, at));
      read(own_, row);
      held = row;
    }
  }

 private:
  void apply(float* state, int64_t slot) {
    const RecurrenceInputs<T> given = job_.inputs(segment_, slot);
    const int64_t key_size = job_.key_size, value_size = job_.value_size;
    const float* gates = given.gates + head_ * job_.gate_size;
    direct(given.key, 1.0f);
    const T* value = given.value + head_ * value_size;
    if (job_.rates) return apply_rates(state, value, gates);
    const int64_t num_decays = job_.gate_size - 1;
    for (int64_t d = 0; d < num_decays; ++d) decay_[d] = std::exp(gates[d]);
    const float beta = gates[num_decays];
    const bool is_one_decay = num_decays == 1;
    if (job_.is_delta) {
      std::fill(sums_, sums_ + value_size, 0.0f);
      for (int64_t d = 0; d < key_size; ++d) {
        float* line = state + d * value_size;
        const float decay = decay_[is_one_decay ? 0 : d], weight = direction_[d];
        for (int64_t e = 0; e < value_size; ++e) {
          line[e] *= decay;
          sums_[e] += line[e] * weight;
        }
      }
      for (int64_t e = 0; e < value_size; ++e) written_[e] = (to_float(value[e]) - sums_[e]) * beta;
      for (int64_t d = 0; d < key_size; ++d) {
        float* line = state + d * value_size;
        const float weight = direction_[d];
        for (int64_t e = 0; e < value_size; ++e) line[e] += weight * written_[e];
      }
      return;
    }
    for (int64_t e = 0; e < value_size; ++e) written_[e] = to_float(value[e]) * beta;
    for (int64_t d = 0; d < key_size; ++d) {
      float* line = state + d * value_size;
      const float decay = decay_[is_one_decay ? 0 : d], weight = direction_[d];
      for (int64_t e = 0; e < value_size; ++e) {
        const float faded = line[e] * decay;
        line[e] = faded + weight * written_[e];
      }
    }
  }

  // The key's direction is at hand; each element of the state has a decay of its own.
  void apply_rates(float* state, const T* value, const float* steps) {
    const int64_t value_size = job_.value_size;
    for (int64_t e = 0; e < value_size; ++e) written_[e] = job_.weighs ? to_float(value[e]) * steps[e] : to_float(value[e]);
    const float* rates = job_.rates + head_ * job_.key_size * value_size;
    for (int64_t d = 0; d < job_.key_size; ++d, rates += value_size) {
      float* line = state + d * value_size;
      const float weight = direction_[d];
      for (int64_t e = 0; e < value_size; e += kLanes) {
        const size_t bytes = sizeof(float) * std::min<int64_t>(kLanes, value_size - e);
        F16 rate{}, step{}, held{}, written{};
        std::memcpy(&rate, rates + e, bytes);
        std::memcpy(&step, steps + e, bytes);
        std::memcpy(&held, line + e, bytes);
        std::memcpy(&written, written_ + e, bytes);
        const F16 faded = held * exp16(rate * step);
        const F16 next = faded + written * weight;
        std::memcpy(line + e, &next, bytes);
      }
    }
  }

  void read(const float* state, int64_t row) {
    const int64_t value_size = job_.value_size;
    direct(job_.query + row * job_.key_width(), job_.scale);
    float* out = job_.out + row * job_.value_width() + head_ * value_size;
    std::fill(out, out + value_size, 0.0f);
    for (int64_t d = 0; d < job_.key_size; ++d) {
      const float* line = state + d * value_size;
      const float weight = direction_[d];
      for (int64_t e = 0; e < value_size; ++e) out[e] += line[e] * weight;
    }
  }

  // The head's vector of [G, D], perhaps over its length, times a factor.
  void direct(const T* vectors, float factor) {
    const T* vector = vectors + key_head_ * job_.key_size;
    float length = 1.0f;
    if (job_.normalizes) {
      float squares = 0.0f;
      for (int64_t d = 0; d < job_.key_size; ++d) squares += to_float(vector[d]) * to_float(vector[d]);
      length = 1.0f / std::sqrt(squares + 1e-6f);
    }
    for (int64_t d = 0; d < job_.key_size; ++d) direction_[d] = to_float(vector[d]) * length * factor;
  }

  const Recurrence<T>& job_;
  const int64_t segment_, head_, key_head_;
  float *own_, *decay_, *direction_, *written_, *sums_;
};

template <class T>
void linear_recurrence(const Recurrence<T>& job) {
  const StateRows& rows = *job.rows;
  auto body = [&](int task) {
    static thread_local std::vector<float> memory;
    RecurrentHead<T>(job, task / job.num_heads, task % job.num_heads, memory).run();
  };
  parallel(int(rows.num_segments * job.num_heads), body);
  for (int64_t segment = 0; segment < rows.num_segments; ++segment) {  // no head reads the rings any more
    const int64_t begin = rows.row_starts[segment], first = rows.first_slots[segment];
    const int64_t waits = begin + std::max<int64_t>(0, rows.committed[segment] - first);
    for (int64_t row = waits; row < rows.row_starts[segment + 1]; ++row) {
      const int64_t at = job.place(segment, first + row - begin);
      std::memcpy(job.waiting_keys + at * job.key_width(), job.key + row * job.key_width(), sizeof(T) * job.key_width());
      std::memcpy(job.waiting_values + at * job.value_width(), job.value + row * job.value_width(),
                  sizeof(T) * job.value_width());
      std::memcpy(job.waiting_gates + at * job.gate_width(), job.gates + row * job.gate_width(),
                  sizeof(float) * job.gate_width());
    }
  }
}

}  // namespace betoken
