// The kernels as torch operators. `attend` and `short_conv` find the batch in the step that the calling thread has begun,
// so that a compiled graph carries neither page tables nor caches.
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attention.h"
#include "linear.h"
#include "ops_short_conv.h"
#include "tensors.h"

namespace betoken {
namespace {

struct Layer {
  void *keys, *values;
  int64_t num_heads, key_size, value_size;
};

struct Cache {
  at::ScalarType type;
  int64_t page_size;
  std::vector<Layer> layers;
};

struct Step {
  const Cache* cache = nullptr;
  Rows rows{};
};

thread_local Step step;

template <class T>
struct Element;
template <>
struct Element<bf16> {
  using torch_type = at::BFloat16;
};
template <>
struct Element<float> {
  using torch_type = float;
};

template <class T>
Strided<T> strided(const at::Tensor& tensor) {
  return {data<std::remove_const_t<T>>(tensor), tensor.stride(0), tensor.stride(1)};
}

at::Tensor with_dense_rows(const at::Tensor& tensor) {
  return tensor.stride(2) == 1 ? tensor : tensor.contiguous();
}

template <class T>
void attend_typed(const at::Tensor& query, const at::Tensor* key, const at::Tensor* value, const Layer& layer,
                  int64_t page_size, const Rows& rows, double scale, int64_t window, double softcap,
                  const float* sinks, int64_t span, const float* slopes, at::Tensor& out) {
  Attention<T> job;
  job.query = strided<const T>(query);
  job.key = key ? strided<const T>(*key) : Strided<const T>{nullptr, 0, 0};
  job.value = value ? strided<const T>(*value) : Strided<const T>{nullptr, 0, 0};
  job.out = strided<T>(out);
  job.key_cache = static_cast<T*>(layer.keys);
  job.value_cache = static_cast<T*>(layer.values);
  job.rows = rows;
  job.page_size = page_size;
  job.num_heads = layer.num_heads;
  job.group = query.size(1) / layer.num_heads;
  job.key_size = layer.key_size;
  job.value_size = layer.value_size;
  job.scale = float(scale);
  job.softcap = float(softcap);
  job.window = window;
  job.span = span;
  job.sinks = sinks;
  job.slopes = slopes;
  attention(job);
}

at::Tensor attend_any(const at::Tensor& query, const at::Tensor* key, const at::Tensor* value, const Layer& layer,
                      int64_t page_size, const Rows& rows, double scale, int64_t window, double softcap,
                      const std::optional<at::Tensor>& sinks, int64_t span,
                      const std::optional<at::Tensor>& slopes) {
  const at::Tensor sink_floats = sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor();
  const at::Tensor slope_floats = slopes ? slopes->to(at::kFloat).contiguous() : at::Tensor();
  const float* head_sinks = sinks ? data<const float>(sink_floats) : nullptr;
  const float* head_slopes = slopes ? data<const float>(slope_floats) : nullptr;
  at::Tensor out = at::empty({query.size(0), query.size(1), layer.value_size}, query.options());
  if (query.scalar_type() == at::kBFloat16)
    attend_typed<bf16>(query, key, value, layer, page_size, rows, scale, window, softcap, head_sinks, span, head_slopes,
                       out);
  else
    attend_typed<float>(query, key, value, layer, page_size, rows, scale, window, softcap, head_sinks, span, head_slopes,
                       out);
  return out;
}

// No stream: if the compiler links its own C++ library in addition to torch's, formatting a number crashes.
std::string text(at::IntArrayRef sizes) {
  std::string list;
  for (const int64_t size : sizes) list += (list.empty() ? "" : ", ") + std::to_string(size);
  return "[" + list + "]";
}

// What is not as the caches are would be written beyond its place in them.
void check_fits(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Layer& layer) {
  const at::ScalarType type = step.cache->type;
  for (const at::Tensor* given : {&query, &key, &value})
    TORCH_CHECK(given->scalar_type() == type, "attention in ", given->scalar_type(), " over keys and values in ", type);
  const int64_t num_rows = step.rows.num_rows, num_heads = layer.num_heads;
  TORCH_CHECK(query.size(0) == num_rows, "the step has ", std::to_string(num_rows), " rows, not ",
              std::to_string(query.size(0)));
  TORCH_CHECK(key.sizes().equals({num_rows, num_heads, layer.key_size}), "keys ", text(key.sizes()),
              " do not fit the cache");
  TORCH_CHECK(value.sizes().equals({num_rows, num_heads, layer.value_size}), "values ", text(value.sizes()),
              " do not fit the cache");
  TORCH_CHECK(query.size(1) % num_heads == 0 && query.size(2) == layer.key_size, "queries ", text(query.sizes()),
              " do not fit the keys");
}

// Write the rows' keys and values in the step's cache, attend, return [R, Hq, E].
at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t layer, double scale,
                  int64_t window, double softcap, const std::optional<at::Tensor>& sinks, int64_t span,
                  const std::optional<at::Tensor>& slopes) {
  TORCH_CHECK(step.cache, "no step has begun on this thread");
  const Layer& own = step.cache->layers.at(layer);
  check_fits(query, key, value, own);
  const at::Tensor q = with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
  return attend_any(q, &k, &v, own, step.cache->page_size, step.rows, scale, window, softcap, sinks, span, slopes);
}

Rows rows_of(const at::Tensor& positions, const at::Tensor& row_segments, const at::Tensor& page_starts,
             const at::Tensor& page_ids, const std::optional<at::Tensor>& path_starts,
             const std::optional<at::Tensor>& path_slots) {
  return {positions.data_ptr<int32_t>(), row_segments.data_ptr<int32_t>(), page_starts.data_ptr<int32_t>(),
          page_ids.data_ptr<int32_t>(),  positions.size(0),               page_starts.size(0) - 1,
          path_starts ? path_starts->data_ptr<int32_t>() : nullptr,
          path_slots ? path_slots->data_ptr<int32_t>() : nullptr};
}

// The attention kernel over explicit caches; writes nothing.
at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& positions, const at::Tensor& row_segments, const at::Tensor& page_starts,
                           const at::Tensor& page_ids, const std::optional<at::Tensor>& path_starts,
                           const std::optional<at::Tensor>& path_slots, double scale, int64_t window, double softcap,
                           const std::optional<at::Tensor>& sinks, int64_t span,
                           const std::optional<at::Tensor>& slopes) {
  const Layer layer{key_cache.data_ptr(), value_cache.data_ptr(), key_cache.size(2), key_cache.size(3),
                    value_cache.size(3)};
  const Rows rows = rows_of(positions, row_segments, page_starts, page_ids, path_starts, path_slots);
  return attend_any(with_dense_rows(query), nullptr, nullptr, layer, key_cache.size(1), rows, scale, window, softcap,
                    sinks, span, slopes);
}

