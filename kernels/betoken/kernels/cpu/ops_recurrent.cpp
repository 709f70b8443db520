// The operators on recurrent states, a separate library: ops.cpp declares their arguments.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "linear_recurrence.h"
#include "state_conv.h"

namespace betoken {
namespace {

template <class T>
T* data(const at::Tensor& tensor) {
  return reinterpret_cast<T*>(tensor.data_ptr());
}

// A layer's tensors, all dense; see RecurrentPool and state_conv.
struct StateLayer {
  at::Tensor ring, state, keys, values, gates;
};

struct StateCache {
  std::vector<StateLayer> layers;
};

struct Step {
  const StateCache* cache = nullptr;
  StateRows rows;
};
thread_local Step step;

// Rows of contiguous numbers, and the stride from one row to the next: parts of wider rows are read in place.
at::Tensor by_rows(const at::Tensor& x) {
  for (int64_t dim = x.dim() - 1, size = 1; dim > 0; size *= x.size(dim--))
    if (x.size(dim) > 1 && x.stride(dim) != size) return x.contiguous();
  return x;
}
int64_t pitch(const at::Tensor& rows) { return rows.stride(0); }

template <class T>
void convolve_typed(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    const at::Tensor& ring, const StateRows& rows, at::Tensor& out) {
  state_conv(StateConv<T>{data<const T>(x), data<T>(ring), data<const T>(weight), bias ? data<const T>(*bias) : nullptr,
                          data<T>(out), &rows, pitch(x), ring.size(1), x.size(1), weight.size(0)});
}

at::Tensor convolve(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    const at::Tensor& ring, const StateRows& rows) {
  TORCH_CHECK(x.dim() == 2 && x.size(0) == rows.num_rows && x.scalar_type() == ring.scalar_type() &&
                  weight.scalar_type() == x.scalar_type() && x.size(1) == ring.size(2) && weight.size(1) == x.size(1) &&
                  (!bias || (bias->numel() == x.size(1) && bias->scalar_type() == x.scalar_type())),
              "inputs, weight and bias do not fit the ring");
  const at::Tensor dense_weight = weight.contiguous(), given = by_rows(x);
  std::optional<at::Tensor> dense_bias;
  if (bias) dense_bias = bias->contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (x.scalar_type() == at::kBFloat16) convolve_typed<bf16>(given, dense_weight, dense_bias, ring, rows, out);
  else convolve_typed<float>(given, dense_weight, dense_bias, ring, rows, out);
  return out;
}

struct Rule {
  double scale;
  bool is_delta, normalizes, weighs;
};

template <class T>
void recur_typed(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& gates,
                 const StateLayer& pool, const StateRows& rows, const std::optional<at::Tensor>& rates, const Rule& rule,
                 at::Tensor& out) {
  linear_recurrence(Recurrence<T>{data<const T>(query), data<const T>(key), data<const T>(value),
                                  data<const float>(gates), data<float>(out), data<float>(pool.state), data<T>(pool.keys),
                                  data<T>(pool.values), data<float>(pool.gates), rates ? data<const float>(*rates) : nullptr, &rows,
                                  pitch(query), pitch(key), pitch(value), pool.keys.size(1), key.size(1), key.size(2),
                                  value.size(1), value.size(2), gates.size(2), float(rule.scale), rule.is_delta,
                                  rule.normalizes, rule.weighs});
}

at::Tensor recur(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& gates,
                 const StateLayer& pool, const StateRows& rows, const std::optional<at::Tensor>& rates, const Rule& rule) {
  const at::ScalarType type = value.scalar_type();
  TORCH_CHECK(query.dim() == 3 && query.size(0) == rows.num_rows && query.sizes().equals(key.sizes()) &&
                  value.size(0) == rows.num_rows && gates.size(0) == rows.num_rows && query.scalar_type() == type &&
                  key.scalar_type() == type && pool.keys.scalar_type() == type && gates.scalar_type() == at::kFloat &&
                  key.sizes().slice(1).equals(pool.keys.sizes().slice(2)) &&
                  value.sizes().slice(1).equals(pool.values.sizes().slice(2)) &&
                  gates.sizes().slice(1).equals(pool.gates.sizes().slice(2)) &&
                  (!rates || (rates->scalar_type() == at::kFloat && rates->is_contiguous() &&
                              rates->sizes().equals(pool.state.sizes().slice(1)))),
              "queries, keys, values, gates and rates do not fit the states");
  const at::Tensor q = by_rows(query), k = by_rows(key), v = by_rows(value), g = gates.contiguous();
  at::Tensor out = at::empty(v.sizes(), v.options().dtype(at::kFloat));
  if (type == at::kBFloat16) recur_typed<bf16>(q, k, v, g, pool, rows, rates, rule, out);
  else recur_typed<float>(q, k, v, g, pool, rows, rates, rule, out);
  return out;
}

StateRows rows_of(const at::Tensor& positions, const at::Tensor& row_segments, const at::Tensor& sequences,
                  const std::optional<at::Tensor>& path_starts, const std::optional<at::Tensor>& path_slots) {
  const int32_t* columns = sequences.data_ptr<int32_t>();
  const int64_t num_segments = sequences.size(1);
  StateRows rows{positions.data_ptr<int32_t>(),
                 row_segments.data_ptr<int32_t>(),
                 columns,
                 columns + num_segments,
                 columns + 2 * num_segments,
                 columns + 3 * num_segments,
                 path_starts ? path_starts->data_ptr<int32_t>() : nullptr,
                 path_slots ? path_slots->data_ptr<int32_t>() : nullptr,
                 positions.size(0),
                 num_segments,
                 {}};
  rows.find_row_starts();
  return rows;
}

const StateLayer& layer_of_step(int64_t layer) {
  TORCH_CHECK(step.cache, "no step with states has begun on this thread");
  return step.cache->layers.at(layer);
}

// Convolve the rows' inputs [R, C] with the pending inputs in the step's ring, and store them there.
at::Tensor state_conv_op(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         int64_t layer) {
  return convolve(x, weight, bias, layer_of_step(layer).ring, step.rows);
}

at::Tensor state_conv_over(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                           const at::Tensor& ring, const at::Tensor& positions, const at::Tensor& row_segments,
                           const at::Tensor& sequences, const std::optional<at::Tensor>& path_starts,
                           const std::optional<at::Tensor>& path_slots) {
  return convolve(x, weight, bias, ring, rows_of(positions, row_segments, sequences, path_starts, path_slots));
}

// Run the rows through the recurrence of the step's states.
at::Tensor recur_op(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& gates,
                    int64_t layer, const std::optional<at::Tensor>& rates, double scale, bool is_delta, bool normalizes,
                    bool weighs) {
  return recur(query, key, value, gates, layer_of_step(layer), step.rows, rates, {scale, is_delta, normalizes, weighs});
}

at::Tensor recur_over(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& gates,
                      const at::Tensor& state, const at::Tensor& keys, const at::Tensor& values,
                      const at::Tensor& waiting_gates, const at::Tensor& positions, const at::Tensor& row_segments,
                      const at::Tensor& sequences, const std::optional<at::Tensor>& path_starts,
                      const std::optional<at::Tensor>& path_slots, const std::optional<at::Tensor>& rates, double scale,
                      bool is_delta, bool normalizes, bool weighs) {
  return recur(query, key, value, gates, {at::Tensor(), state, keys, values, waiting_gates},
               rows_of(positions, row_segments, sequences, path_starts, path_slots), rates,
               {scale, is_delta, normalizes, weighs});
}

// ring [N, Q, C], state [N, H, D, E], keys, values, gates of every layer that has them, else empty.
int64_t make_state_cache(at::TensorList tensors) {
  auto* cache = new StateCache;
  for (size_t i = 0; i + 5 <= tensors.size(); i += 5)
    cache->layers.push_back({tensors[i], tensors[i + 1], tensors[i + 2], tensors[i + 3], tensors[i + 4]});
  return reinterpret_cast<int64_t>(cache);
}

}  // namespace

TORCH_LIBRARY_IMPL(betoken, CPU, library) {
  library.impl("make_state_cache", make_state_cache);
  library.impl("state_conv", state_conv_op);
  library.impl("state_conv_over", state_conv_over);
  library.impl("recur", recur_op);
  library.impl("recur_over", recur_over);
}

}  // namespace betoken

