// The operators on low-bit weights, a separate library: ops.cpp declares their arguments.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "grouped_pack.h"
#include "linear_grouped.h"
#include "tensors.h"

namespace betoken {
namespace {

const uint8_t* bytes_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? static_cast<const uint8_t*>(tensor->data_ptr()) : nullptr;
}

// A weight [N, K] as its format's own tensors, dense, see grouped.py -> a flat tensor in the layout of grouped.h.
at::Tensor pack_grouped(const at::Tensor& values, const std::optional<at::Tensor>& high, const at::Tensor& scales,
                        const std::optional<at::Tensor>& scale_units, const std::optional<at::Tensor>& offsets,
                        const std::optional<at::Tensor>& offset_units, int64_t k, int64_t format) {
  const GroupedLayout layout(GroupedFormat::of(format), ceil_to(k, kDepth));
  const int64_t n = values.size(0), num_columns = ceil_to(n, kColumns) / kColumns;
  const GroupedSource source{bytes_of(values), bytes_of(high),         bytes_of(scales), bytes_of(scale_units),
                             bytes_of(offsets), bytes_of(offset_units), n,                k,
                             scales.size(1),    scale_units ? scale_units->size(1) : 0};
  at::Tensor packed = at::empty({num_columns * layout.bytes}, at::TensorOptions().dtype(at::kByte));
  auto body = [&](int group) {
    pack_columns(source, layout, int64_t(group) * kColumns, data<uint8_t>(packed) + group * layout.bytes);
  };
  parallel(int(num_columns), body);
  return packed;
}

// num_bytes: of one weight.
void check_packed(const GroupedLayout& layout, int64_t num_bytes, int64_t n) {
  TORCH_CHECK(num_bytes == ceil_to(n, kColumns) / kColumns * layout.bytes, "packed weights of another shape");
}

// x [..., K] -> [..., N] of this type: x's type, or float.
at::Tensor linear_grouped_to(at::ScalarType type, const at::Tensor& x, const at::Tensor& packed,
                                    const std::optional<at::Tensor>& bias, int64_t n, int64_t format) {
  auto sizes = x.sizes().vec();
  sizes.back() = n;
  at::Tensor out = at::empty(sizes, x.options().dtype(type));
  const at::Tensor rows = padded_rows(x);
  const GroupedLayout layout(GroupedFormat::of(format), rows.size(-1));
  check_packed(layout, packed.numel(), n);
  const int64_t num_rows = rows.numel() / layout.k;
  auto run = [&](auto number) {
    using T = decltype(number);
    Linear<T> results{nullptr, nullptr, bias ? data<T>(*bias) : nullptr, nullptr, num_rows, layout.k, n};
    if (type == at::kFloat) results.sums = data<float>(out);
    else results.y = data<T>(out);
    linear_grouped(GroupedLinear<T>{data<T>(rows), data<uint8_t>(packed), results, num_rows, layout});
  };
  if (x.scalar_type() == at::kBFloat16) run(bf16{});
  else run(float{});
  return out;
}

// x [S, K], packed [E, ...], bias [E, N], expert_ids [S] -> [S, N]: row s through expert expert_ids[s].
template <class T>
void expert_rows(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                 const int64_t* expert_ids, int64_t n, const GroupedLayout& layout, at::Tensor& out) {
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
    const Linear<T> results{nullptr, nullptr, bias ? data<T>(*bias) + expert * n : nullptr, to.data(), num_rows, k, n};
    linear_grouped(
        GroupedLinear<T>{from.data(), data<uint8_t>(packed) + expert * packed.size(1), results, num_rows, layout});
    for (int64_t i = 0; i < num_rows; ++i) std::memcpy(data<T>(out) + rows[i] * n, &to[i * n], sizeof(T) * n);
  }
}

at::Tensor expert_linear_grouped(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                                 const at::Tensor& expert_ids, int64_t n, int64_t format) {
  const at::Tensor ids = expert_ids.to(at::kLong).contiguous(), rows = padded_rows(x);
  const GroupedLayout layout(GroupedFormat::of(format), rows.size(1));
  check_packed(layout, packed.size(1), n);
  const std::optional<at::Tensor> dense_bias = bias ? std::optional<at::Tensor>(bias->contiguous()) : std::nullopt;
  at::Tensor out = at::empty({x.size(0), n}, x.options());
  if (x.scalar_type() == at::kBFloat16)
    expert_rows<bf16>(rows, packed, dense_bias, ids.data_ptr<int64_t>(), n, layout, out);
  else
    expert_rows<float>(rows, packed, dense_bias, ids.data_ptr<int64_t>(), n, layout, out);
  return out;
}

at::Tensor linear_grouped_op(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                                    int64_t n, int64_t format) {
  return linear_grouped_to(x.scalar_type(), x, packed, bias, n, format);
}

// The same, not rounded to the type of x.
at::Tensor linear_grouped_sums(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                                      int64_t n, int64_t format) {
  return linear_grouped_to(at::kFloat, x, packed, bias, n, format);
}

// ids [...] -> those rows of the weight, [..., k] float.
at::Tensor grouped_rows_op(const at::Tensor& ids, const at::Tensor& packed, int64_t n, int64_t k, int64_t format) {
  const at::Tensor dense = ids.contiguous();
  const int64_t* first = dense.data_ptr<int64_t>();
  for (int64_t i = 0; i < dense.numel(); ++i)
    TORCH_CHECK(first[i] >= 0 && first[i] < n, "row ", std::to_string(first[i]), " of a weight with ",
                std::to_string(n));
  const GroupedLayout layout(GroupedFormat::of(format), ceil_to(k, kDepth));
  check_packed(layout, packed.numel(), n);
  auto sizes = ids.sizes().vec();
  sizes.push_back(k);
  at::Tensor out = at::empty(sizes, at::TensorOptions().dtype(at::kFloat));
  grouped_rows(layout, data<uint8_t>(packed), first, dense.numel(), k, data<float>(out));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(betoken, CPU, library) {
  library.impl("pack_grouped", pack_grouped);
  library.impl("linear_grouped", linear_grouped_op);
  library.impl("linear_grouped_sums", linear_grouped_sums);
  library.impl("expert_linear_grouped", expert_linear_grouped);
  library.impl("grouped_rows", grouped_rows_op);
}

}  // namespace betoken

extern "C" void betoken_share_pool(void* pool) { betoken::Pool::share(pool); }
