// The tensors of a linear recurrence; see betoken.kernels.linear_recurrence.
#pragma once
#include "recurrence_plan.h"

namespace betoken {

template <class T>
struct Recurrence {
  const T *query, *key, *value;  // [R, G, D], [R, G, D], [R, H, E]: rows every `pitch` numbers
  const float* gates;  // [R, H, gate_size]: log decays and beta, or steps
  float* out;  // [R, H, E]
  float* state;  // [N, H, D, E]
  T *waiting_keys, *waiting_values;  // [N, W, G, D], [N, W, H, E]
  float* waiting_gates;  // [N, W, H, gate_size]
  const float* rates;  // [H, D, E] or null
  const StateRows* rows;
  int64_t query_pitch, key_pitch, value_pitch;
  int64_t num_waiting, num_key_heads, key_size, num_heads, value_size, gate_size;
  float scale;
  bool is_delta, normalizes, weighs;

  int64_t key_width() const { return num_key_heads * key_size; }
  int64_t value_width() const { return num_heads * value_size; }
  int64_t gate_width() const { return num_heads * gate_size; }
};

}  // namespace betoken