extern "C" {

void betoken_share_recurrent_pool(void* pool) { betoken::Pool::share(pool); }

void betoken_state_cache_destroy(void* cache) { delete static_cast<betoken::StateCache*>(cache); }

// The calling thread's next `state_conv`s and `recur`s run over this batch. layout: as of `betoken_begin_step`; columns:
// states, applied, first_slots, committed, [S] each.
void betoken_begin_states(void* cache, const int32_t* layout, const int32_t* columns, int64_t num_rows,
                          int64_t num_segments, int has_trees) {
  const int32_t* page_starts = layout + 2 * num_rows;
  const int32_t* path_starts = has_trees ? page_starts + num_segments + 1 + page_starts[num_segments] : nullptr;
  betoken::Step& step = betoken::step;
  step.cache = static_cast<const betoken::StateCache*>(cache);
  step.rows.positions = layout;
  step.rows.row_segments = layout + num_rows;
  step.rows.states = columns;
  step.rows.applied = columns + num_segments;
  step.rows.first_slots = columns + 2 * num_segments;
  step.rows.committed = columns + 3 * num_segments;
  step.rows.path_starts = path_starts;
  step.rows.path_slots = has_trees ? path_starts + num_rows + 1 : nullptr;
  step.rows.num_rows = num_rows;
  step.rows.num_segments = num_segments;
  step.rows.find_row_starts();
}
}