// Write the rows' inputs [R, C] in the step's cache, as keys without values; convolve, return [R, C].
at::Tensor short_conv_op(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         int64_t layer) {
  TORCH_CHECK(step.cache, "no step has begun on this thread");
  const Layer& own = step.cache->layers.at(layer);
  TORCH_CHECK(x.scalar_type() == step.cache->type && own.num_heads == 1 && own.value_size == 0 &&
                  x.sizes().equals({step.rows.num_rows, own.key_size}),
              "inputs ", text(x.sizes()), " do not fit the cache");
  const at::Tensor dense = x.contiguous();
  return convolve_any(&dense, own.keys, weight, bias, step.rows, step.cache->page_size);
}

// The same over explicit inputs [pages, page_size, C]; writes nothing.
at::Tensor paged_short_conv(const at::Tensor& inputs, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const at::Tensor& positions, const at::Tensor& row_segments, const at::Tensor& page_starts,
                            const at::Tensor& page_ids, const std::optional<at::Tensor>& path_starts,
                            const std::optional<at::Tensor>& path_slots) {
  const Rows rows = rows_of(positions, row_segments, page_starts, page_ids, path_starts, path_slots);
  return convolve_any(nullptr, inputs.data_ptr(), weight, bias, rows, inputs.size(1));
}

// weight [N, K] -> a flat tensor in the layout of linear.h.
at::Tensor pack_linear(const at::Tensor& weight) {
  const at::Tensor dense = weight.contiguous();
  const int64_t n = dense.size(0), k = dense.size(1);
  if (dense.scalar_type() == at::kBFloat16) {
    at::Tensor packed = at::empty({ceil_to(n, kGroup) * ceil_to(k, kDepth)}, dense.options());
    pack_bf16(data<bf16>(dense), n, k, data<bf16>(packed));
    return packed;
  }
  at::Tensor packed = at::empty({ceil_to(n, kGroup) * k}, dense.options());
  pack_float(data<float>(dense), n, k, data<float>(packed));
  return packed;
}

// x [..., K] -> [..., N] of this type: x's type, or float.
at::Tensor linear_to(at::ScalarType type, const at::Tensor& x, const at::Tensor& packed,
                     const std::optional<at::Tensor>& bias, int64_t n) {
  TORCH_CHECK(x.scalar_type() == packed.scalar_type(), "rows and weights differ in type");
  auto sizes = x.sizes().vec();
  sizes.back() = n;
  at::Tensor out = at::empty(sizes, x.options().dtype(type));
  const bool half = x.scalar_type() == at::kBFloat16;
  const at::Tensor rows = half ? padded_rows(x) : x.contiguous();
  const int64_t k = rows.size(-1);
  if (k == 0) return bias ? out.copy_(*bias) : out.zero_();  // experts that a configuration makes empty
  const int64_t num_rows = rows.numel() / k;
  if (half) {
    Linear<bf16> job{data<bf16>(rows), data<bf16>(packed), bias ? data<bf16>(*bias) : nullptr, nullptr, num_rows, k, n};
    if (type == at::kFloat) job.sums = data<float>(out);
    else job.y = data<bf16>(out);
    linear(job);
  } else {
    linear(Linear<float>{data<float>(rows), data<float>(packed), bias ? data<float>(*bias) : nullptr,
                         data<float>(out), num_rows, k, n});
  }
  return out;
}

at::Tensor linear_op(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t n) {
  return linear_to(x.scalar_type(), x, packed, bias, n);
}

// The same, not rounded to the type of x.
at::Tensor linear_sums(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t n) {
  return linear_to(at::kFloat, x, packed, bias, n);
}

// x [S, K], packed [E, ...], bias [E, N], expert_ids [S] -> [S, N]: row s through expert expert_ids[s].
template <class T>
void expert_rows(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                 const int64_t* expert_ids, int64_t n, at::Tensor& out) {
  const int64_t k = x.size(1), num_experts = packed.size(0);
  std::vector<std::vector<int64_t>> rows_of(num_experts);
  for (int64_t row = 0; row < x.size(0); ++row)
    if (expert_ids[row] >= 0 && expert_ids[row] < num_experts) rows_of[expert_ids[row]].push_back(row);
    else std::memset(data<T>(out) + row * n, 0, sizeof(T) * n);
  std::vector<T> from, to;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const std::vector<int64_t>& rows = rows_of[expert];
    const int64_t num_rows = int64_t(rows.size());
    if (num_rows == 0) continue;
    from.resize(num_rows * k);
    to.resize(num_rows * n);
    for (int64_t i = 0; i < num_rows; ++i) std::memcpy(&from[i * k], data<T>(x) + rows[i] * k, sizeof(T) * k);
    linear(Linear<T>{from.data(), data<T>(packed) + expert * packed.size(1), bias ? data<T>(*bias) + expert * n : nullptr,
                     to.data(), num_rows, k, n});
    for (int64_t i = 0; i < num_rows; ++i) std::memcpy(data<T>(out) + rows[i] * n, &to[i * n], sizeof(T) * n);
  }
}

at::Tensor expert_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                         const at::Tensor& expert_ids, int64_t n) {
  TORCH_CHECK(x.scalar_type() == packed.scalar_type(), "rows and weights differ in type");
  const at::Tensor ids = expert_ids.to(at::kLong).contiguous();
  const std::optional<at::Tensor> dense_bias = bias ? std::optional<at::Tensor>(bias->contiguous()) : std::nullopt;
  at::Tensor out = at::empty({x.size(0), n}, x.options());
  if (x.scalar_type() == at::kBFloat16)
    expert_rows<bf16>(padded_rows(x), packed, dense_bias, ids.data_ptr<int64_t>(), n, out);
  else
    expert_rows<float>(x.contiguous(), packed, dense_bias, ids.data_ptr<int64_t>(), n, out);
  return out;
}

// A copy that a compiler may not fold into its readers.
at::Tensor materialize(const at::Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); }

}  // namespace

TORCH_LIBRARY(betoken, library) {
  library.def("materialize(Tensor x) -> Tensor");
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int n) -> Tensor");
  library.def("linear_sums(Tensor x, Tensor packed, Tensor? bias, int n) -> Tensor");
  library.def("expert_linear(Tensor x, Tensor packed, Tensor? bias, Tensor expert_ids, int n) -> Tensor");
  // Implemented by ops_grouped.cpp, which takes longer to compile and is loaded only for models with low-bit weights.
  library.def(
      "pack_grouped(Tensor values, Tensor? high, Tensor scales, Tensor? scale_units, Tensor? offsets, "
      "Tensor? offset_units, int k, int format) -> Tensor");
  library.def("linear_grouped(Tensor x, Tensor packed, Tensor? bias, int n, int format) -> Tensor");
  library.def("linear_grouped_sums(Tensor x, Tensor packed, Tensor? bias, int n, int format) -> Tensor");
  library.def(
      "expert_linear_grouped(Tensor x, Tensor packed, Tensor? bias, Tensor expert_ids, int n, int format) -> Tensor");
  // Implemented by ops_int8.cpp, which is loaded only for models with int8 activations.
  library.def("linear_int8(Tensor x, Tensor packed, Tensor? bias, int n, int format) -> Tensor");
  library.def("linear_int8_sums(Tensor x, Tensor packed, Tensor? bias, int n, int format) -> Tensor");
  library.def(
      "expert_linear_int8(Tensor x, Tensor packed, Tensor? bias, Tensor expert_ids, int n, int format) -> Tensor");
  library.def("grouped_rows(Tensor ids, Tensor packed, int n, int k, int format) -> Tensor");
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, int layer, float scale, int window, float softcap, "
      "Tensor? sinks, int span, Tensor? slopes) -> Tensor");
  library.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor positions, Tensor row_segments, "
      "Tensor page_starts, Tensor page_ids, Tensor? path_starts, Tensor? path_slots, float scale, int window, "
      "float softcap, Tensor? sinks, int span, Tensor? slopes) -> Tensor");
  library.def("short_conv(Tensor x, Tensor weight, Tensor? bias, int layer) -> Tensor");
  library.def(
      "paged_short_conv(Tensor inputs, Tensor weight, Tensor? bias, Tensor positions, Tensor row_segments, "
      "Tensor page_starts, Tensor page_ids, Tensor? path_starts, Tensor? path_slots) -> Tensor");
  library.def("make_state_cache(Tensor[] tensors) -> int");
  library.def("state_conv(Tensor x, Tensor weight, Tensor? bias, int layer) -> Tensor");
  library.def(
      "state_conv_over(Tensor x, Tensor weight, Tensor? bias, Tensor ring, Tensor positions, Tensor row_segments, "
      "Tensor sequences, Tensor? path_starts, Tensor? path_slots) -> Tensor");
  library.def(
      "recur(Tensor query, Tensor key, Tensor value, Tensor gates, int layer, Tensor? rates, float scale, "
      "bool is_delta, bool normalizes, bool weighs) -> Tensor");
  library.def(
      "recur_over(Tensor query, Tensor key, Tensor value, Tensor gates, Tensor state, Tensor keys, Tensor values, "
      "Tensor waiting_gates, Tensor positions, Tensor row_segments, Tensor sequences, Tensor? path_starts, "
      "Tensor? path_slots, Tensor? rates, float scale, bool is_delta, bool normalizes, bool weighs) -> Tensor");
}

TORCH_LIBRARY_IMPL(betoken, CPU, library) {
  library.impl("materialize", materialize);
  library.impl("pack_linear", pack_linear);
  library.impl("linear", linear_op);
  library.impl("linear_sums", linear_sums);
  library.impl("expert_linear", expert_linear);
  library.impl("attend", attend);
  library.impl("paged_attention", paged_attention);
  library.impl("short_conv", short_conv_op);
  library.impl("paged_short_conv", paged_short_conv);
}

}  // namespace betoken

extern "C" {

// The process's pool, for the other library.
void* betoken_pool() { return &betoken::Pool::get(); }

void betoken_set_num_threads(int num_threads) { betoken::Pool::get().set_num_threads(num_threads); }

// How bf16 products are computed here.
const char* betoken_products() {
  return betoken::has_tiles() ? "tile" : betoken::has_dots() ? "dot" : "vector";
}

// The compiler of this library: it decides which products and sums are fused.
const char* betoken_compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

// is_half: bf16, else float. layers: five numbers a layer: keys, values (addresses), heads, key size, value size.
void* betoken_cache_create(int is_half, int64_t page_size, int64_t num_layers, const int64_t* layers) {
  auto* cache = new betoken::Cache{is_half ? at::kBFloat16 : at::kFloat, page_size, {}};
  for (int64_t i = 0; i < num_layers; ++i, layers += 5)
    cache->layers.push_back({reinterpret_cast<void*>(layers[0]), reinterpret_cast<void*>(layers[1]), layers[2],
                             layers[3], layers[4]});
  return cache;
}

void betoken_cache_destroy(void* cache) { delete static_cast<betoken::Cache*>(cache); }

// The calling thread's next `attend`s and `short_conv`s run over this batch: positions [R], row_segments [R], page_starts [S + 1], page_ids
// and, with trees, path_starts [R + 1], path_slots.
void betoken_begin_step(void* cache, const int32_t* numbers, int64_t num_rows, int64_t num_segments, int has_trees) {
  const int32_t* page_starts = numbers + 2 * num_rows;
  const int32_t* page_ids = page_starts + num_segments + 1;
  const int32_t* path_starts = has_trees ? page_ids + page_starts[num_segments] : nullptr;
  betoken::step.cache = static_cast<const betoken::Cache*>(cache);
  betoken::step.rows = {numbers,  numbers + num_rows, page_starts, page_ids,
                          num_rows, num_segments,       path_starts, has_trees ? path_starts + num_rows + 1 : nullptr};
  betoken::Pool::get().wake();
}
}
